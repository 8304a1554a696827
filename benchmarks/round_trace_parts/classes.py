"""The package's classes: what they override, and how long their chains are."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

OURS = "volunteer_kit"
THEIRS = "hivemind"


class Override(NamedTuple):
    """A method of ours in place of a private one of hivemind's."""

    own: type
    base: type
    name: str

    def __str__(self) -> str:
        return f"{self.own.__qualname__}.{self.name} ({self.base.__qualname__})"


def is_of(each: type, package: str) -> bool:
    """Whether a class is defined in this package."""
    return each.__module__.partition(".")[0] == package


def is_private(name: str) -> bool:
    """Whether a name begins with an underscore, and is not one of Python's."""
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def classes_of(packages: Iterable[str]) -> list[type]:
    """All classes that the modules of these packages of ours define. Modules that cannot be imported here, for want of
    an extra, are left out."""
    found: dict[type, None] = {}
    for package in packages:
        root = importlib.import_module(package)
        names = [package, *(each.name for each in pkgutil.walk_packages(root.__path__, f"{package}."))]
        for name in names:
            if name.endswith(".__main__"):
                continue
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue
            for _, each in inspect.getmembers(module, inspect.isclass):
                if each.__module__ == name:
                    found[each] = None
    return list(found)


def private_overrides(classes: Iterable[type], theirs: str = THEIRS) -> list[Override]:
    """Methods with a leading underscore of their classes, anew in these."""
    found = []
    for own in classes:
        for name, value in vars(own).items():
            if is_private(name) and (callable(value) or isinstance(value, property | staticmethod | classmethod)):
                base = next((b for b in own.__mro__[1:] if is_of(b, theirs) and name in vars(b)), None)
                if base is not None:
                    found.append(Override(own, base, name))
    return found


def longest_chain(classes: Iterable[type], ours: str = OURS) -> list[type]:
    """The chain of bases with the most classes of ours, the last one first; only those."""

    @cache
    def chain(each: type) -> tuple[type, ...]:
        above = max((chain(base) for base in each.__bases__), key=len, default=())
        return (each, *above) if is_of(each, ours) else above

    return list(max(map(chain, classes), key=len, default=()))


def lines_of(folder: Path) -> int:
    """Lines of all Python files below it."""
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))
