"""What a monitor decides, by tables: who is not like the others, what is ruined, and where to go back to."""

from __future__ import annotations

import math
import random

import pytest

from volunteer_kit.monitor.judge import (
    AT_MOST,
    COOL_DOWN,
    SLACK,
    Look,
    Restraint,
    began,
    choose,
    is_good,
    should_roll_back,
)
from volunteer_kit.monitor.summary import MEASURED_SLACK, Claim, outliers, summarize
from volunteer_kit.monitor.turn import whose_turn

NAN, INF = math.nan, math.inf


def claim(number: int, *, epoch: float = 100, speed: float = 3.0, loss: float | None = 4.5, account: str = "") -> Claim:
    return Claim(f"peer-{number}", (account or str(number)).encode(), epoch, speed, loss)


def crowd(count: int = 9, seed: int = 0) -> list[Claim]:
    dice = random.Random(seed)
    return [
        claim(i, epoch=100 - dice.randrange(3), speed=3 * dice.uniform(0.3, 4), loss=4.5 + dice.gauss(0, 0.05))
        for i in range(count)
    ]


# --- summaries ---


@pytest.mark.parametrize(
    "lie",
    [
        {"loss": NAN}, {"loss": 1e8}, {"loss": -5.0}, {"loss": 0.0}, {"speed": 1e8}, {"speed": NAN}, {"speed": -1e6},
        {"speed": INF}, {"epoch": 2**30}, {"epoch": -7}, {"epoch": 0},
    ],
    ids=str,
)  # fmt: skip
def test_one_liar_bends_nothing(lie):
    honest, with_liar = summarize(crowd()), summarize([*crowd(), claim(99, **lie)])
    assert with_liar.volunteers == honest.volunteers + 1
    assert with_liar.loss == pytest.approx(honest.loss, abs=0.1)
    assert abs(with_liar.epoch - honest.epoch) <= 1
    assert honest.samples_per_second * 0.99 <= with_liar.samples_per_second < 40 * honest.samples_per_second


def test_what_was_measured_bounds_what_is_claimed():
    """Of two peers nobody can say which one lies; the steps that were made can."""
    two = [claim(1, speed=10.0), claim(2, speed=9000.0)]
    assert summarize(two).samples_per_second == 9010.0
    assert summarize(two, measured=12.0).samples_per_second == MEASURED_SLACK * 12.0
    assert summarize([claim(1, speed=1e8)]).samples_per_second == 10_000.0
    slow_and_fast = [claim(1, speed=1.0), claim(2, speed=100.0)]
    assert summarize(slow_and_fast, measured=90.0).samples_per_second == 101.0


def test_nobody_and_those_who_say_nothing():
    nobody = summarize([])
    assert (nobody.volunteers, nobody.loss, nobody.samples_per_second, nobody.epoch) == (0, None, 0.0, None)
    assert summarize([claim(1, loss=None)]).loss is None


def test_an_account_has_one_voice():
    """Fifty machines of one person do not make the loss."""
    sybils = [claim(100 + i, loss=0.1, epoch=9e6, account="mallory") for i in range(50)]
    assert summarize([*crowd(), *sybils]).loss == pytest.approx(4.5, abs=0.2)
    assert summarize([*crowd(), *sybils]).epoch < 110
    assert {one.peer_id for one in outliers([*crowd(), *sybils])} == {one.peer_id for one in sybils}


@pytest.mark.parametrize(
    ("lie", "what"),
    [
        ({"loss": 9.0}, ["loss"]), ({"loss": 0.0}, ["loss"]), ({"loss": 4.9}, []), ({"loss": None}, []),
        ({"speed": 1e6}, ["speed"]), ({"speed": 40.0}, []), ({"speed": 0.01}, []), ({"speed": 0.0}, []),
        ({"epoch": 2**30}, ["epoch"]), ({"epoch": 130}, []), ({"epoch": 5}, ["epoch"]),
        ({"loss": 9.0, "epoch": 10**6}, ["loss", "epoch"]), ({"loss": NAN}, []),
    ],
    ids=str,
)  # fmt: skip
def test_who_is_not_like_the_others_is_named(lie, what):
    found = outliers([*crowd(), claim(99, **lie)])
    assert [one.what for one in found] == what and all(one.peer_id == "peer-99" for one in found)
    assert all(len(one.in_words()) < 120 for one in found)


def test_of_too_few_nobody_is_called_different():
    assert outliers([claim(1), claim(2), claim(3, loss=9.0, epoch=10**6, speed=1e6)]) == []
    equal = [claim(i) for i in range(8)]
    assert outliers(equal) == [] and outliers([*equal, claim(9, loss=4.6, speed=3.3, epoch=101)]) == []


# --- is it ruined? ---


def looks(losses, **fields) -> list[Look]:
    return [Look(epoch, public_loss=loss, **fields) for epoch, loss in enumerate(losses)]


def fall(count: int = 60, start: float = 7.0, end: float = 4.5, noise: float = 0.02, seed: int = 0) -> list[float]:
    dice = random.Random(seed)
    return [end + (start - end) * math.exp(-5 * i / count) + dice.gauss(0, noise) for i in range(count)]


def first_alarm(losses) -> int | None:
    found = looks(losses)
    return next((i for i in range(len(found)) if should_roll_back(found[:i], found[i])), None)


