"""The threat model names bounds by constants, and tests that pin them: all of them exist, and the numbers are true."""

from __future__ import annotations

import ast
import operator
import re
from pathlib import Path

import pytest

from tests.fuzz.replay import CORPUS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "threat-model.md").read_text()
NAMED = re.compile(r"`((?:[a-z_0-9]+\.)+(?:[A-Z][A-Z_0-9]+|[A-Z]\w+\.[a-z_]+))(?: = ([\d,.]+))?`")
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))
OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow,
    ast.LShift: operator.lshift, ast.Div: operator.truediv,
}  # fmt: skip


def constants() -> list[tuple[str, str]]:
    """(module.CONSTANT, the number that the page gives or "")."""
    return sorted(set(NAMED.findall(PAGE)))


def value_of(name: str) -> ast.expr | None:
    """What the module assigns to its constant, or its class to a field; None if there is no such thing."""
    *module, constant = name.split(".")
    owner = module.pop() if module[-1][0].isupper() else None
    place = ROOT.joinpath("volunteer_kit", *module)
    path = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
    body = ast.parse(path.read_text()).body if path.is_file() else []
    if owner is not None:
        body = [node for one in body if isinstance(one, ast.ClassDef) and one.name == owner for node in one.body]
    found: dict[str, ast.expr | None] = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node.value
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Name):
                found[target.id] = node.value
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=True)
                found |= {one.id: value for one, value in pairs if isinstance(one, ast.Name)}
    return found.get(constant)


def number(node: ast.expr) -> float:
    """The number that an expression of plain numbers stands for."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](number(node.left), number(node.right))
    raise ValueError(f"no plain number: {ast.dump(node)}")


@pytest.mark.parametrize(("name", "said"), constants(), ids=lambda value: value)
def test_a_bound_is_a_constant_of_the_code_and_has_this_value(name, said):
    value = value_of(name)
    assert value is not None, f"there is no {name}"
    if said:
        assert number(value) == float(said.replace(",", ""))


@pytest.mark.parametrize(("file", "name"), TESTS, ids=lambda value: value)
def test_a_test_that_pins_a_bound_exists(file, name):
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_every_fuzzed_decoder_is_on_the_page_and_every_one_on_it_is_fuzzed():
    on_page = set(re.findall(r"fuzz: (\w+)(?=[,. |]|$)", PAGE))
    targets = {path.stem for path in CORPUS.glob("*.zip")}
    of_codecs = {name for name in targets if name.startswith("tensor_")}  # "tensor" stands for them
    assert on_page <= targets and targets - of_codecs <= on_page


@pytest.mark.parametrize("path", [ROOT / "docs" / "threat-model.md", ROOT / "SECURITY.md"], ids=lambda path: path.name)
def test_every_relative_link_leads_somewhere(path):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    assert links and all("://" in link or (path.parent / link).exists() for link in links)


def test_reports_go_to_a_private_place_and_no_address_is_made_up():
    words = (ROOT / "SECURITY.md").read_text()
    assert "Report a vulnerability" in words and "private" in words
    assert not re.search(r"[\w.+-]+@[\w-]+\.\w", words)
