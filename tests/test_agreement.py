"""Who is apart and whom it follows: the same list must lead every member to the same answer."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hivemind.p2p import PeerID
from hypothesis import given, settings

from volunteer_kit.swarm.agreement import (
    BEGINNING,
    LINEAGE_SIZE,
    PAST,
    SKETCH_SIZE,
    Told,
    advance,
    common_epoch,
    holders,
    last_in_common,
    out_of_step,
    prevailing,
    rank_donors,
    read_all,
    read_past,
    read_told,
    sketch,
    whom_to_follow,
)

A, B, C, D, E = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 6))
PEERS = {"a": A, "b": B, "c": C, "d": D, "e": E}


HELD = {name: sketch([torch.randn(500, generator=torch.Generator().manual_seed(i))], 3) for i, name in enumerate("xyz")}
OTHER = bytes(range(LINEAGE_SIZE))
HELD["X"] = (np.frombuffer(HELD["x"], "<f4") * np.float32(1 + 1e-5)).tobytes()  # as near as a small step


def telling(**told) -> dict[PeerID, list]:
    """a="5x" -> peer A tells epoch 5 and the sketch of model x; "5x?": that it came of another step."""
    found = {}
    for name, words in told.items():
        said = words.rstrip("?")
        found[PEERS[name]] = [int(said[:-1]), HELD[said[-1]], BEGINNING if said == words else OTHER]
    return found


# --- lineages ---


def test_who_took_the_same_steps_has_the_same_lineage_and_nobody_else():
    rounds = [b"first", b"second"]
    ours = theirs = BEGINNING
    for name in rounds:
        ours, theirs = advance(ours, name), advance(theirs, name)
    assert ours == theirs != BEGINNING and len(ours) == LINEAGE_SIZE
    assert advance(advance(BEGINNING, rounds[1]), rounds[0]) != ours
    assert advance(ours, None) != advance(theirs, None), "a step taken alone is nobody else's"


# --- what strangers tell ---


@pytest.mark.parametrize(
    "told, epoch, readable",
    [
        ([7, HELD["x"], BEGINNING], 7, True),
        ([7, HELD["x"], OTHER], 7, True),
        ([7, HELD["x"], False], 7, False),
        ([7, HELD["x"], OTHER[1:]], 7, False),
        ([7, HELD["x"], "x" * 8], 7, False),
        ((7, HELD["x"], BEGINNING), 7, True),
        ([0, HELD["x"], BEGINNING], 0, True),
        ([7, HELD["x"]], 7, False),
        ([7], 7, False),
        ([7, None, OTHER], 7, False),
        ([7, "x" * 64, OTHER], 7, False),
        ([7, HELD["x"][:-1], OTHER], 7, False),
        ([7, HELD["x"] + b"x", OTHER], 7, False),
        ([7, np.full(SKETCH_SIZE, np.nan, "<f4").tobytes(), OTHER], 7, False),
        ([7, np.full(SKETCH_SIZE, np.inf, "<f4").tobytes(), OTHER], 7, False),
        ([7, HELD["x"], 1], 7, False),
        (7, None, False),
        (None, None, False),
        ([], None, False),
        ("7x", None, False),
        (b"7x", None, False),
        ([7.0, HELD["x"], OTHER], None, False),
        ([True, HELD["x"], OTHER], None, False),
        ([-1, HELD["x"], OTHER], None, False),
        ([2**31, HELD["x"], OTHER], None, False),
        ([[7], HELD["x"], OTHER], None, False),
        ({0: 7, 1: HELD["x"]}, None, False),
    ],
)
def test_read_told(told, epoch, readable):
    said = read_told(told)
    assert (said.epoch if said else None) == epoch
    assert (said is not None and said.sketch is not None) is readable
    assert not readable or said.words() == list(told)


# --- who is right ---


@pytest.mark.parametrize(
    "epochs, clients, common",
    [
        ([], "", None),
        ([5], "", 5),
        ([5, 5, 4], "", 5),
        ([4, 4, 5], "", 4),
        ([4, 5], "", 5),
        ([5, 5, 4, 4], "", 5),
        ([10**6, 5, 5], "", 5),
        ([4, 5], "b", 4),
        ([4, 5, 5], "b", 5),
        ([4, 5, 5], "bc", 4),
        ([4, 5, 4, 5, 5], "ac", 5),
        ([4, 5], "ab", None),
    ],
)
def test_common_epoch(epochs, clients, common):
    """Of peers in client mode the epoch counts, if a donor is there too."""
    donors = set(PEERS.values()) - {PEERS[name] for name in clients}
    said = {peer: Told(epoch) for peer, epoch in zip(PEERS.values(), epochs, strict=False)}
    assert common_epoch(said, donors) == common
    assert common_epoch(dict(reversed(said.items())), donors) == common


@pytest.mark.parametrize(
    "told, donors, right, why",
    [
        (dict(a="5x", b="5x", c="5x"), "abc", "abc", "all equal"),
        (dict(a="5y", b="5x", c="5x"), "abc", "bc", "two hold one state, a third another"),
        (dict(a="5x", b="5y"), "ab", "a", "a tie: the smallest id"),
        (dict(a="5x", b="5y", c="5y", d="5x"), "abcd", "ad", "a tie of two and two"),
        (dict(a="5x", b="5y", c="5z"), "abc", "a", "all differ"),
        (dict(a="5x", b="5y", c="5y"), "a", "a", "nobody gives what b and c hold"),
        (dict(a="5x", b="5y", c="5y"), "ac", "bc", "c gives it"),
        (dict(a="5x", b="5y"), "b", "b", "a does not give its state"),
        (dict(a="5x", b="4x", c="4x"), "abc", "a", "others are at another epoch"),
        (dict(a="5x", b="5X"), "ab", "ab", "processors round differently"),
        (dict(a="5x?", b="5x"), "ab", "a", "near, and not of the same steps"),
        (dict(a="5x?", b="5x", c="5X"), "abc", "bc", "the same, of three"),
        (dict(a="5x?", b="5X?", c="5x"), "abc", "ab", "of the same steps, and those are most"),
        (dict(a="4x"), "a", "", "nobody is at this epoch"),
        (dict(a="5x", b="5x"), "", "", "nobody gives"),
    ],
)
def test_prevailing(told, donors, right, why):
    donors = {PEERS[name] for name in donors}
    assert prevailing(read_all(telling(**told)), 5, donors) == {PEERS[name] for name in right}, why


@pytest.mark.parametrize(
    "told, follows, why",
    [
        (dict(a="5x", b="5x", c="5x"), {}, "all equal"),
        (dict(a="5y", b="5x", c="5x"), {"a": "bc"}, "the odd one"),
        (dict(a="5x", b="5y"), {"b": "a"}, "of two that differ exactly one follows"),
        (dict(a="5x", b="5y", c="5z"), {"b": "a", "c": "a"}, "of many, all but one"),
        (dict(a="5x", b="4y", c="5x"), {"b": "ac"}, "behind"),
        (dict(a="4x", b="4x", c="5y"), {"c": "ab"}, "ahead of most by a step: they do not see its record"),
        (dict(a="4x", b="4x", c="6y"), {}, "ahead of most by two, who come from afar: they follow"),
        (dict(a="4x", b="4x", c="5y", d="6y"), {}, "ahead of half: the others see its record and come"),
        (dict(a="4x", b="4z", c="5y"), {"b": "a"}, "ahead of most, who hold no one state"),
        (dict(a="4x", b="5x"), {"a": "b"}, "behind, between two"),
        (dict(a="4x", b="4z", c="5x", d="5y", e="5y"), {"a": "de", "b": "de", "c": "de"}, "everything at once"),
    ],
)
def test_whom_to_follow(told, follows, why):
    told = telling(**told)
    for name, peer in PEERS.items():
        if peer in told:
            follow = whom_to_follow(told, peer, frozenset(told))
            donors = "".join(name for name, peer in PEERS.items() if follow and peer in follow.donors)
            assert donors == follows.get(name, ""), (name, why)
            assert follow is None or follow.at_least == 1 + common_epoch(read_all(told), frozenset(told))


def test_a_client_that_is_ahead_alone_comes_back():
    """Nobody can take its state, so nobody would ever be where it is."""
    told = telling(a="7x", b="5y", c="5y", d="4z")
    donors = {B, C, D}
    assert whom_to_follow(told, A, donors).at_least == 6 and whom_to_follow(told, A, donors).donors == (B, C)
    assert whom_to_follow(told, B, donors) is None and whom_to_follow(told, D, donors).donors == (B, C)
    assert set(out_of_step(told, donors)) == {A, D}
    assert whom_to_follow(told, A, {A, *donors}) is None, "a donor would be followed, for b and c are not most"


def test_who_cannot_be_followed_is_not():
    told = telling(a="5x", b="5y", c="5y")
    assert whom_to_follow(told, A, {A}) is None, "the others are in client mode: they will come to us"
    assert whom_to_follow(told, B, {A}).donors == (A,)
    assert whom_to_follow(told, A, set()) is None


def test_words_of_an_unknown_kind_lead_nobody_astray():
    for nonsense in (None, 5, [], "5x", {"epoch": 5}):
        told = {**telling(a="5x", b="5x"), C: nonsense}
        assert whom_to_follow(told, A, frozenset(told)) is None
        assert whom_to_follow(told, C, frozenset(told)) is None
    told = {**telling(a="5x", b="5x"), C: [5, b"unreadable"]}
    assert whom_to_follow(told, A, frozenset(told)) is None
    assert whom_to_follow(told, C, frozenset(told)).donors == (A, B)


@pytest.mark.parametrize(
    "told, shared",
    [
        (dict(a="5x"), False),
        (dict(a="5x", b="5x"), True),
        (dict(a="5x", b="5y", c="5x"), True),
        (dict(a="5x", b="5y"), False),  # b follows, and does not hold it yet
        (dict(a="5x", b="4x"), False),
        (dict(b="5x", c="5x"), False),
        (dict(a="5x", b="5X"), True),
        (dict(a="5x?", b="5x"), False),
        (dict(a="5x?", b="5X?"), True),
    ],
)
def test_a_state_is_shared_when_somebody_else_holds_it(told, shared):
    assert (holders(telling(**told), A) > 1) is shared
    assert holders({**telling(**told), D: None}, A) == holders(telling(**told), A) and not holders({A: [5], B: [5]}, A)


def past(*words: str) -> dict[int, Told]:
    return {said.epoch: said for said in (read_told(telling(a=one)[A]) for one in words)}


@pytest.mark.parametrize(
    "ours, theirs, common",
    [
        (["3x", "4x", "5y"], ["3x", "4x", "5x"], 4),
        (["3x", "4x", "5y"], ["5y", "6z"], 5),
        (["3x", "4x"], ["3X", "4X"], 4),
        (["3x", "4x?", "5x?"], ["3X", "4X", "5X"], 3),
        (["3x"], ["4x"], -1),
        (["3x"], ["3y"], -1),
        (["3x"], [], -1),
    ],
)
def test_what_two_states_had_in_common_is_known_by_their_past(ours, theirs, common):
    assert last_in_common(past(*ours), past(*theirs)) == last_in_common(past(*theirs), past(*ours)) == common


@pytest.mark.parametrize(
    "told",
    [None, 5, "x", [5], [[5]], [[5, "x", OTHER]], [[5, b"x", OTHER]], [[-1, HELD["x"], OTHER]], [[5, HELD["x"]]],
     [["5", HELD["x"], OTHER]], [[5, b"\xff" * 64, OTHER]], [[epoch, HELD["x"], OTHER] for epoch in range(PAST + 1)]],
)  # fmt: skip
def test_a_past_that_cannot_be_read_is_none(told):
    assert read_past(told) == {}


def test_a_past_is_read_as_it_was_told():
    told = [[epoch, HELD["x"], (BEGINNING, OTHER)[epoch % 2]] for epoch in range(PAST)]
    assert [said.words() for said in read_past(told).values()] == told


def test_out_of_step():
    told = {**telling(a="5x", b="5y", c="4x"), D: None}
    assert out_of_step(told, {A, B, C, D}) == {C: "at epoch 4, the others at 5"}
    assert out_of_step({}, set()) == {} and out_of_step({A: None}, {A}) == {}
    assert out_of_step(told, set()) == {}, "nobody knows"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    words=st.lists(
        st.tuples(st.integers(4, 6), st.sampled_from("xyzX"), st.sampled_from([BEGINNING, OTHER])),
        min_size=1,
        max_size=5,
    ),
    clients=st.sets(st.sampled_from(list(PEERS.values()))),
)
def test_whoever_follows_ends_with_those_who_do_not(words, clients):
    """Nobody follows a peer that itself follows another, and of the common epoch not everybody is apart."""
    told = {peer: [at, HELD[name], line] for peer, (at, name, line) in zip(PEERS.values(), words, strict=False)}
    said = read_all(told)
    donors = frozenset(told) - clients
    follows = {peer: whom_to_follow(told, peer, donors) for peer in told}
    for peer, follow in follows.items():
        for donor in follow.donors if follow else ():
            assert donor != peer and follows[donor] is None and donor in donors
    kept = [one for peer, one in said.items() if one.epoch == common_epoch(said, donors) and follows[peer] is None]
    assert bool(kept) is bool(donors)
    assert not kept or any(all(one.is_same(other) for other in kept) for one in kept)


# --- donors ---


def test_the_latest_that_most_hold_is_asked_first():
    told = telling(a="5x", b="6y", c="6z", d="6z", e="4x")
    everybody = list(PEERS.values())
    assert rank_donors(told, everybody) == [C, D, B, A, E]
    assert rank_donors(told, everybody[::-1]) == [D, C, B, A, E], "equals in the order given, which is random"
    assert rank_donors({**told, D: "nonsense"}, everybody) == [B, C, A, E]
    assert rank_donors({}, []) == []
