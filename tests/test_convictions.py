"""Whom most accounts convict is refused by everybody, and nobody else is: the rule, the board, the keeper."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import time
from types import SimpleNamespace
from typing import get_args

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from tests.convicting import strike_of
from tests.trust import RunKeys
from volunteer_kit.auth.access_token import BanList, account_digest
from volunteer_kit.auth.evidence import CAUSES, MAX_DETAILS, Cause
from volunteer_kit.robust import standing
from volunteer_kit.swarm import conviction_keeper as keeping
from volunteer_kit.swarm.admission import Admission, NotAdmitted
from volunteer_kit.swarm.condemned import CAPACITY, Condemned
from volunteer_kit.swarm.conviction_keeper import ConvictionKeeper
from volunteer_kit.swarm.convictions import (
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

A, B, C, D, E = PEERS = [PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 6)]
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


# --- whom everybody refuses ---


def test_the_condemned_are_refused_in_all_processes_of_a_run_with_an_authority(tmp_path):
    run = RunKeys(tmp_path)
    admission = run.admission(own=A, bob=B, cleo=C)
    assert admission.show(run.token(D, "bob"), D) is None
    admission.condemn([B])
    child = mp.get_context("fork").Process(target=_must_refuse, args=(admission, D))
    child.start()
    child.join(30)
    assert child.exitcode == 0, "all machines of the account"
    assert admission.show(run.token(D, "bob"), D) == "convicted" and admission.is_admitted(C)
    assert not admission.believes(B) and admission.refused[("record", "convicted")] == 1
    with pytest.raises(NotAdmitted, match="was caught cheating by the others"):
        admission.check(B, "join_group")
    admission.ban(run.ban("bob")[0])
    assert admission.reason_to_refuse(B) == "banned", "the authority's word stands above"
    admission.condemn([])
    assert admission.reason_to_refuse(D) == "banned" and admission.is_admitted(C)


def _must_refuse(admission: Admission, peer: PeerID) -> None:
    assert admission.reason_to_refuse(peer) == "convicted" == admission.why_shut_out(peer)


def test_the_condemned_are_refused_in_open_runs():
    admission = Admission()
    admission.condemn([B])
    child = mp.get_context("fork").Process(target=_must_refuse, args=(admission, B))
    child.start()
    child.join(30)
    assert child.exitcode == 0 and admission.show(b"", B) == "convicted" and admission.show(b"", C) is None
    assert not admission.believes(B) and admission.believes(C) and admission.why_shut_out(C) is None
    with pytest.raises(NotAdmitted, match="caught cheating"):
        admission.check(B, "aggregate_part")
    admission.condemn([])
    assert admission.is_admitted(B)


def test_the_table_of_the_condemned_has_an_end():
    table = Condemned()
    table.keys = (i.to_bytes(16, "big") for i in range(CAPACITY + 5))
    assert len(table.keys) == CAPACITY
    table.keys = ()
    assert table.keys == frozenset()


# --- who keeps it ---


class Notice:
    """In the board's place: what each says, by accused."""

    def __init__(self, own: PeerID = A):
        self.dht, self.said, self.asked, self.renewed = SimpleNamespace(peer_id=own), {}, [], 0

    def fetch(self, is_worthwhile):
        self.asked = [accused for accused, said in self.said.items() if is_worthwhile(accused, set(said))]
        return {accused: self.said[accused] for accused in self.asked}

    def renew(self) -> None:
        self.renewed += 1


@pytest.fixture
def keep():
    """Starts keepers that look when they are told to."""
    started = []

    def start(notice: Notice, admission: Admission, peers=PEERS) -> SimpleNamespace:
        told = []
        keeper = ConvictionKeeper(notice, admission, lambda: list(peers), on_convicted=told.append, look_every=1e6)
        started.append(keeper)
        deadline = time.monotonic() + 10
        while not keeper._present and time.monotonic() < deadline:  # its own first look
            time.sleep(0.01)
        return SimpleNamespace(look=keeper.look, told=told, keeper=keeper)

    yield start
    for one in started:
        one.close()


def test_a_majority_is_honoured_after_two_looks_and_a_minority_never(keep):
    notice, admission = Notice(), Admission()
    kept = keep(notice, admission)
    notice.said = {E: {one: [strike_of(E)] for one in (B, C, D)}, B: {one: [strike_of(B)] for one in (D, E)}}
    kept.look()
    assert admission.is_admitted(E) and notice.asked == [E], "what few say is not even fetched"
    kept.look()
    assert admission.reason_to_refuse(E) == "convicted" and admission.is_admitted(B)
    (case,) = kept.told
    assert case.accused == E and len(case.said) == 3 and case.others == 4 and "3 of the 4" in case.in_words()
    notice.said = {}
    kept.look()
    assert not admission.is_admitted(E) and len(kept.told) == 1, "it stays out though the records end"


def test_a_moment_in_which_the_others_are_not_seen_convicts_nobody(keep):
    notice, admission, peers = Notice(), Admission(), [A, B, C]
    notice.said = {A: {}, E: {one: [strike_of(E)] for one in (B, C)}}
    kept = keep(notice, admission, peers)
    peers += [D, E]
    for _ in range(3):
        kept.look()
    assert admission.is_admitted(E) and kept.told == []


