"""One table names every environment variable that the package reads, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from volunteer_kit.environment import GROUPS, VARIABLES, as_markdown, covers

ROOT = Path(__file__).parents[1]
SOURCES = [path for path in sorted((ROOT / "volunteer_kit").rglob("*.py")) if path.name != "environment.py"]
NAME = re.compile(r"[A-Z][A-Z0-9_]*\*?")
OURS = re.compile(r"VOLUNTEER_KIT_[A-Z0-9_]+")
HOLDERS = {"environ", "environment"}  # os.environ, and what functions that are given it call it


def strings(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and NAME.fullmatch(inner.value):
            yield inner.value


def is_environment(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr in HOLDERS) or (
        isinstance(node, ast.Name) and node.id in HOLDERS
    )


def names_read(source: str) -> set[str]:
    """The names of environment variables that a module's code asks for, or sets."""
    tree, found = ast.parse(source), set(OURS.findall(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and (is_environment(node.func.value) or node.func.attr == "getenv"):
                found |= {name for argument in node.args[:1] for name in strings(argument)}
            found |= {name for word in node.keywords if word.arg == "envvar" for name in strings(word.value)}
        elif isinstance(node, ast.Subscript) and is_environment(node.value):
            found |= set(strings(node.slice))
        elif isinstance(node, ast.Compare) and any(map(is_environment, node.comparators)):
            found |= set(strings(node.left))
        elif isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.SetComp)):
            if any(map(is_environment, ast.walk(node.elt))):
                found |= {name for part in node.generators for name in strings(part.iter)}
        elif isinstance(node, ast.Assign) and "SECRETS" in {getattr(target, "id", "") for target in node.targets}:
            found |= set(strings(node.value))
    return found


@pytest.mark.parametrize(
    "source",
    [
        'os.environ.get("SOME_NAME")',
        'os.environ["SOME_NAME"]',
        'os.environ.pop("SOME_NAME", None)',
        'os.getenv("SOME_NAME")',
        '"SOME_NAME" in environment',
        'any(name in os.environ for name in ("SOME_NAME",))',
        'typer.Option(envvar="SOME_NAME")',
        'SECRETS = ("SOME_NAME",)',
    ],
)
def test_each_way_to_read_a_variable_is_seen(source):
    assert names_read(source) == {"SOME_NAME"}


def test_whatever_a_module_reads_is_in_the_table():
    read = {(name, str(path.relative_to(ROOT))) for path in SOURCES for name in names_read(path.read_text())}
    missing = sorted(pair for pair in read if not covers(pair[0]))
    assert len(read) > 10 and not missing, f"volunteer_kit/environment.py lacks {missing}"


def test_the_kits_own_variables_are_all_read_somewhere():
    places = [*SOURCES, *(ROOT / "tests").glob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), ROOT / ".ci" / "test-tpu"]
    used = {name for path in places if path != Path(__file__) for name in OURS.findall(path.read_text())}
    assert {row.name for row in VARIABLES if OURS.fullmatch(row.name)} <= used


def test_the_page_has_a_row_for_each_and_no_row_twice():
    page = as_markdown()
    names = [row.name for row in VARIABLES]
    assert len(set(names)) == len(names)
    assert all(f"| `{name}` |" in page for name in names)
    assert all(any(row.group == group for row in VARIABLES) for group in GROUPS)