@pytest.mark.parametrize(
    ("what", "losses"),
    [
        ("a fall", fall()),
        ("a fall with much noise", fall(noise=0.15)),
        ("at its beginning", [9.0, 8.1, 8.9, 7.0, 7.9, 6.2, 7.1, 5.5, 6.0, 5.2, 5.3, 5.0, 5.1, 4.8, 4.9, 4.7]),
        ("a plateau", fall(20) + [4.5 + 0.05 * (i % 3) for i in range(200)]),
        ("a slow rise", fall() + [4.5 + 0.004 * i for i in range(120)]),
        ("one bad epoch", fall() + [5.6] + fall(20, 4.6)),
        ("two bad epochs", fall() + [5.3, 5.2] + fall(20, 4.6)),
        ("a small jump that stays", fall() + [4.72 + 0.01 * (i % 2) for i in range(40)]),
        ("few looks", [5.0, 4.9, 9.0, 9.0, 9.0, 9.0]),
        ("nothing known", [None] * 50),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_honest_runs_are_left_alone(what, losses):
    assert first_alarm(losses) is None, what


@pytest.mark.parametrize("seed", range(20))
def test_honest_noise_of_any_seed_is_left_alone(seed):
    dice = random.Random(seed)
    level, losses = 6.0, []
    for _ in range(400):
        level = max(4.0, level - 0.01) + dice.gauss(0, 0.01)
        losses.append(level + abs(dice.gauss(0, 0.08)))
    assert first_alarm(losses) is None


@pytest.mark.parametrize(
    ("what", "rise", "within"),
    [
        ("at once", [9.0], 1),
        ("a nat a step", [5.5, 6.5, 7.5, 8.5], 3),
        ("a third of a nat a step", [4.5 + 0.33 * i for i in range(1, 12)], 5),
        ("a tenth of a nat a step", [4.5 + 0.1 * i for i in range(1, 40)], 12),
        ("a jump of a half that stays", [5.05] * 10, 4),
        ("two of three bad", [5.5, 5.6, 4.6, 5.6, 5.7, 5.7], 4),
        ("not a number", [NAN], 1),
        ("infinite", [INF], 1),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ruin_is_seen(what, rise, within):
    healthy = fall()
    alarm = first_alarm(healthy + rise)
    assert alarm is not None and len(healthy) <= alarm < len(healthy) + within, what


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (Look(5, finite=False), "not finite"),
        (Look(5, moved=1.5), "1.5 times as far"),
        (Look(5, moved=NAN), "as far"),
        (Look(5, moved=INF), "as far"),
    ],
    ids=str,
)
def test_what_no_step_can_do_needs_no_history(now, words):
    assert words in should_roll_back([], now)


def test_without_public_samples_the_reports_are_asked():
    history = [Look(i, swarm_loss=loss) for i, loss in enumerate(fall())]
    assert should_roll_back(history, Look(60, swarm_loss=4.6)) is None
    assert should_roll_back(history, Look(60, swarm_loss=9.0)) is not None
    both = [Look(i, public_loss=loss, swarm_loss=9.0) for i, loss in enumerate(fall())]
    assert should_roll_back(both, Look(60, public_loss=4.5, swarm_loss=99.0)) is None, (
        "a majority of liars ruins nothing"
    )


def test_what_is_signed_is_better_than_what_is_tolerated():
    history = looks(fall())
    assert is_good(history, Look(60, public_loss=4.55))
    doubtful = Look(60, public_loss=4.75)
    assert should_roll_back(history, doubtful) is None and not is_good(history, doubtful)
    assert not is_good([], Look(0, finite=False)) and is_good([], Look(0))


# --- where to? ---


def test_the_rise_begins_before_it_is_seen():
    losses = fall() + [4.8, 5.1, 5.5, 5.9]
    found = looks(losses)
    alarm = first_alarm(losses)
    assert began(found[:alarm], found[alarm]) == 60
    assert began([], Look(7, finite=False)) == 7
    assert began(looks(fall()), Look(60, moved=9.0, public_loss=4.5)) == 60


@pytest.mark.parametrize(
    ("kept", "suspect", "to"),
    [
        ([10, 20, 30], 35, 30), ([10, 20, 30], 30 + SLACK, 30), ([10, 20, 30], 31, 20), ([10, 20, 30], 30, 20),
        ([30], 31, 30), ([30], 30, None), ([], 30, None), ([10, 20], 5, None),
    ],
)  # fmt: skip
def test_the_last_state_from_before_the_rise(kept, suspect, to):
    assert choose(kept, suspect) == to


def test_no_order_follows_at_once_nor_for_ever():
    restraint = Restraint()
    assert not restraint.is_cooling(5) and not restraint.has_given_up("a")
    for number in range(AT_MOST):
        assert not restraint.has_given_up("a")
        restraint.note(100 * number, "a")
        assert restraint.is_cooling(100 * number + COOL_DOWN - 1) and not restraint.is_cooling(100 * number + COOL_DOWN)
    assert restraint.has_given_up("a") and not restraint.has_given_up("b")
    restraint.note(400, "b")
    assert not restraint.has_given_up("a"), "there was another state in between"
    restraint.forget()
    assert not restraint.is_cooling(0)


def test_the_lowest_monitor_signs():
    from hivemind.p2p import PeerID

    a, b, c = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in (1, 2, 3))
    assert whose_turn([c, a, b]) == a and whose_turn([c]) == c
