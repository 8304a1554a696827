"""No attribute has two owners: a class sets none that a base class of ours sets, unless it says so.

Two classes of one chain that each keep a timer under the same name share it without knowing. Where a class means the
attribute of its base, a comment in its body names it:

    # Overrides: scheduled_grads, _follow
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DECLARED = re.compile(r"^\s*# Overrides: (.*)$", re.MULTILINE)


class Class(NamedTuple):
    """One class of the package. `bases`: full names of those that are ours; `attributes`: name -> line that sets it."""

    name: str
    bases: list[str]
    attributes: dict[str, int]
    declared: set[str]


def classes_of(root: Path, package: str) -> dict[str, Class]:
    """All classes of a package by full name, their bases resolved across modules."""
    trees: dict[str, ast.Module] = {}
    texts: dict[str, list[str]] = {}
    names: dict[str, dict[str, str]] = {}  # module -> name in it -> full name
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text()
        trees[module], texts[module] = ast.parse(text), text.splitlines()
        inside = module if is_package else module.rpartition(".")[0]
        names[module] = dict(_names(trees[module], module, inside))
    found = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = [_full_name(base, module, names) for base in node.bases]
                lines = texts[module][node.lineno - 1 : node.end_lineno]
                declared = {name for line in DECLARED.findall("\n".join(lines)) for name in re.findall(r"\w+", line)}
                found[f"{module}.{node.name}"] = Class(node.name, [*filter(None, bases)], _set_by(node), declared)
    return found


def _names(tree: ast.Module, module: str, inside: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, f"{module}.{node.name}"
        elif isinstance(node, ast.Import):
            for one in node.names:
                yield (one.asname, one.name) if one.asname else (one.name.split(".")[0], one.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(inside.split(".")[: len(inside.split(".")) - node.level + 1]) if node.level else ""
            origin = ".".join(filter(None, (above, node.module)))
            for one in node.names:
                yield one.asname or one.name, f"{origin}.{one.name}"


def _full_name(base: ast.expr, module: str, names: dict[str, dict[str, str]]) -> str | None:
    """Of a base class as it is written; re-exports are followed. None: it is not of this package."""
    first, _, rest = ast.unparse(base.value if isinstance(base, ast.Subscript) else base).partition(".")
    full, seen = names[module].get(first), set()
    if full is None:
        return None
    full = f"{full}.{rest}" if rest else full
    while full not in seen:
        seen.add(full)
        origin, _, name = full.rpartition(".")
        full = names.get(origin, {}).get(name, full)
    return full


def _set_by(node: ast.ClassDef) -> dict[str, int]:
    """Attributes that a class sets: on itself, with or without an annotation, or on `self` (`cls`) in its methods. A
    bare annotation sets nothing. Methods and properties are overridden in the open, and do not count."""
    found: dict[str, int] = {}
    for statement in node.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        for target in (name for one in targets for name in ast.walk(one)):
            if isinstance(target, ast.Name) and not target.id.startswith("__"):
                found.setdefault(target.id, target.lineno)
        arguments = statement.args if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) else None
        positional = [*arguments.posonlyargs, *arguments.args] if arguments else []
        if not positional:
            continue
        for inner in ast.walk(statement):
            if (
                isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and isinstance(inner.value, ast.Name)
                and inner.value.id == positional[0].arg
            ):
                found.setdefault(inner.attr, inner.lineno)
    return found


def _above(name: str, classes: dict[str, Class]) -> list[str]:
    """The base classes of ours, theirs too."""
    found: dict[str, None] = {}
    for base in classes[name].bases:
        if base in classes:
            found |= dict.fromkeys([base, *_above(base, classes)])
    return [*found]


def shared_attributes(classes: dict[str, Class]) -> dict[str, str]:
    """ "class.attribute" -> which other classes of a chain set it, of those that are not declared; and what is declared
    in vain. A chain is all that one class inherits from, so two bases of it that do not know each other count too."""
    found, used = {}, set()
    for name in classes:
        chain = [name, *_above(name, classes)]
        for lower, upper in combinations(chain, 2):
            shared = classes[lower].attributes.keys() & classes[upper].attributes.keys()
            owners = {owner for owner in (lower, upper, name) if shared & classes[owner].declared}
            used |= {(owner, attribute) for owner in owners for attribute in shared & classes[owner].declared}
            for attribute in shared - set().union(*(classes[owner].declared for owner in owners)):
                found[f"{lower}.{attribute}"] = f"line {classes[lower].attributes[attribute]}: {upper} sets it too"
    for name, one in classes.items():
        for attribute in one.declared - {attribute for owner, attribute in used if owner == name}:
            found[f"{name}.{attribute}"] = "it is declared as an override, and no other class of the chain sets it"
    return found


def test_no_attribute_is_set_by_two_classes_of_a_chain_unless_declared():
    assert shared_attributes(classes_of(ROOT, "volunteer_kit")) == {}


def test_a_shared_attribute_is_found_across_modules(tmp_path):
    """The check itself: what it finds, and what it leaves alone."""
    package = tmp_path / "house"
    (package / "room").mkdir(parents=True)
    (package / "room" / "__init__.py").write_text("from .base import Base as Ground\n")
    (package / "room" / "base.py").write_text(
        "class Base:\n"
        "    annotated: float = 0.0\n"
        "    bare: int\n"
        "    meant = 1\n"
        "    def __init__(self):\n"
        "        self.own, self.pair = 1, 2\n"
        "        self.counted += 1\n"
    )
    (package / "top.py").write_text(
        "from house import room\nfrom house.room import Ground\n"
        "class Middle(Ground): pass\n"
        "class Top(Middle):\n"
        "    # Overrides: meant\n"
        "    meant = 2\n"
        "    bare = 3\n"
        "    def step(this):\n"
        "        this.annotated = 1.0\n"
        "        (this.pair, other.own) = 3, 4\n"
        "        with open('x') as this.counted: pass\n"
        "class Other(room.Ground):\n"
        "    # Overrides: nothing\n"
        "    own: int = 1\n"
        "class Left:\n"
        "    timer = 0.0\n"
        "class Right:\n"
        "    def wait(self):\n"
        "        self.timer = 1.0\n"
        "class Both(Left, Right): pass\n"
    )
    found = shared_attributes(classes_of(tmp_path, "house"))
    assert set(found) == {
        "house.top.Top.annotated", "house.top.Top.pair", "house.top.Top.counted", "house.top.Other.own",
        "house.top.Other.nothing", "house.top.Left.timer",
    }  # fmt: skip
