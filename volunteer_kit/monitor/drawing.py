"""Draws the run's captions with a checkpoint: `python -m volunteer_kit.monitor.drawing`, see chore.py.

In: run, checkpoint (a folder), folder (the monitor's). Out: epoch, pictures [{"caption", "path"}], seconds.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from volunteer_kit.monitor.chore import do_chore


def draw(task: dict[str, Any]) -> dict[str, Any]:
    import torch

    from volunteer_kit.checkpoint import load_checkpoint
    from volunteer_kit.home import Home
    from volunteer_kit.runs import build_model, load_run
    from volunteer_kit.session.pictures import DrawPictures

    torch.set_num_threads(1)
    started, told = time.monotonic(), {}

    def emit(event: str, **fields: Any) -> None:
        told[event] = fields

    run = load_run(task["run"])
    model = build_model(run)
    found = load_checkpoint(task["checkpoint"], fingerprint=run.fingerprint)
    model.load_tensors(found.model)
    DrawPictures(run, Home(task["folder"]), emit).draw(model, found.epoch)
    if "pictures" not in told:
        return {"error": told.get("warning", {}).get("message", "nothing was drawn")}
    return {**told["pictures"], "seconds": time.monotonic() - started}


if __name__ == "__main__":
    sys.exit(do_chore(draw))
