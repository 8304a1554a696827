"""What befalls a file between two starts: each damage as a function of its path."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _says(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def _numbers(number: str) -> Callable[[Path], None]:
    """Every number in it is this one."""

    def change(value: object) -> object:
        if isinstance(value, dict):
            return {key: change(one) for key, one in value.items()}
        if isinstance(value, list):
            return [change(one) for one in value]
        return "NUMBER" if isinstance(value, int | float) and not isinstance(value, bool) else value

    return lambda path: (
        path.write_text(json.dumps(change(json.loads(path.read_text()))).replace('"NUMBER"', number)) and None
    )


def _newer(path: Path) -> None:
    """A later version has more to say."""
    found = json.loads(path.read_text())
    for one in found if isinstance(found, list) else [found]:
        if isinstance(one, dict):
            one["added_later"] = {"format": 2}
    path.write_text(json.dumps({"format": 2, "content": found}))


BYTES = {
    "one byte short": _cut,
    "empty": _says(b""),
    "zeros": _says(bytes(4096)),
    "no text": _says(b"\xff\xfe\x00\x80" * 100),
    "a folder": _folder,
}
JSON = {
    **BYTES,
    "null": _says(b"null"),
    "a number": _says(b"7"),
    "a list of none": _says(b"[]"),
    "an object of none": _says(b"{}"),
    "other fields": _says(b'[{"unknown": 1}]'),
    "nested": _says(b"[" * 50_000),
    "not a number": _numbers("NaN"),
    "infinite numbers": _numbers("1e999"),
    "huge numbers": _numbers("9" * 400),
    "negative numbers": _numbers("-1"),
    "a newer version": _newer,
}


def aside(path: Path) -> list[Path]:
    """Where what was damaged is kept."""
    return sorted(path.parent.glob(f"{path.name}.damaged*"))
