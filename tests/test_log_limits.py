"""Logs that grow by what strangers send stay small, and still say what happens."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tests.waiting import wait_until
from volunteer_kit import home, supervisor
from volunteer_kit.demo.state import DemoState
from volunteer_kit.demo.swarm import DemoSwarm
from volunteer_kit.home import LOG_KEPT, MAX_LOG, cut_log, open_log
from volunteer_kit.host.log import BoundedLog
from volunteer_kit.runs import load_run
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.swarm.net.log_limits import PER_PLACE, WITHIN, RepeatFilter, bound_logs


@pytest.fixture
def hivemind_log():
    """What hivemind's handlers let through."""
    seen: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    handler, logger = Keep(), logging.getLogger("hivemind")
    logger.addHandler(handler)
    yield handler, seen
    logger.removeHandler(handler)


def refuse(name: str) -> None:
    logging.getLogger("hivemind.p2p.p2p_daemon").warning("Handler failed: %s", name)


def test_a_flood_of_refusals_is_logged_now_and_then(hivemind_log, clock):
    handler, seen = hivemind_log
    handler.addFilter(RepeatFilter(clock))
    for _ in range(5000):
        refuse("no token")
    assert seen == ["Handler failed: no token"] * PER_PLACE
    logging.getLogger("hivemind.dht").warning("another line")
    assert seen[-1] == "another line"
    clock.now += WITHIN
    refuse("banned")
    assert seen[-1] == f"Handler failed: banned (and {5000 - PER_PLACE} more before it)"


def test_all_of_hivemind_is_bounded_once(hivemind_log):
    _, seen = hivemind_log
    bound_logs()
    bound_logs()
    for _ in range(100):
        refuse("no token")
    assert len(seen) == PER_PLACE
    for handler in logging.getLogger("hivemind").handlers:
        assert sum(isinstance(one, RepeatFilter) for one in handler.filters) == 1


def test_a_handler_that_another_logger_shares_is_not_bounded_for_it(hivemind_log):
    handler, seen = hivemind_log
    other = logging.getLogger("hivemind_users")
    bound_logs()
    other.addHandler(handler)
    try:
        for number in range(5 * PER_PLACE):
            other.warning("line %d", number)
    finally:
        other.removeHandler(handler)
    assert seen == [f"line {number}" for number in range(5 * PER_PLACE)]


def test_a_log_is_cut_while_it_is_written(tmp_path):
    path = tmp_path / "worker.log"
    with open_log(path) as log:
        log.write(b"old\n" * (MAX_LOG // 4 + 1))
        cut_log(path)
        assert path.stat().st_size <= LOG_KEPT
        log.write(b"new\n")
    assert path.read_bytes().endswith(b"old\nnew\n") and path.stat().st_size <= LOG_KEPT + 4
    cut_log(tmp_path / "none.log")


FLOOD = """
import os, sys, time
line = b"an hour without an event, and a library that complains\\n"
while os.path.exists(sys.argv[0]):
    os.write(2, line * 100)
    time.sleep(0.01)
"""


def test_the_log_of_a_worker_that_says_nothing_is_cut_too(tmp_path, monkeypatch):
    """It waits for the others, with the line dead, and its libraries log at every try."""
    monkeypatch.setattr(supervisor, "LOG_LOOK", 0.05)
    monkeypatch.setattr(home, "MAX_LOG", 100_000)
    monkeypatch.setattr(home, "LOG_KEPT", 10_000)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "flood.py").write_text(FLOOD.replace("\\\\n", "\\n"))
    log = tmp_path / "worker.log"
    worker = Supervisor(None, log_path=log, module="flood")
    worker.start()
    try:
        for _ in range(2):
            wait_until(lambda: log.exists() and log.stat().st_size > 100_000, 120)
            wait_until(lambda: log.stat().st_size < 50_000, 120)
    finally:
        worker.close()


def test_the_demos_logs_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(home, "MAX_LOG", 2_000)
    monkeypatch.setattr(home, "LOG_KEPT", 500)
    (tmp_path / "logs").mkdir()
    swarm = DemoSwarm(load_run("demo"), DemoState(), tmp_path, tmp_path / "logs", batch_size=16, threads=1)

    class Chatter:
        def __init__(self):
            self.events = [{"event": "chatter", "number": number} for number in range(100)]

        def next_event(self, timeout):
            return self.events.pop(0) if self.events else None

    (tmp_path / "logs/first-peer.log").write_bytes(b"line\n" * 1_000)
    for _ in range(10):
        swarm.supervisors["somebody"] = Chatter()
        monkeypatch.setattr(swarm.state, "apply", lambda name, event: None)
        swarm.take_events()
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "logs").iterdir()}
    assert set(sizes) == {"events.jsonl", "first-peer.log"} and max(sizes.values()) <= 8_000
    assert json.loads((tmp_path / "logs/events.jsonl").read_text().splitlines()[-1])["number"] == 99


def test_the_logs_of_a_hosts_parts_keep_to_their_share(tmp_path):
    log = BoundedLog(Path(tmp_path / "logs/monitor.log"), max_bytes=1_000)
    for _ in range(1_000):
        log.write(b"a line of fifty bytes, as the parts of a host say\n")
    log.close()
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"monitor.log", "monitor.log.1"}
    assert sum(path.stat().st_size for path in (tmp_path / "logs").iterdir()) <= 2_000
