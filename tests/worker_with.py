"""volunteer_kit.worker with something in it: argv[1] is JSON, {} or {"attack": NAME of large_numbers, "when": PATH}."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

from volunteer_kit import worker


def main() -> int:
    settings = json.loads(sys.argv[1])
    from tests.attacks import send_large_numbers
    from volunteer_kit.swarm.optimizer import SwarmOptimizer

    if settings.get("attack") == "large_numbers":
        send_large_numbers(Path(settings["when"]))
    if "obey_orders" not in inspect.getsource(SwarmOptimizer.step):
        honest = SwarmOptimizer.step

        def step(self, *args, **kwargs):
            return True if self.obey_orders() else honest(self, *args, **kwargs)

        SwarmOptimizer.step = step
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
