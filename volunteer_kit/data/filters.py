"""Which records are used: one rule for every source, whatever it calls its columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from .settings import Columns, Filters
from .source import LeftOut

MAX_CAPTION = 10_000  # characters; what follows is cut off, for a tokenizer may take minutes for megabytes


def accept(caption: Any, meta: Mapping[str, Any], filters: Filters, columns: Columns) -> str:
    """A record's caption, cleaned, if what is known about the record lets it pass. Raises LeftOut with the first
    cause that applies; duplicates are the source's to find."""
    caption = " ".join(caption[:MAX_CAPTION].lstrip("\ufeff").split()) if isinstance(caption, str) else ""
    if not caption:
        raise LeftOut("missing_caption")
    if len(caption) < filters.min_caption:
        raise LeftOut("short_caption")
    if filters.nsfw_allowed is not None and meta.get(columns.nsfw) not in filters.nsfw_allowed:
        raise LeftOut("nsfw")
    width, height = meta.get(columns.width), meta.get(columns.height)
    known = _is_size(width) and _is_size(height)
    if known and aspect(width, height) > filters.max_aspect:
        raise LeftOut("aspect")
    if filters.min_size and not (known and min(width, height) >= filters.min_size):
        raise LeftOut("too_small")
    if filters.min_similarity is not None:
        similarity = meta.get(columns.similarity)
        if not (_is_number(similarity) and similarity >= filters.min_similarity):
            raise LeftOut("similarity")
    if filters.languages is not None and meta.get(columns.language) not in filters.languages:
        raise LeftOut("language")
    return caption


def aspect(width: float, height: float) -> float:
    """Longer side : shorter side."""
    return max(width, height) / max(min(width, height), 1e-9)


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _is_size(value: Any) -> bool:
    return _is_number(value) and value > 0
