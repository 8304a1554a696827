"""Whom most accounts convict: the rule, what is signed, and the board."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from typing import get_args

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from tests.convicting import strike_of
from volunteer_kit.auth.evidence import CAUSES, MAX_DETAILS, Cause
from volunteer_kit.robust import standing
from volunteer_kit.swarm.verification.convictions import (
    MAX_ACCUSED,
    MAX_STRIKES,
    Convicted,
    Conviction,
    ConvictionBoard,
    Strike,
    accused_key,
    evidence_of,
    index_key,
    is_convicted,
    words_of,
)

A, B, C, D, E = [PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 6)]
a, b, c, d, e = (bytes([i]) * 16 for i in range(5))


# --- who is convicted ---


@pytest.mark.parametrize(
    ("signers", "present", "convicted"),
    [
        ([], [a, b, c], False),
        ([b], [a, b], False),  # one alone, though it is everybody else
        ([b], [a, b, c], False),
        ([b, c], [a, b, c], True),
        ([b, c], [a, b, c, d], True),
        ([b, c], [a, b, c, d, e], False),  # half is not more than half
        ([b, c, d], [a, b, c, d, e], True),
        ([b, b, b], [a, b, c, d, e], False),
        ([a, b], [a, b, c], False),  # nobody votes for himself
        ([b, c], [a, b, d, e], False),  # who does not take part has no vote
        ([b, c], [b, c], True),  # the accused need not be here any more
    ],
)
def test_who_is_convicted(signers, present, convicted):
    assert is_convicted(a, signers, present) == convicted


def test_seven_of_sixteen_never_convict_the_honest_and_nine_convict_each_of_the_seven():
    accounts = [bytes([i]) * 16 for i in range(16)]
    attackers, honest = accounts[:7], accounts[7:]
    assert not any(is_convicted(one, attackers, accounts) for one in honest)
    assert all(is_convicted(one, honest, accounts) for one in attackers)
    for there in range(9, 17):  # whoever has not come yet; while those who cheat are fewer than half of who is here
        for some in itertools.islice(itertools.combinations(honest, there - 7), 20):
            present = [*attackers, *some]
            for one in some:
                assert is_convicted(one, attackers, present) == (2 * 7 > len(present) - 1), "7 of 14 others"


# --- what is signed ---


@pytest.mark.parametrize(
    "changes",
    [
        {"accused": b"short"},
        {"accused": "1" * 34},
        {"epoch": -1},
        {"epoch": 2**31},
        {"epoch": True},
        {"round": b"x"},
        {"cause": "ugly"},
        {"cause": b"gradient"},
        {"jurors_for": -1},
        {"jurors_against": 1.0},
        {"group_size": 10**6},
        {"details": "x" * (MAX_DETAILS + 1)},
        {"details": "two\nlines"},
        {"details": "\u202e"},
        {"details": "\U0001f600" * 200},  # 800 bytes
        {"details": b"bytes"},
        {"at": float("nan")},
        {"at": 5},
        {"at": 1e13},
    ],
    ids=str,
)
def test_a_strike_is_typed_and_bounded(changes):
    with pytest.raises(ValueError):
        strike_of(A, **changes)


def test_a_strike_is_of_now_and_causes_have_words():
    strike = Strike(**strike_of(A).dict(exclude={"at"}))
    assert abs(strike.at - get_dht_time()) < 5 and {strike, strike} == {strike}
    for cause in CAUSES:
        assert strike_of(A, cause=cause).cause == cause


def test_a_cause_has_the_same_words_wherever_it_is_told():
    """robust and auth do not know each other: each has the causes for itself."""
    assert standing.CAUSES == CAUSES
    assert set(CAUSES) == set(get_args(Cause)) == set(get_args(standing.Cause))


def test_the_largest_values_fit_into_the_dht():
    strikes = [strike_of(A, cause="false_accusation", details="ß" * MAX_DETAILS)] * MAX_STRIKES
    largest = (
        Conviction(peer_id=B.to_bytes(), strikes=strikes),
        Convicted(peer_id=B.to_bytes(), accused=A.to_bytes() * MAX_ACCUSED),
    )
    for record in largest:
        assert len(DHTProtocol.serializer.dumps(record.dict())) + 360 < 4096, "with the signature of a 2048 bit key"
    with pytest.raises(ValueError):
        Conviction(peer_id=B.to_bytes(), strikes=strikes * 2)
    with pytest.raises(ValueError):
        Convicted(peer_id=B.to_bytes(), accused=bytes(34))


def test_what_few_have_found_does_not_get_into_the_reason():
    said = {one: [strike_of(A, epoch=3), strike_of(A, epoch=5)] for one in (B, C, D)}
    said[E] = [strike_of(A, epoch=9, cause="equivocation", details="he is ugly")]
    assert words_of(A, said, 5) == f"4 of the 5 other accounts found that {CAUSES['gradient']} (steps 3 and 5)"
    assert len(evidence_of(A, said, 5).findings) == 3, "moderators see it, and who says so"


# --- what is stored, and again when it could not be ---


class Line:
    """In a DHT's place: notes what is stored, and says whether it was."""

    peer_id = E

    def __init__(self):
        self.stored, self.outcome = [], True

    def add_validators(self, validators) -> None:
        pass

    def store(self, key, value, expires, subkey, return_future) -> Future:
        self.stored.append((key, value))
        future = Future()
        if isinstance(self.outcome, Exception):
            future.set_exception(self.outcome)
        elif self.outcome is not None:
            future.set_result(self.outcome)
        return future

    def take(self) -> list[str]:
        keys, self.stored = [key for key, _ in self.stored], []
        return keys


