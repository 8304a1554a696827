"""volunteer_kit.worker with something in it: argv[1] is JSON, {} or {"attack": NAME of large_numbers, "when": PATH}."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from volunteer_kit import worker


def send_large_numbers(when: Path) -> None:
    """Honest until the file `when` is there; then its gradients turned round, a thousand times as long as they are,
    which the plain mean follows uphill."""
    from volunteer_kit.swarm.node.member import NodeOptimizer

    honest = NodeOptimizer.step

    def step(self, batch_size, grad_scale=1.0, names=()):
        return honest(self, batch_size, grad_scale * (-1e-3 if when.exists() else 1.0), names)

    NodeOptimizer.step = step


def main() -> int:
    settings = json.loads(sys.argv[1])
    if settings.get("attack") == "large_numbers":
        send_large_numbers(Path(settings["when"]))
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
