"""What may stand in a journal: strangers wrote some of it, so everything is short, in one line, and finite."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

KINDS = ("joined", "left", "banned", "unbanned", "rollback", "checkpoint", "outlier", "refused", "warning")
NAME, DEVICE, CAPTION, TEXT = 96, 80, 300, 500  # characters
FIELDS = 12  # of an event's detail
LARGEST = 2.0**53  # whole numbers up to here are exact in SQLite, JSON and JavaScript alike

_FIELD = re.compile(r"[a-z_]{1,32}")


def line(text: object, longest: int) -> str:
    """Text in one line without control characters (of direction, too), cut at `longest`."""
    one = " ".join(str(text).split())
    one = "".join(c for c in one if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn") or c == "\u200d")
    return one if len(one) <= longest else one[: longest - 1] + "…"


def amount(value: Any) -> float:
    """A number from 0 to 2^53; what is none becomes 0."""
    try:
        value = float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return min(max(value, 0.0), LARGEST) if math.isfinite(value) else 0.0


def whole(value: Any) -> int:
    """A whole number from 0 to 2^53; what is none becomes 0."""
    return int(amount(value))


def maybe(value: Any) -> float | None:
    """A finite number of either sign, or None: a loss that is NaN is not known."""
    try:
        value = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return value if math.isfinite(value) and abs(value) <= LARGEST else None


def moment(value: float) -> float:
    """Seconds since the Unix epoch. Raises ValueError: a time is the writer's own, so a wrong one is a bug."""
    if not math.isfinite(value) or not 0 <= value <= LARGEST:
        raise ValueError(f"{value} is no time in seconds since the Unix epoch")
    return float(value)


def fields(detail: Mapping[str, Any]) -> dict[str, str | float | int | bool]:
    """An event's detail: names of fields -> short texts, finite numbers, yes or no. None is left out.

    Raises ValueError for names that no template could hold, and for too many.
    """
    if len(detail) > FIELDS or not all(_FIELD.fullmatch(name) for name in detail):
        raise ValueError(f"an event has at most {FIELDS} fields with plain names, not {list(detail)}")
    return {name: _value(name, value) for name, value in detail.items() if value is not None}


def _value(name: str, value: Any) -> str | float | int | bool:
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) <= LARGEST):
        return value
    if isinstance(value, float) and math.isfinite(value) and abs(value) <= LARGEST:
        return value
    return line(value, NAME if name in ("username", "by") else CAPTION)


def account_key(username: str) -> str:
    """Equal for the same account: the Hub does not tell Alice from alice."""
    return line(username, NAME).casefold()
