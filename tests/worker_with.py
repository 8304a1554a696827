"""volunteer_kit.worker with something in it: argv[1] is JSON, {} or {"attack": NAME of large_numbers, "when": PATH}."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from volunteer_kit import worker


def main() -> int:
    settings = json.loads(sys.argv[1])
    from tests.attacks import send_large_numbers

    if settings.get("attack") == "large_numbers":
        send_large_numbers(Path(settings["when"]))
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
