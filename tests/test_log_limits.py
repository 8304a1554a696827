"""Logs that grow by what strangers send stay small, and still say what happens."""

from __future__ import annotations

import logging

import pytest

from volunteer_kit.home import LOG_KEPT, MAX_LOG, cut_log, open_log
from volunteer_kit.swarm.log_limits import PER_PLACE, WITHIN, RepeatFilter, bound_logs


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
