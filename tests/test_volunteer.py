"""Lending a machine to a run: real host, real worker, real goodbye."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import psutil
import pytest

from volunteer_kit import volunteer
from volunteer_kit.home import Home
from volunteer_kit.process_group import kill_all
from volunteer_kit.run_reader import RunError
from volunteer_kit.runs import load_run
from volunteer_kit.stay import Stay
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.training.protocol import WorkerSpec
from volunteer_kit.volunteer import join_swarm, status
from volunteer_kit.widgets.progress import Progress

CLI = [sys.executable, "-u", "-m", "volunteer_kit.cli"]
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
COUNTED = r"your samples are in"


def environment(home: Path, **more: str) -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    return {**os.environ, "OMP_NUM_THREADS": "1", "VOLUNTEER_KIT_HOME": str(home), "PYTHONPATH": root, **more}


def test_nothing_is_started_for_a_run_that_nobody_is_in(tmp_path):
    before = set(psutil.Process().children())
    with pytest.raises(RunError, match="--data"):
        join_swarm("emoji", home=tmp_path / "home", accept_terms=True)
    with pytest.raises(RunError, match="nobody to join"):
        join_swarm("emoji", data=__file__, home=tmp_path / "home", accept_terms=True)
    assert set(psutil.Process().children()) <= before and not (tmp_path / "home").exists()


def test_terms_that_nobody_accepts_start_nothing(tmp_path, capsys):
    from volunteer_kit.widgets.surface import TermsError

    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(TermsError, match="accept_terms=True") as caught:
        join_swarm("demo", home=tmp_path / "home")
    assert "IP address" in capsys.readouterr().out
    assert caught.value._render_traceback_() == str(caught.value).splitlines()  # a notebook shows words, no stack
    started = set(psutil.Process().children(recursive=True)) - before
    gone, alive = psutil.wait_procs(started, timeout=120)
    assert not alive and Home(tmp_path / "home").lock()


def test_status_of_another_process(tmp_path, monkeypatch):
    monkeypatch.setenv("VOLUNTEER_KIT_HOME", str(tmp_path))
    assert status() is None
    home = Home(None, "demo", "f" * 32)
    assert home.lock()
    home.save_status({"state": "training", "my_samples": 7, "updated": 5.0})
    assert status().my_samples == 7
    other = Home(None, "other", "e" * 32)
    assert other.lock()
    for of_another_version in ({"state": "telepathy", "updated": 9.0}, {"state": "training", "updated": [9.0]}):
        other.save_status(of_another_version)
        assert status().my_samples == 7


class Screen:
    """Answers with what is in `wishes`, and keeps what was said and shown."""

    def __init__(self, *wishes: str):
        self.wishes, self.said, self.shown = [*wishes], [], []

    def welcome(self, terms, login) -> None:
        raise KeyboardInterrupt

    def show(self, progress) -> None:
        self.shown.append(progress)

    def pump(self, seconds: float) -> list[str]:
        return [self.wishes.pop(0)] if self.wishes else []

    def say(self, line: str) -> None:
        self.said.append(line)

    def close(self, progress=None) -> None:
        self.shown.append(progress)


class Goes(Supervisor):
    """A worker without a process, until it is asked to leave."""

    pid, goes, errors = None, False, ()

    def start(self) -> None:
        self.goes = True

    def next_event(self, timeout=None):
        if self.errors:
            raise self.errors[0]
        time.sleep(min(timeout, 0.01))

    @property
    def running(self) -> bool:
        return self.goes

    def begin_leave(self, timeout=30.0) -> None:
        self.goes = False

    leave = close = begin_leave


class Breaks(Goes):
    errors = (RuntimeError("the floor is wet"),)


@pytest.fixture
def stay(tmp_path, monkeypatch):
    """stay(worker) -> one that has begun, and that join_swarm finds."""
    made = []

    def begin(worker=Goes) -> Stay:
        made.append(Stay(Home(tmp_path / "home"), Progress(run_id="r"), make_worker=worker))
        made[-1].warm_up()
        made[-1].begin(WorkerSpec(run={}, name="ann", max_mbps=5.0))
        monkeypatch.setattr(volunteer, "_stay", made[-1])
        return made[-1]

    yield begin
    for one in made:
        one.close()


def test_what_is_given_to_a_stay_that_goes_on(stay):
    screen = Screen("detach")
    one = stay()
    join_swarm("r", max_gb=2.0, max_hours=4.0, max_mbps=5.0, name="bob", batch_size=8, surface=screen)
    assert "after 4 h or 2.0 GB now, counted from its beginning" in screen.said[1]
    assert "keeps the batch_size, name that" in screen.said[2] or "keeps the name, batch_size that" in screen.said[2]
    assert one._max_seconds == 4 * 3600 and one._max_bytes == 2e9 and not one.over
    screen = Screen("detach")
    join_swarm("r", name="ann", surface=screen)
    assert len(screen.said) == 2 and one._max_bytes == 2e9  # nothing new, nothing said
    screen = Screen("detach")
    join_swarm("r", hide_name=True, surface=screen)
    assert "keeps the hide_name that" in screen.said[1]
    one._began -= 4 * 3600
    assert join_swarm("r", surface=Screen()).error is None and one.over


def test_a_fault_is_in_the_contribution(stay):
    stay(Breaks)
    seen = Screen()
    gave = volunteer._accompany(volunteer._stay, seen)
    assert "the floor is wet" in gave.error and seen.shown[-1].state == "failed"


@pytest.mark.parametrize("wish", ["leave", "detach"])
def test_looking_on_ends_when_asked_and_holds_no_controls(tmp_path, wish):
    there, here = Home(tmp_path), Home(tmp_path)
    assert there.lock()
    there.save_status(Progress(state="training", my_samples=7).as_dict())
    screen = Screen("pause", wish)
    gave = volunteer._look_on(here, screen)
    assert "another window, which holds the controls" in screen.said[0] and gave.error is None
    assert [p.is_elsewhere for p in screen.shown] == 3 * [True] and screen.shown[0].my_samples == 7
    there.unlock()
    assert here.lock()


def test_looking_on_at_one_that_stands_stopped_says_so(tmp_path):
    """It is Ctrl-Z's, forgotten in another window: looking on would take for ever."""
    holds = "import sys, time; from volunteer_kit.home import Home; home = Home(sys.argv[1]); home.lock(); "
    holds += "print(flush=True); time.sleep(600)"
    there = psutil.Popen([sys.executable, "-c", holds, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        there.stdout.readline()
        there.suspend()
        deadline = time.monotonic() + 120
        while there.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.01)
        screen = Screen("leave")
        volunteer._look_on(Home(tmp_path), screen)
        assert f"Process {there.pid} (volunteer) stands stopped" in screen.said[1]
        assert f"kill -CONT {there.pid}" in screen.said[1]
    finally:
        there.kill()
        there.wait()
        there.stdout.close()


def test_stop_before_the_start_declines(tmp_path, monkeypatch):
    monkeypatch.setattr(volunteer, "Stay", lambda *_, **caps: Stay(*_, make_worker=Goes, **caps))
    screen = Screen()
    assert join_swarm("demo", home=tmp_path / "home", surface=screen).samples == 0  # on the first screen
    assert screen.said == ["You did not start: no training has begun."] and Home(tmp_path / "home").lock()
    for place in ("volunteer_kit.runs.load_run", "volunteer_kit.volunteer._login"):
        monkeypatch.setattr(place, mock.Mock(side_effect=KeyboardInterrupt))
        screen = Screen()
        assert join_swarm("demo", home=tmp_path / "other", surface=screen).samples == 0
        assert screen.said == ["You did not start: no training has begun."]


def test_addresses_may_be_one_string():
    one, two = "/ip4/1.2.3.4/tcp/5/p2p/Qm", "/ip4/1.2.3.4/tcp/6/p2p/Qn"
    for given in (f"{one}, {two}", [one, two]):
        assert volunteer._listed("--initial-peers", given, "/ip4/x/p2p/y") == [one, two]


def wait_for(path: Path, pattern: str, process: subprocess.Popen, timeout: float) -> re.Match:
    wait_until(lambda: re.search(pattern, path.read_text()), process, path, timeout)
    return re.search(pattern, path.read_text())


def wait_until(happens: Callable[[], object], process: subprocess.Popen, output: Path, timeout: float = 240.0) -> None:
    deadline = time.monotonic() + timeout
    while not happens():
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)


