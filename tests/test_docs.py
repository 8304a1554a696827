"""The docs say what the code does: every path, command, option and public name in them exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml

import volunteer_kit
from tests.test_hf_swarm import example_of
from volunteer_kit.cli import app
from volunteer_kit.runs import RunConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = typer.main.get_command(app)


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """The hook that makes pages while the site is built."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "hooks" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands_of(text: str) -> list[list[str]]:
    """The words of every `volunteer-kit ...` line in blocks of code, continued lines joined."""
    blocks = re.findall(r"```(?:console|text)\n(.*?)```", text, re.S) + re.findall(r"(?:^ {4}.*\n?)+", text, re.M)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.strip() for line in lines if line.strip().startswith("volunteer-kit ")]
    return [shlex.split(line, comments=True)[1:] for line in found]


def verb_of(words: list[str]) -> tuple[Any, list[str]]:
    """(the command, the words behind its name); KeyError if there is no such command."""
    command, rest = COMMAND, list(words)
    while getattr(command, "commands", None):
        name = rest[0]
        if name not in command.commands and command is not COMMAND:  # `host RUN` means `host start RUN`
            name = next(iter(command.commands))
        else:
            rest = rest[1:]
        command = command.commands[name]
    return command, rest


def test_the_front_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_command_and_option_exists(path):
    for words in commands_of(path.read_text()):
        command, rest = verb_of(words)
        options = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
        unknown = [word for word in rest if word.startswith("--") and word.partition("=")[0] not in options]
        assert not unknown, f"volunteer-kit {shlex.join(words)}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_file_that_is_named_exists(path):
    named = re.findall(r"`((?:volunteer_kit|benchmarks|notebooks|tests|docs)/[\w./-]+)`", path.read_text())
    named += re.findall(r"python (benchmarks/\w+\.py)", path.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_within_the_repository_leads_somewhere(path):
    made = {"run-file.md", "cli.md", "environment.md", "api.md", "contributing.md", "security.md", "changelog.md"}
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    missing = {link for link in links if "://" not in link and not (path.parent / link.partition("#")[0]).exists()}
    assert missing <= made | {"images/simulate.png"}


def test_the_fine_tuning_example_is_the_same_in_the_docs_and_on_the_front_page():
    assert example_of((ROOT / "README.md").read_text()) == example_of((ROOT / "docs" / "finetune.md").read_text())


def test_the_run_file_page_explains_every_setting(generate):
    page = generate.run_file_page()
    rows = re.findall(r"^\| `(\w+)` \| .*? \| .*? \| (.*?) \|$", page, re.M)
    assert set(RunConfig.model_fields) <= {name for name, _ in rows}
    assert len(rows) > 60 and not [name for name, text in rows if not text.strip()], "no comment beside these fields"
    example = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.S).group(1))
    assert RunConfig.model_validate(example).run_id == "my-run"


def test_the_comments_of_a_model_become_its_fields_text(generate):
    from volunteer_kit.run_sections import SwarmConfig

    texts = generate.comments_of(SwarmConfig)
    assert texts["compress_above"] == "Elements above which a tensor is large; as in the original run"
    assert "exchange of a round" in texts["allreduce_timeout"] and "slow uplinks" in texts["allreduce_timeout"]


def test_the_page_of_commands_has_every_command(generate):
    page = generate.cli_page()
    assert all(f"\n## {name}\n" in page for name in COMMAND.commands)
    assert "`--max-hours`" in page and "### moderate ban" in page


def test_the_page_of_names_has_every_public_name(generate):
    page = generate.api_page()
    listed = re.findall(r"^::: volunteer_kit\.[\w.]*?(\w+)$", page, re.M)
    assert sorted(listed) == sorted(set(volunteer_kit.__all__) - {"__version__"})
    errors = [name for name in listed if name.endswith("Error") or name == "MissingDependency"]
    assert all(f"| `{name}` |" in page for name in errors)
