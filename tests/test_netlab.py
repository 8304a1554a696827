"""The test bench's lines, with real namespaces: NAT, delay, loss, cuts, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.netlab import Line, Netlab, NoNetlab
from benchmarks.netlab_parts.check import PINGS, can_connect, lost, rate, round_trip
from tests.network import or_skip

ROOT = Path(__file__).parent.parent
LEFT_ALONE = """
import sys, time
from benchmarks.netlab import Line, Netlab
with Netlab([Line(rtt=10), Line()]) as lab:
    print(lab.tag, lab._relay.pid if lab._relay else 0, flush=True)
    time.sleep(600)
"""
SHARES = """
import os, time, torch
torch.multiprocessing.set_sharing_strategy("file_system")  # hivemind's
shared = torch.zeros(1000).share_memory_()
print(os.getpid(), flush=True)
time.sleep(600)
"""
TRIES = 10  # a busy machine is slow in most of them
SOON = 120  # s; far less, but on a busy machine


def lab_of(*lines: Line):
    return or_skip(Netlab(lines))


def comes_through(lab: Netlab, caller: int, listener: int) -> bool:
    """`can_connect` gives both programs a second to start, and a busy machine takes longer at times."""
    return any(can_connect(lab, caller, listener) for _ in range(10))


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def test_nobody_can_connect_to_a_machine_behind_nat_and_it_can_to_others():
    with lab_of(Line(nat=True), Line()) as lab:
        assert not can_connect(lab, caller=2, listener=1)
        assert comes_through(lab, caller=1, listener=2)


def test_a_line_has_the_delay_and_the_rates_that_were_asked_for():
    with lab_of(Line(down=20, up=10, rtt=40), Line()) as lab:
        # a busy machine is only slower
        delays = (round_trip(lab, 1, 2) for _ in range(TRIES))
        rates = (rate(lab, 1, 2) for _ in range(TRIES))
        assert next(delay for delay in delays if delay < 48) == pytest.approx(40, abs=8)
        assert next(mbps for mbps in rates if mbps > 9) == pytest.approx(10, rel=0.1)


def test_a_line_loses_the_share_that_was_asked_for_and_counts_its_packets():
    with lab_of(Line(loss=0.2), Line()) as lab:
        runs = [lost(lab, sender=1, receiver=2) for _ in range(3)]
        assert min(runs) == pytest.approx(0.2, abs=0.08), runs  # 4 sigma of 500; a busy machine only loses more
        told = lab.traffic(1)
        # where the question for a neighbour's address is lost, the kernel drops what waits for it before the line
        assert PINGS <= told.packets_sent <= 3 * PINGS + 150
        assert told.sent >= 100 * PINGS


def test_a_line_without_delay_does_not_lose():
    with lab_of(Line(down=20, up=10), Line()) as lab:
        # a busy receiver loses some now and then
        assert any(lost(lab, sender=1, receiver=2) == 0 for _ in range(TRIES))
        assert any(round_trip(lab, 1, 2) < 10 for _ in range(TRIES))


def test_a_partition_separates_and_is_mended():
    with lab_of(Line(), Line(), Line()) as lab:
        lab.partition([1, 2])
        assert comes_through(lab, 1, 2)
        assert not can_connect(lab, 1, 3)
        lab.mend()
        assert comes_through(lab, 1, 3)
        lab.cut(1)
        assert not can_connect(lab, 1, 3)
        lab.mend(1)
        assert comes_through(lab, 1, 3)


def test_nothing_stays_when_the_maker_is_killed():
    with lab_of(Line(rtt=10)):
        pass  # or skip
    maker = subprocess.Popen(
        [sys.executable, "-c", LEFT_ALONE], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    tag, relay = maker.stdout.readline().split()
    assert f"{tag}-1" in namespaces()
    assert relay == "0" or psutil.pid_exists(int(relay))
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    deadline = time.monotonic() + SOON
    while tag in namespaces() or (relay != "0" and psutil.pid_exists(int(relay))):
        assert time.monotonic() < deadline, namespaces()
        time.sleep(0.1)


def test_without_iproute2_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoNetlab, match="apt-get install iproute2"), Netlab([Line()]):
        pass


def shared_by(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"torch_{pid}_*"))


@pytest.mark.parametrize("by_hand", [True, False], ids=["its processes are killed", "the lab ends"])
def test_the_dead_leave_no_shared_memory(by_hand):
    with lab_of(Line()) as lab:
        process = subprocess.Popen([*lab.inside(1), sys.executable, "-c", SHARES], stdout=subprocess.PIPE, text=True)
        pid = int(process.stdout.readline())
        assert shared_by(pid) and lab.processes(1) == [pid], "without the one that cleans up"
        if by_hand:
            os.kill(pid, signal.SIGKILL)
    assert process.wait(SOON) == -signal.SIGKILL
    process.stdout.close()
    deadline = time.monotonic() + SOON
    while shared_by(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_labs_of_one_process_are_apart():
    with lab_of(Line()) as one, lab_of(Line(), Line()) as other:
        assert not {*one.machines, one.switch} & {*other.machines, other.switch}
        assert comes_through(other, 1, 2)
