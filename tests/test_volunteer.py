"""Lending a machine to a run: real host, real worker, real goodbye."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from volunteer_kit.run_reader import RunError
from volunteer_kit.runs import load_run
from volunteer_kit.training.protocol import EVENTS, dump_event, parse_event
from volunteer_kit.volunteer import Story, join_run

CLI = [sys.executable, "-u", "-m", "volunteer_kit.cli"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SAMPLES = {
    "pid": 1, "name": "n", "device": "CPU", "batch_size": 8, "precision": "fp32", "threads": 1, "why": "because.",
    "peer_id": "Qm", "maddrs": [], "client_mode": False, "epoch": 3, "source": "peers", "samples": 8,
    "samples_per_second": 2.5, "loss": 4.25, "num_peers": 3, "swarm_samples": 24, "target_batch_size": 256,
    "total_samples": 80, "group_size": 3, "received": 0.5, "seconds": 1.5, "sent_bytes": 10, "counts": {"nsfw": 2},
    "kind": "k", "message": "plain words", "path": "/tmp/x", "epochs": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", EVENTS)
def test_every_event_of_the_protocol_has_its_line(name):
    event = parse_event(dump_event(name, **{field: SAMPLES[field] for field in EVENTS[name]}))
    line = Story().line(event)
    assert line and "None" not in line


def test_the_story_counts_epochs_repeats_no_news_and_keeps_the_error():
    story = Story()
    epoch = {"event": "epoch", **{field: SAMPLES[field] for field in EVENTS["epoch"]}}
    assert "only 50% received" in story.line(epoch)
    story.line({**epoch, "samples": 0, "received": None, "loss": None})
    assert story.epochs == 1
    skipped = {"event": "skipped", "counts": {"nsfw": 2}}
    assert story.line(skipped) and story.line(skipped) is None
    step = {"event": "step", **{field: SAMPLES[field] for field in EVENTS["step"]}}
    assert story.line(step) and story.line(step) is None
    assert "disk full" in story.line({"event": "error", "kind": "k", "message": "disk full"})
    assert "disk full" not in story.line({"event": "gave_up", "message": "disk full"})
    assert story.error == "disk full"
    assert story.line({"event": "of a later version"}) is None


def test_nothing_is_started_for_a_run_that_nobody_is_in():
    lines: list[str] = []
    with pytest.raises(RunError, match="nobody to join"):
        join_run("demo", say=lines.append)
    with pytest.raises(RunError, match="--data"):
        join_run("emoji", new_swarm=True, say=lines.append)
    assert lines == []


def wait_for(path: Path, pattern: str, process: subprocess.Popen, timeout: float) -> re.Match:
    deadline = time.monotonic() + timeout
    while True:
        text = path.read_text()
        if found := re.search(pattern, text):
            return found
        assert process.poll() is None and time.monotonic() < deadline, text
        time.sleep(0.2)


@pytest.fixture
def start(tmp_path):
    """start(name, *arguments) -> (process, file of its output); all of them end with the test."""
    processes = []

    def begin(name: str, *arguments: str) -> tuple[subprocess.Popen, Path]:
        path = tmp_path / f"{name}.txt"
        with path.open("w") as output:
            process = subprocess.Popen(
                [*CLI, *arguments], stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=ENVIRONMENT
            )
        processes.append(process)
        return process, path

    yield begin
    for process in processes:
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            os.killpg(process.pid, signal.SIGKILL)
            for child in family:
                child.kill() if child.is_running() else None


def address_of(host: subprocess.Popen, output: Path) -> str:
    return wait_for(output, r"--initial-peers (\S+)", host, 60).group(1)


@pytest.mark.slow
def test_joining_training_and_leaving_in_good_order(tmp_path, start):
    values = load_run("demo").model_dump(mode="json") | {"run_id": "small", "target_batch_size": 32}
    run = tmp_path / "small.yaml"
    run.write_text(json.dumps(values))  # JSON is YAML
    host, host_output = start("host", "host", str(run), "--host-maddrs", "/ip4/127.0.0.1/tcp/0")
    address = address_of(host, host_output)
    folder = str(tmp_path / "checkpoints")
    common = ["join", str(run), "--initial-peers", address, "--batch-size", "8"]
    common += ["--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
    worker, output = start("join", *common, "--checkpoint-dir", folder, "--name", "ann")
    wait_for(output, r"epoch \d+ applied", worker, 120)
    family = psutil.Process(worker.pid).children(recursive=True)
    worker.send_signal(signal.SIGINT)
    assert worker.wait(timeout=60) == 0
    text = output.read_text()
    assert "Leaving" in text and "said goodbye" in text and "Traceback" not in text
    assert int(re.search(r"Done: (\d+) of your samples", text).group(1)) > 0
    gone, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    # a second stay goes on where the first one ended, and ends by itself
    again, output = start("again", *common, "--checkpoint-dir", folder, "--minutes", "0.5")
    assert again.wait(timeout=150) == 0
    assert re.search(r"The model is here: epoch [1-9]", output.read_text()), output.read_text()
    host.send_signal(signal.SIGTERM)
    assert host.wait(timeout=30) == 0
