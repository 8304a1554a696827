"""The process that asks the swarm. stdin: one line, Wanted. stdout: JSON, {"say"} as it goes, {"path"} or {"error"}."""

from __future__ import annotations

import json
import os
import sys

from volunteer_kit import output
from volunteer_kit.fetch import Wanted


def main() -> int:
    """Exit code 2 after an error that was told."""
    output.keep_up()
    wanted = Wanted.model_validate_json(sys.stdin.readline())
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is log

    def tell(**fields: str) -> None:
        print(json.dumps(fields), file=out)

    from volunteer_kit.fetch.download import download_checkpoint
    from volunteer_kit.runs import load_run

    try:
        path = download_checkpoint(
            load_run(wanted.run), wanted.initial_peers, wanted.out, wanted.timeout, say=lambda line: tell(say=line)
        )
    except OSError as error:  # SwarmError and CheckpointError are
        tell(error=str(error), kind=getattr(error, "kind", type(error).__name__))
        return 2
    tell(path=str(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