@pytest.mark.parametrize("outcome", [False, ConnectionError("the line is down")], ids=["refused", "failed"])
def test_what_could_not_be_stored_is_stored_again(outcome):
    line = Line()
    board, index = ConvictionBoard(line, "run"), index_key("run")
    line.outcome = outcome
    board.publish(A, [strike_of(A)])
    both = [index, accused_key("run", A)]
    assert line.take() == both
    board.retry()
    assert line.take() == both, "the line is down still"
    line.outcome = True
    board.retry()
    assert line.take() == both
    board.publish(B, [strike_of(B)])
    line.take()
    board.retry()
    assert line.take() == [], "all is stored"
    line.outcome = None
    board.renew()
    line.take()
    board.retry()
    assert line.take() == [], "it is on its way"


def test_what_is_published_while_another_thread_renews_is_not_lost(monkeypatch):
    line = Line()
    board = ConvictionBoard(line, "run")
    board.publish(A, [strike_of(A)])
    publisher = threading.Thread(target=board.publish, args=(B, [strike_of(B)]))
    counts = board._counts

    def publish_meanwhile(strike, accused) -> bool:
        if accused == A and not publisher.ident:
            publisher.start()
            publisher.join(0.2)  # as far as it gets
        return counts(strike, accused)

    monkeypatch.setattr(board, "_counts", publish_meanwhile)
    board.renew()
    publisher.join(60)
    assert board._own.keys() == {A, B}
    last = [value["accused"] for key, value in line.stored if key == index_key("run")][-1]
    assert last == A.to_bytes() + B.to_bytes()


# --- through a real DHT ---


def test_the_board_through_a_real_dht(peer, monkeypatch):
    from hivemind.dht import DHT

    from tests.somebody import Somebody, store_as

    board = ConvictionBoard(peer.dht, "board")
    assert board.fetch() == {} and board.publish(A, []) is None
    now = get_dht_time()
    strikes = [strike_of(A, epoch=epoch, at=now - 100 + epoch) for epoch in range(MAX_STRIKES + 2)]
    assert board.publish(A, [*strikes, strike_of(B), strike_of(A, at=get_dht_time() - 2 * 86_400)]).result(60)
    us = peer.peer_id
    assert board.fetch() == {A: {us: strikes[2:]}}, "the newest, of this peer, of this day"

    dht = DHT(initial_peers=peer.visible_maddrs(), client_mode=True, start=True, startup_timeout=120)
    try:

        def write(who: Somebody, key: str, value: dict) -> bool:
            return store_as(who, dht, peer.peer_id, key, value)

        def lists(who: Somebody, *accused: PeerID) -> dict:
            packed = b"".join(one.to_bytes() for one in accused)
            return Convicted(peer_id=who.peer_id.to_bytes(), accused=packed).dict()

        def says(who: Somebody, **changes) -> dict:
            return Conviction(peer_id=who.peer_id.to_bytes(), strikes=[strike_of(A, **changes)]).dict()

        honest, thief, vandal, late = (Somebody() for _ in range(4))
        index, detail = index_key("board"), accused_key("board", A)
        assert write(honest, index, lists(honest, A, C)) and write(honest, detail, says(honest))
        assert write(thief, index, lists(honest, D)) and write(thief, detail, says(honest)), "of another than it says"
        assert write(vandal, index, {"peer_id": vandal.peer_id.to_bytes(), "accused": b"x" * 34})
        assert write(vandal, detail, {**says(vandal), "strikes": []})
        assert write(late, detail, says(late, at=get_dht_time() + 600)), "it has not been yet"
    finally:
        dht.shutdown()
    asked = []
    found = board.fetch(lambda accused, signers: asked.append((accused, frozenset(signers))) or len(signers) > 1)
    assert found.keys() == {A} and found[A].keys() == {us, honest.peer_id}
    assert set(asked) == {(A, frozenset({us, honest.peer_id})), (C, frozenset({honest.peer_id}))}

    monkeypatch.setattr(peer.admission, "pardoned_at", lambda one: now - 97.5)
    assert [one.epoch for one in board.fetch()[A][us]] == [3, 4], "what was found before was set aside"
    monkeypatch.setattr(peer.admission, "pardoned_at", lambda one: now + 30)
    assert board.fetch() == {} and board.publish(A, strikes) is None
    board.renew()
    assert board._own == {}
