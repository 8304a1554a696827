"""Files that a killed process, a full disk or a damaged sector must not turn into a loss: how they are written, read,
and kept aside when they cannot be read."""

from volunteer_kit.storage.damaged import DamagedFile, keep_aside, read_json, set_aside
from volunteer_kit.storage.whole import (
    clear_if_left,
    clear_leftovers,
    flush,
    part_folder,
    put_in_place,
    write_once,
    write_whole,
)

__all__ = [
    "DamagedFile",
    "clear_if_left",
    "clear_leftovers",
    "flush",
    "keep_aside",
    "part_folder",
    "put_in_place",
    "read_json",
    "set_aside",
    "write_once",
    "write_whole",
]
