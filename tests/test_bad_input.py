"""Bad input as a person meets it, through the command line: one message, an exit code, nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from volunteer_kit import checkpoint
from volunteer_kit.cli import app
from volunteer_kit.run_reader import RUN_FILES

DEMO = (RUN_FILES / "demo.yaml").read_text()
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWHxoVA6eFiEphHEoNpgFkTWKNBZcDPNbnuV5zqDdNRzCh"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
CLI = [sys.executable, "-u", "-m", "volunteer_kit.cli"]
COUNTED = "your samples are in"
ROOT = str(Path(checkpoint.__file__).parents[1])


# told before any process is started ------------------------------------------------------------------------------


def of_demo(old: str, new: str) -> str:
    assert old in DEMO
    return DEMO.replace(old, new)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["join", "demo", "--initial-peers", "127.0.0.1:4000"], ["--initial-peers", "'127.0.0.1:4000'", "/p2p/"]),
        (["join", "demo", "--initial-peers", "/ip4/127.0.0.1/tcp/4"], ["/tcp/4'", "/p2p/PEER_ID"]),
        (["join", "demo", "--initial-peers", NOBODY, "--host-maddrs", "0.0.0.0:4"], ["--host-maddrs", "'0.0.0.0:4'"]),
        (["join", "demo", "--initial-peers", NOBODY, "--announce-maddrs", "me.org"], ["--announce-maddrs", "me.org"]),
        (["host", "demo", "--host-maddrs", "0.0.0.0:4000"], ["'0.0.0.0:4000' is no address"]),
        (
            ["demo", "--run", "dalle-laion", "--data", "x.tar"],
            ["not on this machine", "convert last.ckpt vqgan-f8-8192", "demo, emoji"],
        ),
        (["join", "dalle-laion", "--new-swarm"], ["code shards", "--data", "volunteer-kit encode"]),
        (["demo", "--run", "emoji", "--data", "/nope/*.tar"], ["No shard matches '/nope/*.tar'", "1. "]),
        (["join", "emoji", "--new-swarm", "--data", "/nope/*.tar"], ["No shard matches"]),
        (["demo", "--run", "emoji", "--data", "ftp://x/0.tar"], ["paths, http(s) addresses"]),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_what_can_be_told_at_once_is(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = psutil.Process().children()
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 2 and "Traceback" not in done.output
    for word in words:
        assert word in done.stderr
    assert list(tmp_path.iterdir()) == [] and psutil.Process().children() == before


DELAYS = "  delay_grad_averaging: true\n  delay_optimizer_step: false"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (of_demo("allreduce_timeout:", "allreduce_timout:"), ["'allreduce_timout'", "nearest is 'allreduce_timeout'"]),
        (of_demo("seed: 0", "seed: zero"), ["seed is 'zero'", "integer"]),
        (of_demo("allreduce_timeout: 6", "allreduce_timeout: 0"), ["greater than 0"]),
        (of_demo("timeout: 60", f"timeout: 60\n{DELAYS}"), ["set delay_optimizer_step: true"]),
    ],
    ids=["unknown key", "wrong type", "impossible times", "impossible delays"],
)
@pytest.mark.parametrize("verb", ["join", "demo", "host"])
def test_a_wrong_run_file_by_every_door(verb, text, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    arguments = ["demo", "--run", str(path)] if verb == "demo" else [verb, str(path)]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 2
    for word in [f"{path}, line", "Fix:", *words]:
        assert word in done.stderr
    assert list(tmp_path.iterdir()) == [path]


# told by a worker ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "small.yaml"
    path.write_text(of_demo("target_batch_size: 256", "target_batch_size: 32").replace("run_id: demo", "run_id: small"))
    return path


@pytest.fixture(scope="module")
def address(run_file):
    """Of a host, up while this module's tests run."""
    host = subprocess.Popen(
        [*CLI, "host", str(run_file), "--no-authority", "--host-maddrs", LOOPBACK],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        yield next(line.split()[-1] for line in host.stdout if "--initial-peers" in line)
    finally:
        host.terminate()
        host.communicate(timeout=120)


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def join(*arguments: object, seconds: float = 280, leave_at: str | None = None, **more: str) -> tuple[int, str]:
    """-> exit code and output of a `join`, which a SIGTERM ends once it has said `leave_at`.

    It has to end within `seconds`, without a traceback or a process left behind.
    """
    mark = os.urandom(8).hex()
    listen = () if "--host-maddrs" in arguments else ("--host-maddrs", LOOPBACK)
    command = [*CLI, "join", *map(str, arguments), *listen, "--batch-size", "8", "--accept-terms"]
    home = tempfile.mkdtemp()
    worker = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=environment(BAD_INPUT_TEST=mark, VOLUNTEER_KIT_HOME=home, **more),
    )  # fmt: skip
    alarm = threading.Timer(seconds, worker.kill)
    alarm.start()
    said = ""
    for line in worker.stdout:
        said += line
        if leave_at and leave_at in line:
            worker.terminate()
            leave_at = None
    code = worker.wait()
    alarm.cancel()
    shutil.rmtree(home)
    assert code != -signal.SIGKILL, f"it did not end within {seconds} s:\n{said}"
    assert "Traceback" not in said
    left = [process for process in psutil.process_iter() if is_marked(process, mark)]
    assert psutil.wait_procs(left, timeout=120)[1] == []  # one may be about to end
    return code, said