def last_number(pattern: str, output: Path) -> int:
    """0: none yet."""
    return int((re.findall(pattern, output.read_text()) or ["0"])[-1].replace(",", ""))


@pytest.fixture
def start(tmp_path):
    """start(name, *command) -> (process, file of its output); all of them end with the test."""
    processes = []

    def begin(name: str, *command: str, **more: str) -> tuple[subprocess.Popen, Path]:
        path = tmp_path / f"{name}.txt"
        with path.open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                env=environment(tmp_path / "kit", **more),
            )  # fmt: skip
        processes.append(process)
        return process, path

    yield begin
    for process in processes:
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            kill_all(process.pid)
            for child in family:
                child.kill() if child.is_running() else None


@pytest.fixture
def small_run(tmp_path) -> Path:
    values = load_run("demo").model_dump(mode="json") | {"run_id": "small", "target_batch_size": 32, "captions": []}
    run = tmp_path / "small.yaml"
    run.write_text(json.dumps(values))  # JSON is YAML
    return run


def address_of(host: subprocess.Popen, output: Path) -> str:
    return wait_for(output, r"--initial-peers (\S+)", host, 240).group(1)


@pytest.mark.slow
def test_joining_training_and_leaving_in_good_order(tmp_path, start, small_run):
    host, host_output = start("host", *CLI, "host", str(small_run), "--no-authority", "--host-maddrs", LOOPBACK)
    address = address_of(host, host_output)
    common = [*CLI, "join", str(small_run), "--initial-peers", address, "--accept-terms", "--host-maddrs", LOOPBACK]
    worker, output = start("join", *common, "--name", "ann", "--batch-size", "8")
    wait_for(output, COUNTED, worker, 240)
    family = psutil.Process(worker.pid).children(recursive=True)
    worker.send_signal(signal.SIGINT)
    assert worker.wait(timeout=120) == 0
    text = output.read_text()
    assert "Leaving" in text and "You have left" in text and "Traceback" not in text
    counted = last_number(r"([\d,]+) samples of yours", output)
    gone, alive = psutil.wait_procs(family, timeout=120)
    assert counted > 0 and not alive
    # a second stay goes on with the same totals
    again, output = start("again", *common)
    wait_until(lambda: last_number(r"your samples ([\d,]+)", output) > counted, again, output)
    again.send_signal(signal.SIGINT)
    assert again.wait(timeout=120) == 0
    assert last_number(r"([\d,]+) samples of yours", output) > counted
    host.send_signal(signal.SIGTERM)
    assert host.wait(timeout=120) == 0


