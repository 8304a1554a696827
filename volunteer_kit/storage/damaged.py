"""Reading what was written before: what cannot be read is kept aside and told, never taken for nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

LARGEST = 2**20  # bytes of a file of ours; a longer one is not read
KEPT_ASIDE = 20  # damaged files of one name


class DamagedFile(ValueError):
    """A file that is there, and not what its writer wrote: cut off, empty, of another kind, or of a newer version.

    :ivar path: of the file
    :ivar reason: what is wrong with it, in words
    """

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path} is damaged, or of another version of the kit ({reason}).")
        self.path, self.reason = path, reason


def _anything(found: Any) -> Any:
    return found


def read_json(path: str | Path, check: Callable[[Any], T] = _anything, limit: int = LARGEST) -> T:
    """What `check` makes of what is in a JSON file; numbers in it are finite.

    :param check: raises ValueError, TypeError, LookupError or the like for what its writer cannot have written
    Raises FileNotFoundError, DamagedFile: also for what is no file, and for one that the disk does not give.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            text = file.read(limit + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedFile(path, error.strerror or str(error)) from error
    if not text.strip(b"\0 \r\n\t"):
        raise DamagedFile(path, "it is empty")
    if len(text) > limit:
        raise DamagedFile(path, f"it has more than {limit:,} bytes")
    try:
        found = json.loads(text.decode("utf-8"), parse_constant=_refuse, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise DamagedFile(path, "it is no text") from error
    except (ValueError, RecursionError) as error:
        raise DamagedFile(path, str(error).partition("\n")[0][:200]) from error
    try:
        return check(found)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise DamagedFile(path, f"it holds something else: {error!s:.200}") from error


def set_aside(path: str | Path, beside: tuple[str, ...] = ()) -> Path:
    """Give a damaged file or folder the name NAME.damaged, so that nothing is written over it. :returns: where it is.

    :param beside: endings of files that belong to it, and go with it: ("-wal", "-shm")
    Raises OSError.
    """
    path = Path(path)
    names = (f"{path.name}.damaged" + (f"-{number}" if number > 1 else "") for number in range(1, KEPT_ASIDE))
    last = path.with_name(f"{path.name}.damaged-{KEPT_ASIDE}")
    place = next((path.with_name(name) for name in names if not os.path.lexists(path.with_name(name))), last)
    os.rename(path, place)
    for ending in beside:
        with suppress(FileNotFoundError):
            os.rename(f"{path}{ending}", f"{place}{ending}")
    return place


def keep_aside(path: str | Path, beside: tuple[str, ...] = ()) -> str:
    """The same, for a message: " It is kept as ...", or why it is not."""
    try:
        return f" It is kept as {set_aside(path, beside)}."
    except OSError as error:
        return f" It cannot be moved away ({error.strerror or error})."


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0:
        raise ValueError(f"{text[:20]} is too large a number")
    return number
