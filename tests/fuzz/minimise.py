"""Of many inputs those few that do all that the others do, for a corpus that is stored and decoded in every test."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

from tests.fuzz.target import Fault, Target, examine

MOST_INPUTS, MOST_BYTES = 60, 40_000  # of one target
OURS = ("/volunteer_kit/", "/hivemind/utils/serializer", "/hivemind/dht/", "/hivemind/compression/")


def minimise(target: Target, inputs: Iterable[bytes]) -> list[bytes]:
    """Inputs that cover all steps from line to line of our code, the shortest ones; those with faults are left out."""
    kept: list[bytes] = []
    known: set[Any] = set()
    for data in sorted(set(inputs), key=lambda one: (len(one), one)):
        if len(kept) == MOST_INPUTS or sum(map(len, kept)) + len(data) > MOST_BYTES:
            break
        covered = _cover(target, data)
        if covered - known:
            known |= covered
            kept.append(data)
    return kept


def _cover(target: Target, data: bytes) -> set[Any]:
    """Steps from one line to the next within a function, while an input is decoded."""
    steps: set[Any] = set()
    last: dict[int, int] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not any(part in code.co_filename for part in OURS):
            return None
        steps.add((code.co_filename, last.get(id(frame), 0), frame.f_lineno))
        last[id(frame)] = frame.f_lineno
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        examine(target, data)
    except Fault:
        return set()
    finally:
        sys.settrace(before)
    return steps
