"""Brings a checkpoint to the Hub: `python -m volunteer_kit.monitor.push`, see chore.py.

In: repo, checkpoint (a folder), run, epoch, history, leaders, pictures [[caption, path]], token, host (the folder of
the host's offer, or null). Out: url.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from volunteer_kit.monitor.chore import do_chore


def push(task: dict[str, Any]) -> dict[str, Any]:
    from huggingface_hub import CommitOperationAdd, HfApi

    from volunteer_kit.checkpoint import load_checkpoint
    from volunteer_kit.model.transformers_model import save_pretrained
    from volunteer_kit.monitor import fine_tune_card
    from volunteer_kit.monitor.card import CURVE, draw_curve, model_card
    from volunteer_kit.runs import FineTuneConfig, load_run
    from volunteer_kit.swarm.rounds.beside import put_buffers
    from volunteer_kit.ways_in import read_offer

    run, epoch, checkpoint = load_run(task["run"]), task["epoch"], Path(task["checkpoint"])
    api = HfApi(token=task["token"] or None)
    repo = api.create_repo(task["repo"], exist_ok=True).repo_id
    with tempfile.TemporaryDirectory(prefix="volunteer-kit-push-") as scratch:
        folder = Path(scratch)
        files = {path.name: path for path in checkpoint.iterdir() if path.is_file()}
        files["run.yaml"] = _run_file(task["run"], folder / "run.yaml")
        if isinstance(run, FineTuneConfig):
            found = load_checkpoint(checkpoint, fingerprint=run.fingerprint)
            made = save_pretrained(run.model, found.model, folder / "model", partial(put_buffers, found.model))
            files |= {fine_tune_card.place_of(name, run.model): path for name, path in made.items()}
        if curve := draw_curve(task["history"], folder / CURVE, f"{run.run_id}: loss by step {epoch:,}"):
            files[CURVE] = curve
        shown = []
        for number, (caption, path) in enumerate(task["pictures"]):
            if Path(path).is_file():
                shown.append((caption, f"pictures/{number}.png"))
                files[shown[-1][1]] = Path(path)
        offer = read_offer(Path(task["host"])) if task["host"] else None
        card = model_card(run, repo, epoch, task["history"], task["leaders"], shown, offer=offer)
        operations = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
        operations.append(CommitOperationAdd("README.md", card.encode()))
        commit = api.create_commit(repo, operations, commit_message=f"Step {epoch}")
    return {"url": commit.commit_url, "repo": repo}


def _run_file(run: dict[str, Any], path: Path) -> Path:
    import yaml

    path.write_text(yaml.safe_dump(run, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(do_chore(push))
