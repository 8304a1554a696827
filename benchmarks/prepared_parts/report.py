"""Reads the output of `volunteer-kit doctor`, and judges whether it names a fault."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Said:
    """One finding, as it was read."""

    level: str
    text: str
    ways: list[str] = field(default_factory=list)


def printed(output: Path) -> str:
    try:
        return output.read_text("utf-8")
    except UnicodeDecodeError:
        return output.read_text("latin-1")


def read(output: Path) -> dict[str, Said]:
    """Name of the finding -> what was said."""
    found: dict[str, Said] = {}
    last: Said | None = None
    for line in printed(output).splitlines():
        if begin := re.match(r"(ok|warning|problem) +(\S.*?)  +(.*)", line):
            last = found[begin[2]] = Said(begin[1], begin[3])
        elif (way := re.match(r" +-> (.*)", line)) and last is not None:
            last.ways.append(way[1])
    return found


@dataclass(frozen=True)
class Naming:
    """The words that one finding has to hold.

    :param words: regular expressions that its text has
    :param ways: those that its ways out have
    """

    finding: str
    level: str
    words: tuple[str, ...]
    ways: tuple[str, ...] = ()

    def is_met(self, found: dict[str, Said]) -> bool:
        said = found.get(self.finding)
        if said is None or said.level != self.level:
            return False
        ways = "\n".join(said.ways)
        return all(re.search(one, said.text) for one in self.words) and all(re.search(one, ways) for one in self.ways)