def is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("BAD_INPUT_TEST") == mark
    except psutil.Error:
        return False


@pytest.mark.slow
def test_dead_initial_peers(run_file):
    code, said = join(run_file, "--initial-peers", NOBODY)
    assert code == 2 and "None of the run's first peers answered" in said and NOBODY in said
    assert "your samples are in" not in said


@pytest.mark.slow
def test_a_port_that_is_taken(run_file, address):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"
        code, said = join(run_file, "--initial-peers", address, "--host-maddrs", taken)
    assert code == 2 and "taken by another program" in said and taken in said


SKEW = "import time\nhonest = time.time\ntime.time = lambda: honest() + 10.0\n"


@pytest.mark.slow
def test_a_clock_that_is_ten_seconds_off(run_file, address, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SKEW)
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    code, said = join(run_file, "--initial-peers", address, PYTHONPATH=path)
    assert code == 2 and "clock differs" in said and "timedatectl" in said


@pytest.mark.slow
def test_an_empty_shard(tmp_path, address):
    (tmp_path / "empty.tar").write_bytes(b"")
    run = tmp_path / "emoji.yaml"
    run.write_text((RUN_FILES / "emoji.yaml").read_text().replace("data:", "data:\n  patience: 3", 1))
    code, said = join(run, "--initial-peers", address, "--data", tmp_path / "empty.tar")
    assert code == 2 and "empty.tar" in said and "1." in said


@pytest.mark.slow
def test_a_disk_that_is_full_and_a_checkpoint_that_is_damaged(run_file, address, tiny_disk, tmp_path):
    folder = tmp_path / "checkpoints"
    stay = [run_file, "--initial-peers", address, "--checkpoint-dir"]
    (tiny_disk / "something_else").write_bytes(bytes(2 * 2**20))
    code, said = join(*stay, tiny_disk, leave_at=COUNTED)
    assert code == 0 and "Warning: The checkpoint" in said and "the disk is full" in said and COUNTED in said
    code, said = join(*stay, folder, leave_at=COUNTED)
    (saved,) = folder.glob("epoch-*/model.safetensors")
    os.truncate(saved, 1000)
    code, said = join(*stay, folder, leave_at=COUNTED)
    assert code == 0 and "cut off" in said and "the swarm's state is taken instead" in said and COUNTED in said


@pytest.mark.slow
def test_a_run_of_the_same_name_and_other_settings(run_file, address, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(run_file.read_text().replace("seed: 0", "seed: 1"))
    first = subprocess.Popen(
        [*CLI, "join", str(run_file), "--initial-peers", address, "--host-maddrs", LOOPBACK, "--accept-terms"],
        stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    try:
        assert any(COUNTED in line for line in first.stdout)
        code, said = join(other, "--initial-peers", address)
    finally:
        first.terminate()
        first.communicate(timeout=120)
    assert code == 2 and "'small' with other settings than yours" in said
