"""Error feedback in whole numbers."""

from __future__ import annotations

from tests.simulation.residuals import GRAIN, Residuals, value
from volunteer_kit.swarm.sync.contributions import Answer, Share

ALL = 0b1111


def share(number: int, samples: int, cells: int = ALL) -> Share:
    return Share("me", number, 0, samples, cells)


def answer(cells: int, *shares: Share) -> Answer:
    inside = tuple(each._replace(cells=each.cells & cells) for each in shares)
    return Answer(cells, "reducer", b"digest", tuple(each for each in inside if each.cells))


def test_what_entered_is_what_was_sent_and_what_is_left():
    residuals = Residuals(4)
    for round, samples in enumerate((5, 11, 3)):
        name = bytes([round])
        residuals.send(name, [share(round, samples)])
        assert residuals.settle(name, [answer(ALL, share(round, samples))], "me") == (4, None)
        residuals.drop_rounds()
        assert residuals.fault() is None
    total = sum(value(round, 0, samples) for round, samples in enumerate((5, 11, 3)))
    assert residuals.settled[0] == total % GRAIN


def test_cells_that_did_not_enter_keep_their_residual():
    residuals = Residuals(4)
    residuals.send(b"first", [share(0, 5)])
    residuals.settle(b"first", [answer(0b0011, share(0, 5))], "me")
    residuals.drop_rounds()
    assert residuals.fault() is None
    assert residuals.settled[2:] == [0, 0] and residuals.settled[0] == value(0, 0, 5) % GRAIN


def test_a_round_that_failed_leaves_no_trace():
    residuals = Residuals(4)
    residuals.send(b"failed", [share(0, 5)])
    residuals.send(b"second", [share(0, 5)])
    residuals.settle(b"second", [answer(ALL, share(0, 5))], "me")
    residuals.drop_rounds()
    assert residuals.fault() is None
    assert residuals.settle(b"failed", [answer(ALL, share(0, 5))], "me") == (4, None), "its parts are forgotten"
    assert residuals.fault() is None


def test_a_process_that_starts_again_sends_the_same():
    residuals = Residuals(4)
    residuals.send(b"round", [share(0, 5)])
    residuals.send(b"round", [share(0, 5), share(1, 7)])
    assert residuals.settle(b"round", [answer(ALL, share(0, 5))], "me") == (4, None)
    assert residuals.fault() is None


def test_a_part_that_entered_in_half_is_noticed():
    residuals = Residuals(4)
    residuals.send(b"round", [share(0, 5), share(1, 7)])
    _, why = residuals.settle(b"round", [answer(ALL, share(1, 7))], "me")
    assert why is not None and "were sent" in why
