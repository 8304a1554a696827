"""Who is convicted is refused by everybody, in all processes and as long as it stands, and nobody else is."""

from __future__ import annotations

import multiprocessing as mp
import threading
import time
from types import SimpleNamespace

import pytest
from hivemind.p2p import PeerID

from tests.convicting import strike_of
from tests.trust import RunKeys
from volunteer_kit.auth.access_token import BanList, account_digest
from volunteer_kit.swarm.net.access.ban_table import CAPACITY, Condemned
from volunteer_kit.swarm.net.access.control import Admission, NotAdmitted
from volunteer_kit.swarm.verification import enforcement as keeping
from volunteer_kit.swarm.verification.enforcement import ConvictionKeeper

A, B, C, D, E = PEERS = [PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 6)]


# --- whom everybody refuses ---


def test_the_condemned_are_refused_in_all_processes_of_a_run_with_an_authority(tmp_path):
    run = RunKeys(tmp_path)
    admission = run.admission(own=A, bob=B, cleo=C)
    assert admission.show(run.token(D, "bob"), D) is None
    admission.condemn([B])
    child = mp.get_context("fork").Process(target=_must_refuse, args=(admission, D))
    child.start()
    child.join(120)
    assert child.exitcode == 0, "all machines of the account"
    assert admission.show(run.token(D, "bob"), D) == "convicted" and admission.is_admitted(C)
    assert not admission.believes(B) and admission.refused[("record", "convicted")] == 1
    with pytest.raises(NotAdmitted, match="was caught cheating by the others"):
        admission.check(B, "find")
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
    child.join(120)
    assert child.exitcode == 0 and admission.show(b"", B) == "convicted" and admission.show(b"", C) is None
    assert not admission.believes(B) and admission.believes(C) and admission.why_shut_out(C) is None
    with pytest.raises(NotAdmitted, match="caught cheating"):
        admission.check(B, "find")
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
        self.retried = 0

    def retry(self) -> None:
        self.retried += 1

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
        told, looked = [], threading.Event()

        class Keeper(ConvictionKeeper):
            def look(self) -> None:
                super().look()
                looked.set()

        keeper = Keeper(notice, admission, lambda: list(peers), on_convicted=told.append, look_every=1e6)
        started.append(keeper)
        assert looked.wait(60), "its own first look does not end"
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
    pardoned = time.time() + 1
    admission.ban(BanList(1, frozenset(), {account_digest("test", "eve"): pardoned}))
    assert admission.pardoned_at(E) == pardoned and admission.pardoned_at(B) == 0.0
    notice.said = {}  # the board leaves out what was set aside
    kept.look()
    assert admission.is_admitted(E)
    admission.ban(BanList(0, frozenset(), {}))
    assert admission.pardoned_at(E) > 0, "an older list changes nothing"


def test_what_could_not_be_stored_is_tried_again_at_each_look(keep):
    """Even when nothing can be read: the others would learn of it ten minutes later, when all is renewed."""
    notice = Notice()
    kept = keep(notice, Admission())
    before = notice.retried
    kept.look()
    notice.fetch = None
    with pytest.raises(TypeError):
        kept.look()
    assert notice.retried == before + 2 and notice.renewed == 0