@pytest.mark.slow
def test_a_second_join_of_this_machine_looks_on_and_starts_nothing(tmp_path, start, small_run):
    common = [*CLI, "join", str(small_run), "--new-swarm", "--accept-terms", "--host-maddrs", LOOPBACK]
    first, output = start("first", *common)
    wait_for(output, COUNTED, first, 240)
    workers = workers_below(first)
    second, seen = start("second", *common)
    wait_for(seen, COUNTED, second, 240)
    assert "in another window" in seen.read_text() and workers_below(second) == []
    second.send_signal(signal.SIGINT)
    assert second.wait(timeout=120) == 0 and first.poll() is None and workers_below(first) == workers
    third, seen = start("third", *common)
    wait_for(seen, "in another window", third, 240)
    first.send_signal(signal.SIGINT)
    assert first.wait(timeout=120) == 0 and third.wait(timeout=120) == 0  # nothing is left to look at


def workers_below(process: subprocess.Popen) -> list[int]:
    family = psutil.Process(process.pid).children()
    return [child.pid for child in family if "volunteer_kit.worker" in child.cmdline()]


RUN_AGAIN = """
import json, os, sys, time
from volunteer_kit import join_swarm, status, volunteer

class Screen:
    def __init__(self, wish, at):
        self.wish, self.at = wish, at

    def welcome(self, terms, login):
        print(json.dumps({"welcome": terms.run_id}), flush=True)

    def show(self, progress):
        self.progress = progress

    def pump(self, seconds):
        time.sleep(seconds)
        return [self.wish] if self.progress.my_samples >= self.at else []

    def say(self, line):
        pass

    def close(self, progress=None):
        pass

def tell(what, gave):
    pid = volunteer._stay.worker_pid
    print(json.dumps({what: gave.samples, "pid": pid, "over": volunteer._stay.over}), flush=True)

tell("first", join_swarm(sys.argv[1], new_swarm=True, host_maddrs=[sys.argv[2]], surface=Screen("detach", 1)))
had = status().my_samples
while status().my_samples == had:  # it goes on while nobody looks
    time.sleep(0.1)
tell("second", join_swarm(sys.argv[1], surface=Screen("leave", had + 1)))
"""


@pytest.mark.slow
def test_the_cell_run_again_shows_the_same_worker_and_the_same_totals(tmp_path, start, small_run):
    process, output = start("kernel", sys.executable, "-c", RUN_AGAIN, str(small_run), LOOPBACK)
    assert process.wait(timeout=280) == 0, output.read_text()
    lines = [json.loads(line) for line in output.read_text().splitlines() if line.startswith("{")]
    welcome, first, second = lines
    assert welcome == {"welcome": "small"} and first["first"] > 0 and not first["over"]
    assert second["second"] > first["first"] and second["over"]


@pytest.mark.slow
def test_the_demo_without_peers_is_a_swarm_of_two_on_this_machine(tmp_path, start):
    process, output = start("demo", *CLI, "join", "demo", "--accept-terms")
    wait_for(output, r"of 2 volunteers, your samples are in", process, 280)
    text = output.read_text()
    assert "a second volunteer is started on this machine" in text
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0 and "Traceback" not in output.read_text()
    (home,) = (tmp_path / "kit" / "runs").iterdir()
    assert Home(home).totals().samples > 0 and list(home.glob("pictures/*.png")) is not None


@pytest.mark.slow
def test_a_finished_run_says_so_and_shows_what_it_draws(tmp_path, start, small_run):
    values = json.loads(small_run.read_text())
    values |= {"captions": ["a large red circle on the left of a grey background"]}
    values["optimizer"] |= {"total_epochs": 6, "warmup_epochs": 1}
    small_run.write_text(json.dumps(values))
    join = [*CLI, "join", str(small_run), "--new-swarm", "--accept-terms", "--host-maddrs", LOOPBACK]
    process, output = start("finish", *join)
    wait_for(output, "The run is finished", process, 280)
    (home,) = (tmp_path / "kit" / "runs").iterdir()
    assert len(list(home.glob("pictures/epoch-*.png"))) == 1 and Home(home).totals().epochs >= 5
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 0
