"""Tell which of two kits is older: kits of one protocol may still read a run's settings differently."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from volunteer_kit import __version__
from volunteer_kit.packages import update_lines

VERSION = r"[0-9A-Za-z.+!-]{0,32}\Z"
UNTOLD = "one of before 0.1.1, which does not tell its version"  # "" in a record


def kit_words(others: Iterable[str], own: str = __version__) -> str:
    """What to do where the others' kit is another version than ours, and which one is older; "" where it is the same.

    :param others: versions as their records tell them
    """
    counted = Counter(others)
    if not counted or own in counted:
        return ""
    theirs = counted.most_common(1)[0][0]
    if _order(theirs) == _order(own):
        return ""
    named = f"volunteer_kit {theirs}" if theirs else f"volunteer_kit, {UNTOLD}"
    if _order(theirs) > _order(own):
        return f"Your kit is older: the others have {named}, this machine has {own}.\n{update_lines()}"
    return (
        f"The others' kit is older: they have {named}, this machine has {own}.\n"
        f"{update_lines()}\n3. Or let the host and the others come to {own}."
    )


def _order(version: str) -> tuple[int, ...]:
    """Of `1.10.2`, or of `1.10.2.dev3+local`, whose parts without a number count for nothing."""
    release = re.match(r"(\d{1,9}!)?(\d{1,9}(\.\d{1,9})*)", version)
    numbers = [int(part) for part in release[2].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
