"""notebooks/host_a_run.ipynb: its first peer's cell with a stand-in, and all of it from top to bottom."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.free_ports import free_port
from tests.test_notebooks import NOBODY, ROOT, code_cells, execute, prose, said, still_there
from volunteer_kit.host.folder import HostFolder
from volunteer_kit.host.settings import HostSettings
from volunteer_kit.host.words import welcome
from volunteer_kit.process_group import kill_all
from volunteer_kit.run_sections import AuthorityConfig
from volunteer_kit.ways_in import Offer

NAME = "host_a_run.ipynb"
TALKATIVE = """#!{python}
import pathlib, sys, time
pathlib.Path("words").write_text("\\n".join(sys.argv[1:]))
print("The run my-run is up.", "  peer  /ip4/127.0.0.1/tcp/1/p2p/x", "Ctrl-C stops it.", sep="\\n", flush=True)
print("a line of a log\\n" * 20_000, flush=True)
pathlib.Path("all is said").touch()
time.sleep(600)
"""


def cell(word: str) -> str:
    (found,) = [code for code in code_cells(NAME) if word in code]
    return found


@pytest.mark.parametrize("trial", [True, False])
def test_the_host_may_say_as_much_as_it_likes_and_there_is_one(tmp_path, monkeypatch, trial):
    monkeypatch.chdir(tmp_path)
    python = tmp_path / "python"
    python.write_text(TALKATIVE.format(python=sys.executable))
    python.chmod(0o755)
    names = {
        "Path": Path, "RUN_FILE": Path("my-run.yaml"), "TRIAL": trial, "sys": SimpleNamespace(executable=str(python))
    }  # fmt: skip
    code = (
        cell("host = Popen").replace('PUBLIC_IP = ""', 'PUBLIC_IP = "203.0.113.5"').replace('NAME = ""', 'NAME = "a.b"')
    )
    exec(code, names)
    first = names["host"]
    try:
        assert names["addresses"] == ["/ip4/127.0.0.1/tcp/1/p2p/x"]
        deadline = time.monotonic() + 120
        while not Path("all is said").exists():
            assert time.monotonic() < deadline, "it is held up by what nobody reads"
            time.sleep(0.01)
        words = Path("words").read_text().split("\n")
        assert ("--no-authority" in words) is trial and ("--behind-proxy" in words) is not trial
        assert "/ip4/203.0.113.5/tcp/31337" in words
        assert ("https://a.b" in words) is not trial
        exec(code, names)
        assert first.poll() is not None and names["host"].poll() is None
    finally:
        for process in (first, names["host"]):
            process.kill()
            process.wait()


@pytest.mark.parametrize("trial", [True, False])
def test_the_link_to_give_away_is_the_one_that_the_host_says(tmp_path, monkeypatch, capsys, trial):
    """A trial has no authority, and so its file is the link."""
    monkeypatch.chdir(tmp_path)
    address = "/ip4/127.0.0.1/tcp/1/p2p/x"
    told = welcome(
        "my-run",
        Offer("https://run.example.org"),
        HostSettings(port=8000, dashboard_port=8001),
        HostFolder(tmp_path / "host"),
        [address],
        [],
        AuthorityConfig(
            url="https://run.example.org", public_key="ed25519:zCxnPDqEWnO5E2QIRyTsT3RpR-IUYM1P65zsY1VYt44"
        ),
    )
    loaded = []
    names = {
        "Path": Path, "RUN_FILE": Path("my-run.yaml"), "TRIAL": trial, "RUN": "run_id: my-run", "re": re,
        "addresses": [address], "said": "\n".join(told), "run": SimpleNamespace(fingerprint="f"),
        "load_run": lambda link: loaded.append(link) or SimpleNamespace(fingerprint="f"),
    }  # fmt: skip
    exec(cell("LINK = "), names)
    link = "my-run.yaml" if trial else "https://run.example.org"
    assert loaded == [link] and capsys.readouterr().out.count(link) == 2
    if trial:
        assert address in Path("my-run.yaml").read_text()


def test_the_words_of_the_host_are_options_of_the_kit():
    """What cells and prose tell people to type."""
    from typer.main import get_command

    from tests.test_host_files import APP

    start = get_command(APP).commands["host"].commands["start"]
    known = {option for parameter in start.params for option in parameter.opts}
    told = set(re.findall(r"--[a-z-]+", cell("host = Popen")))
    for line in re.findall(r"volunteer-kit host (?!init)[^`\n]*", prose(ROOT / "notebooks" / NAME)):
        told |= set(re.findall(r"--[a-z-]+", line))
    assert told <= known and len(told) > 6


STAND_INS = {"EPOCH": "7", "...": "a reason"}


def told_lines() -> list[str]:
    """Every command with the kit's name that the prose tells people to type."""
    text = prose(ROOT / "notebooks" / NAME)
    whole = re.findall(r"`(volunteer-kit [^`\n]+)`|^ +(volunteer-kit [^\n]+)$", text, re.MULTILINE)
    return [inline or block for inline, block in whole]


@pytest.mark.parametrize("line", told_lines())
def test_every_line_to_type_is_one_that_the_kit_understands(line):
    """Verbs, options, required arguments; nothing of it is done."""
    from typer.main import get_command

    from volunteer_kit.cli import app

    words = [STAND_INS.get(word, word) for word in shlex.split(line)[1:]]
    command = get_command(app)
    context = command.make_context("volunteer-kit", words)
    while hasattr(command, "commands"):
        left = [*context._protected_args, *context.args]
        name, command, left = command.resolve_command(context, left)
        context = command.make_context(name, left, parent=context)


def test_lines_are_found_and_names_of_files_fit_those_that_the_host_writes():
    lines = told_lines()
    assert len(lines) > 7
    for line in lines:
        if " moderate " in line:
            assert "--run my-run-host/run.yaml" in line, "the host's own file does not say where the authority is"


def test_it_is_the_complete_recipe():
    text = prose(ROOT / "notebooks" / NAME)
    for words in (
        "The machine", "31337/tcp", "host-maddrs", "announce-maddrs", "identity_path", "https", "moderators",
        "checkpoints", "two volunteers", "Watch it", "Ban", "rollback", "reboot", "another machine",
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_hosted_and_proved_by_two_volunteers(tmp_path):
    port, mark = free_port(), f"VOLUNTEER_KIT_NOTEBOOK_TEST={tmp_path.name}-{os.getpid()}"

    def edit(code: str) -> str:
        return code.replace("PORT = 31337", f"PORT = {port}").replace("MINUTES = 2", "MINUTES = 4")  # if it is slow

    name, _, value = mark.partition("=")
    environment = {"VOLUNTEER_KIT_HOME": str(tmp_path / "home"), name: value}
    try:
        execute(NAME, tmp_path, edit, environment)
    finally:
        left = still_there(mark)
        kill_all(NOBODY, mark)
    text = said(tmp_path, NAME)
    assert f"/tcp/{port}/p2p/" in text and f"/tcp/{port}/p2p/" in (tmp_path / "my-run.yaml").read_text()
    (samples, epochs) = re.search(r"(\d+) samples of this machine entered (\d+) epochs", text).groups()
    second = json.loads((tmp_path / "second-volunteer" / "totals.json").read_text())
    # one or two each could be steps taken alone, before they have met or because they cannot
    assert int(samples) > 0 and int(epochs) > 5
    assert second["samples"] > 0 and second["epochs"] > 5
    assert text.rstrip().endswith("The host has stopped.") and not left
