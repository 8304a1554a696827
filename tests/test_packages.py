"""The kit's requirements: the lists beside what is imported, what counts as missing, and the words for it."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.installed import name_of, with_what_they_need
from volunteer_kit import packages
from volunteer_kit.installer import why_in_words
from volunteer_kit.packages import Lack

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for path in (ROOT / "volunteer_kit").rglob("*.py"))
EXTRAS = ("server", "hf", "monitor", "tpu")

# Imported, and not on a list of its own: part of a package that is, and made by the same people.
COMES_WITH = {
    "anyio": "fastapi", "ipython": "ipywidgets", "markupsafe": "jinja2", "pydantic-core": "pydantic",
    "starlette": "fastapi", "traitlets": "ipywidgets",
}  # fmt: skip
IN_A_KERNEL_ONLY = {"zmq"}  # asked for where an ipykernel runs, which is made of it
HERE_BEFORE = {"pip"}  # the install cell runs where pip has to be
NO_PACKAGE_OF_TESTS = {"torch_xla": "torch-xla", "trackio": "trackio"}  # of extras that `make install` leaves out


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


def test_every_import_is_of_a_listed_package():
    listed = {name_of(line) for extra in ("", *EXTRAS) for line in packages.requirements(extra)}
    listed |= {name_of(line) for line in packages.UPSTREAM}
    of_modules = importlib.metadata.packages_distributions()
    unlisted = {}
    for path in SOURCES:
        for module in imports(path):
            top = module.partition(".")[0]
            if top in sys.stdlib_module_names or top == "volunteer_kit" or top in IN_A_KERNEL_ONLY | HERE_BEFORE:
                continue
            names = {name_of(name) for name in of_modules.get(top, [NO_PACKAGE_OF_TESTS.get(top, top)])}
            parents = {COMES_WITH[name] for name in names if name in COMES_WITH}
            if not (names | parents) & listed:
                unlisted[top] = path.name
    assert not unlisted


@pytest.mark.parametrize(("part", "whole"), COMES_WITH.items())
def test_what_comes_with_another_package_does(part, whole):
    assert part in with_what_they_need(whole)


def test_every_listed_package_is_found_by_the_name_that_is_imported():
    """Otherwise `setup` would never be done."""
    assert packages.lacking("demo", "notebook", "host", "postgresql", "finetune", "4bit", strict=True) == []


def test_nobody_asks_an_index_for_the_kit():
    """Its name there is free, so anybody could take it."""
    asks = re.compile(r"pip[^&|;]*\binstall\b[^&|;]*[\s'\"]volunteer[-_]kit\b(?!\S*\.whl|\S* @ )")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in SOURCES
        for line in path.read_text().splitlines()
        if asks.search(line)
    ]
    assert not found


@pytest.mark.parametrize(
    ("line", "name", "module"),
    [
        ("psycopg[binary]>=3.1", "psycopg", "psycopg"),
        ("axial_positional_embedding>=0.3", "axial-positional-embedding", "axial_positional_embedding"),
        ("pillow>=10", "pillow", "PIL"),
        ("protobuf>=5.29", "protobuf", "google.protobuf"),
        ("dalle-pytorch==1.6.6", "dalle-pytorch", "dalle_pytorch"),
    ],
)
def test_names(line, name, module):
    assert packages.name_of(line) == name and packages.module_of(name) == module


@pytest.mark.parametrize(
    ("versions", "loose", "strict"),
    [
        ({}, [], []),
        ({"hivemind": "1.1.13"}, ["hivemind"], ["hivemind"]),  # newer than what was tested
        ({"hivemind": "1.1.11"}, [], ["hivemind"]),
        ({"rich": "12.0"}, [], ["rich"]),
        ({"dalle-pytorch": "1.7.0"}, ["dalle-pytorch"], ["dalle-pytorch"]),
        ({"torch": "2.9.0a0+git1234"}, [], []),
        ({"torch": "a-build"}, [], []),
    ],
)
def test_versions(monkeypatch, versions, loose, strict):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or real(name))
    assert [lack.name for lack in packages.lacking("train")] == loose
    assert [lack.name for lack in packages.lacking("train", strict=True)] == strict


def test_a_package_from_before_its_module_had_its_name_does_not_fit(monkeypatch):
    """python_multipart was `multipart` until 0.0.12; `setup host` would find it lacking after each installation."""
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "0.0.12" if n == "python-multipart" else real(n))
    assert [lack.name for lack in packages.lacking("host", strict=True)] == ["python-multipart"]


def test_a_package_whose_metadata_cannot_be_read_has_no_version(monkeypatch, tmp_path):
    (tmp_path / "latin-1.0.dist-info").mkdir()
    (tmp_path / "latin-1.0.dist-info/METADATA").write_bytes(b"Name: latin\nVersion: 1.0\nAuthor: J\xf6rg\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert packages.version_of("latin") is None


def test_a_version_that_does_not_fit_is_told_with_the_range():
    text = packages.in_words([Lack("hivemind", "hivemind>=1.1.12,<1.1.13", "1.2.0")])
    assert "'hivemind' is there as 1.2.0, and the kit needs hivemind>=1.1.12,<1.1.13" in text
    assert "1. Run in your terminal" in text and "volunteer-kit setup" in text


def test_a_folder_of_that_name_is_no_package(monkeypatch, tmp_path):
    """As `datasets/` of somebody's own, beside the notebook."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "datasets")
    (tmp_path / "datasets").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert "datasets" in {lack.name for lack in packages.lacking("train")}


