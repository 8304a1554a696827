"""The command line as a person meets it: real processes, real exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from unittest import mock

import psutil
import pytest
from typer.testing import CliRunner

from volunteer_kit.cli import app, explained
from volunteer_kit.home import Home
from volunteer_kit.run_reader import RunError
from volunteer_kit.runs import load_run
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.volunteer import Contribution, _spec

CLI = [sys.executable, "-m", "volunteer_kit.cli"]


def run(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess:
    environment = {**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=timeout, env=environment)


def test_help_names_every_verb_and_needs_neither_torch_nor_hivemind():
    code = (
        "import sys\nfrom volunteer_kit.cli import app, main\nsys.argv = ['volunteer-kit', '--help']\n"
        "try: main()\nexcept SystemExit as e: assert not e.code\n"
        "assert not {'torch', 'hivemind', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for verb in ("demo", "join", "host", "generate", "encode", "convert", "train-tokenizer"):
        assert verb in done.stdout


def test_version():
    import volunteer_kit

    assert run("--version").stdout.strip() == f"volunteer-kit {volunteer_kit.__version__}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["join", "dmo"], ["There is no run 'dmo'", "'demo'"]),
        (["host", "/nowhere/run.yaml"], ["There is no run '/nowhere/run.yaml'"]),
        (["join", "demo"], ["terms", "--accept-terms"]),
        (["join", "demo", "--accept-terms", "--home", "/proc/none"], ["/proc/none", "--home"]),
        (["join", "emoji", "--new-swarm"], ["--data"]),
        (["join", "demo", "--new-swarm", "--data", "x.tar"], ["makes its own data"]),
        (["train-tokenizer", "x.safetensors", "--recipe", "scenes99"], ["no recipe 'scenes99'", "scenes32"]),
        (["train-tokenizer", "x.safetensors", "--recipe", "emoji64"], ["shards"]),
        (["train-tokenizer", "x.safetensors", "--image-size", "30", "--fmap", "8"], ["30 pixels"]),
        (["generate", "a dog", "--checkpoint", "/nowhere"], ["no checkpoint in /nowhere", "--checkpoint"]),
        (["convert", "/nowhere.ckpt", "vqgan-f8-8192"], ["no file /nowhere.ckpt", "last.ckpt"]),
        (["convert", "/nowhere.pt", "out", "--run", "dmo"], ["There is no run 'dmo'"]),
        (["demo", "--run", "dmo"], ["There is no run 'dmo'"]),
        (["demo", "--run", "emoji"], ["--data"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_input_is_one_message_and_exit_code_2(arguments, words):
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 2
    for word in words:
        assert word in done.stderr


def test_bad_input_in_a_process_of_its_own_shows_no_traceback():
    done = run("join", "org/name")
    assert done.returncode == 2 and "'org/name' could not be read" in done.stderr
    assert "Traceback" not in done.stderr


def test_only_errors_that_a_person_can_mend_are_explained():
    assert explained(RunError("what\n1. do this")) == "what\n1. do this"
    assert explained(SwarmError("no peers")) == "no peers"
    assert "not installed" in explained(ModuleNotFoundError("no", name="hivemind"))
    assert explained(FileNotFoundError(2, "No such file", "/x")) == "No such file: /x"
    assert explained(KeyError("a bug")) is None
    assert explained(ModuleNotFoundError("no", name="volunteer_kit.gone")) is None


def test_what_ended_the_training_is_told_line_by_line_and_without_a_strangers_bytes(monkeypatch):
    error = "It broke.\n  1. Read the log:\n  | \x1b]0;mine\x07\x1b[2Jx\u202ey [red]z[/red]"
    monkeypatch.setattr("volunteer_kit.volunteer.join_swarm", lambda *_, **__: Contribution(0, 0, 0.0, None, "", error))
    done = CliRunner().invoke(app, ["join", "demo"], catch_exceptions=False)
    assert done.exit_code == 2 and done.stderr == "It broke.\n  1. Read the log:\n  | ]0;mine[2Jxy [red]z[/red]\n"
    monkeypatch.setattr("volunteer_kit.volunteer.join_swarm", mock.Mock(side_effect=RunError("a\x1b[2Jb\n1. c")))
    done = CliRunner().invoke(app, ["join", "demo"], catch_exceptions=False)
    assert done.exit_code == 2 and done.stderr == "a[2Jb\n1. c\n"


@pytest.mark.parametrize(("words", "hides"), [([], False), (["--hide-name"], True), (["--show-name"], False)])
def test_a_name_can_be_hidden(monkeypatch, words, hides):
    specs = []

    def join_swarm(run, **given):
        chosen = {name: given[name] for name in ("hide_name", "batch_size", "host_maddrs", "announce_maddrs")}
        rest = {name: given[name] for name in ("name", "client_mode", "checkpoint_dir", "identity_path")}
        specs.append(_spec(load_run(run), Home("home"), [], None, None, **rest, **chosen))
        return Contribution(0, 0, 0.0, None, "")

    monkeypatch.setattr("volunteer_kit.volunteer.join_swarm", join_swarm)
    assert CliRunner().invoke(app, ["join", "demo", *words], catch_exceptions=False).exit_code == 0
    assert specs[0].hide_name is hides


def test_the_caps_say_what_they_cover():
    text = " ".join(run("join", "--help").stdout.replace("│", " ").split())
    assert "model and gradients, both ways; data comes on top" in text
    assert "model and gradients, each way; reading data comes on top" in text


def wait_for(stream, word: str, timeout: float = 240) -> str:
    text, deadline = "", time.monotonic() + timeout
    while word not in text:
        assert time.monotonic() < deadline, text
        line = stream.readline()
        assert line, text
        text += line
    return text


LISTEN = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_host_tells_how_to_join_and_leaves_nothing_behind(tmp_path, number):
    host = subprocess.Popen(
        [*CLI, "host", "demo", "--no-authority", "--identity-path", str(tmp_path / "id"), *LISTEN],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        text = wait_for(host.stdout, "Ctrl-C stops it")
        assert "volunteer-kit join demo --initial-peers /ip4/127.0.0.1/tcp/" in text
        assert "Only this machine can reach it" in text
        family = psutil.Process(host.pid).children(recursive=True)
        assert family
        os.killpg(host.pid, number) if number == signal.SIGINT else host.send_signal(number)
        output, errors = host.communicate(timeout=120)
        assert host.returncode == 0, errors
        assert "Traceback" not in errors
        gone, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
    finally:
        if host.poll() is None:
            os.killpg(host.pid, signal.SIGKILL)


def test_join_on_a_full_disk_says_so_at_once(tiny_disk):
    """It said for three quarters of a minute that a second volunteer comes up, and nothing of the disk."""
    with open(tiny_disk / "big", "wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    with mock.patch.dict(os.environ, VOLUNTEER_KIT_HOME=str(tiny_disk)):
        done = run("join", "demo", "--accept-terms")
    said = done.stdout + done.stderr
    assert done.returncode == 2 and "has no room" in said and str(tiny_disk) in said, said
    assert "1. Make room: df -h" in said and "--home FOLDER" in said and "Traceback" not in said
    assert "second volunteer" not in said
