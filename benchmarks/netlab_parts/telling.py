"""How a benchmark behind lines ends: with its figures, or with the reason why it cannot begin."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.netlab_parts.descendants import end_descendants_with_us
from benchmarks.netlab_parts.kernel import NoNetlab
from volunteer_kit.run_reader import RunError


def end_with(main: Callable[[], int]) -> None:
    """Run it; where there are no namespaces or shapers, or --swarm is wrong, a sentence says so.

    All processes that it starts end with it."""
    end_descendants_with_us()
    try:
        sys.exit(main())
    except (NoNetlab, RunError) as e:
        sys.exit(str(e))


def as_told(figures: Mapping[str, Any]) -> str:
    """The last line, one of flat JSON."""
    return json.dumps({key: float(f"{v:.4g}") if isinstance(v, float) else v for key, v in figures.items()})