def test_who_was_seen_a_moment_ago_still_counts(keep):
    notice, admission, peers = Notice(), Admission(), list(PEERS)
    kept = keep(notice, admission, peers)
    peers[:] = [A, B, C]
    notice.said = {E: {one: [strike_of(E)] for one in (B, C)}}
    for _ in range(3):
        kept.look()
    assert admission.is_admitted(E), "two of four"


def test_the_condemned_come_free_after_half_an_hour(keep, monkeypatch):
    notice, admission = Notice(), Admission()
    kept = keep(notice, admission)
    notice.said = {E: {one: [strike_of(E)] for one in (B, C, D)}}
    kept.look()
    kept.look()
    notice.said = {}
    now = time.monotonic()
    monkeypatch.setattr(keeping.time, "monotonic", lambda: now + keeping.HELD_FOR - 5)
    kept.look()
    assert not admission.is_admitted(E) and notice.renewed == 1, "and ours are renewed"
    monkeypatch.setattr(keeping.time, "monotonic", lambda: now + keeping.HELD_FOR + 5)
    kept.look()
    assert admission.is_admitted(E)


def test_we_hear_of_our_own_conviction_at_the_first_look(keep):
    notice, admission = Notice(), Admission()
    kept = keep(notice, admission)
    notice.said = {A: {one: [strike_of(A)] for one in (B, C, D)}}
    for _ in range(3):
        kept.look()
    assert [case.accused for case in kept.told] == [A] and admission.is_admitted(A)


def test_accounts_vote_not_machines_and_hosts_are_not_convicted(keep, tmp_path):
    run = RunKeys(tmp_path)
    admission = run.admission(own=A, bob=B, cleo=D, eve=E)
    assert admission.show(run.token(C, "bob"), C) is None
    notice = Notice()
    kept = keep(notice, admission)
    notice.said = {E: {one: [strike_of(E)] for one in (B, C)}, D: {one: [strike_of(D)] for one in (A, B, C)}}
    kept.look()
    kept.look()
    assert admission.is_admitted(E), "bob is one of three"
    assert admission.reason_to_refuse(D) == "convicted" and len(kept.told[0].said) == 2
    monitor = PeerID(b"\x12\x20" + b"m" * 32)
    assert admission.show(run.token(monitor, "(monitor)", role="monitor"), monitor) is None
    notice.said = {monitor: {one: [strike_of(monitor)] for one in (A, B, E)}}
    kept.look()
    kept.look()
    assert admission.is_admitted(monitor)


def test_tokens_of_whom_few_accuse_are_not_looked_for(keep, tmp_path):
    """Who is accused need not exist, and to look for one is a question to the DHT."""
    run = RunKeys(tmp_path)
    admission, notice = run.admission(own=A, bob=B, cleo=C), Notice()
    kept = keep(notice, admission)
    admission.take_unknown()
    notice.said = {D: {B: [strike_of(D)]}}
    kept.look()
    assert admission.take_unknown() == []
    notice.said = {D: {one: [strike_of(D)] for one in (B, C)}}
    kept.look()
    assert admission.take_unknown() == [D] and kept.told == []
    assert admission.show(run.token(D, "dora"), D) is None
    kept.look()
    kept.look()
    assert [case.accused for case in kept.told] == [D]


def test_a_pardon_frees_at_the_next_look(keep, tmp_path):
    run = RunKeys(tmp_path)
    admission = run.admission(own=A, bob=B, cleo=C, dora=D, eve=E)
    notice = Notice()
    kept = keep(notice, admission)
    notice.said = {E: {one: [strike_of(E)] for one in (B, C, D)}}
    kept.look()
    kept.look()
    assert not admission.is_admitted(E)
    admission.ban(BanList(1, frozenset(), {account_digest("test", "eve"): time.time() + 1}))
    assert admission.pardoned_at(E) > time.time() and admission.pardoned_at(B) == 0.0
    notice.said = {}  # the board leaves out what was set aside
    kept.look()
    assert admission.is_admitted(E)
    admission.ban(BanList(0, frozenset(), {}))
    assert admission.pardoned_at(E) > 0, "an older list changes nothing"


# --- through a real DHT ---


def test_the_board_through_a_real_dht(peer, monkeypatch):
    from hivemind.dht import DHT

    from tests.somebody import Somebody, store_as

    board = ConvictionBoard(peer.dht, "board")
    assert board.fetch() == {} and board.publish(A, []) is None
    now = get_dht_time()
    strikes = [strike_of(A, epoch=epoch, at=now - 100 + epoch) for epoch in range(MAX_STRIKES + 2)]
    assert board.publish(A, [*strikes, strike_of(B), strike_of(A, at=get_dht_time() - 2 * 86_400)]).result(20)
    us = peer.peer_id
    assert board.fetch() == {A: {us: strikes[2:]}}, "the newest, of this peer, of this day"

    dht = DHT(initial_peers=peer.visible_maddrs(), client_mode=True, start=True, startup_timeout=60)
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
