"""How a benchmark behind lines ends: with its figures, or with the reason why there are no lines here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.netlab_parts.kernel import NoNetlab


def end_with(main: Callable[[], int]) -> None:
    """Run it; where there are no namespaces or shapers, a sentence says so."""
    try:
        sys.exit(main())
    except NoNetlab as e:
        sys.exit(str(e))


def as_told(figures: Mapping[str, Any]) -> str:
    """The last line, one of flat JSON."""
    return json.dumps({key: float(f"{v:.4g}") if isinstance(v, float) else v for key, v in figures.items()})