def test_what_only_some_need_keeps_nobody_else_away(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert packages.lacking("train") == []
    assert [lack.name for lack in packages.lacking("demo")] == ["matplotlib"]
    assert [lack.name for lack in packages.lacking("notebook")] == ["ipywidgets"]
    assert {lack.name for lack in packages.lacking("train", strict=True)} == {"matplotlib", "ipywidgets"}


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("yaml", ["'pyyaml' is not installed", "volunteer-kit setup"]),
        ("google.protobuf", ["'protobuf' is not installed"]),
        ("fastapi", ["'fastapi' is not installed", "volunteer-kit setup host"]),
        ("peft", ["'peft' is not installed", "volunteer-kit setup finetune"]),
        ("taming.modules", ["'taming-transformers-rom1504' is not installed", packages.UPSTREAM_LINE]),
        ("h11", ["'h11' is not installed, and another package needs it", "pip check"]),
    ],
)
def test_an_import_that_fails_is_explained(module, words):
    text = packages.explained(ModuleNotFoundError("no", name=module))
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("no", name="volunteer_kit.gone"), ImportError("cannot import name 'x'")]
)
def test_a_bug_stays_a_bug(error):
    assert packages.explained(error) is None


def test_a_child_finds_this_kit_and_no_installed_one_is_put_before_the_standard_library(monkeypatch):
    found = packages.with_kit_path({"PYTHONPATH": "/a:/b", "X": "1"})
    assert found == {"PYTHONPATH": f"{packages.ROOT}:/a:/b", "X": "1"}
    assert packages.with_kit_path(found) == found
    monkeypatch.setattr("site.getsitepackages", lambda: [str(packages.ROOT)])
    assert packages.with_kit_path({"X": "1"}) == {"X": "1"}


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("error: externally-managed-environment\n× This environment is externally managed", ["PEP 668", "-m venv"]),
        ("WARNING: Retrying ... NewConnectionError: Failed to establish a new connection", ["HTTPS_PROXY"]),
        ("ERROR: No matching distribution found for dalle-pytorch==1.6.6", ["pip download --no-deps -d packages"]),
        ("ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: '/usr'", ["-m venv"]),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", ["disk is full"]),
        ("\n".join(f"line {number}" for number in range(99)), ["| line 98", "volunteer-kit setup"]),
    ],
)
def test_pips_failures_in_words(output, words):
    text = why_in_words(output, packages.UPSTREAM, ["--no-deps"])
    assert "1. " in text and len(text.splitlines()) < 20
    for word in words:
        assert word in text
