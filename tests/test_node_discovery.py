"""Discovery decides which peer begins a run, and tells a node of the others."""

from __future__ import annotations

from functools import cache
from math import inf
from types import SimpleNamespace

import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from tests.waiting import wait_until
from volunteer_kit.swarm.node import discovery
from volunteer_kit.swarm.node.credentials import peer_id_of, public_der
from volunteer_kit.swarm.node.discovery import SETTLE, TURN, Discovery, may_begin
from volunteer_kit.swarm.node.talk import Found, Seen


@pytest.mark.parametrize(
    ("waiting", "waited", "begins"),
    [
        ([], 0.0, False),
        ([], SETTLE, True),
        (["n"], SETTLE, True),  # "m" comes first
        (["m"], SETTLE, True),  # itself
        (["a"], SETTLE + TURN - 0.1, False),
        (["a"], SETTLE + TURN, True),
        (["a", "z"], SETTLE + TURN, True),
        (["a", "b"], SETTLE + TURN, False),
        (["a", "b"], SETTLE + 2 * TURN, True),
        (["b", "a", "b", "a"], SETTLE + 2 * TURN, True),
    ],
)
def test_waiting_peers_take_turns(waiting, waited, begins):
    assert may_begin("m", waiting, waited) is begins


def test_at_one_moment_one_of_those_that_see_each_other_begins():
    names = ["a", "b", "c", "d"]
    for waited in (SETTLE, SETTLE + 0.5 * TURN, SETTLE + 0.9 * TURN):
        assert [name for name in names if may_begin(name, set(names) - {name}, waited)] == ["a"]


def test_the_first_peer_of_a_run_waits_for_nobody():
    assert may_begin("m", [], 0.0, settle=0.0)


# --- against a DHT in memory ---


@cache
def signer(place: int) -> RSASignatureValidator:
    """Sorted by the peer ids: `signer(0)` is of the first one."""
    return _signers()[place]


@cache
def _signers() -> list[RSASignatureValidator]:
    return sorted((RSASignatureValidator(RSAPrivateKey()) for _ in range(4)), key=lambda each: str(peer_of(each)))


def peer_of(signed: RSASignatureValidator) -> PeerID:
    return PeerID.from_base58(peer_id_of(public_der(signed._private_key)))


class Board:
    """The records that all peers have written, by subkey."""

    def __init__(self):
        self.records: dict[bytes, object] = {}
        self.away = False

    def write(self, place: int, epoch: int, public: bool = True, of: int | None = None) -> str:
        """A record of another peer; :returns: its id

        :param of: whose record it claims to be
        """
        peer = peer_of(signer(place if of is None else of))
        self.records[signer(place).local_public_key] = {"peer_id": peer.to_bytes(), "epoch": epoch, "public": public}
        return str(peer)


class Dht:
    """One peer's DHT."""

    def __init__(self, board: Board, place: int):
        self.board, self.peer_id = board, peer_of(signer(place))
        self.subkey = signer(place).local_public_key
        self.looks = 0

    def add_validators(self, validators):
        assert validators

    @property
    def own(self):
        return self.board.records.get(self.subkey, {})

    def store(self, key, subkey, value, expiration_time, return_future=False):
        if self.board.away:
            raise ConnectionError("no neighbour answers")
        self.board.records[subkey] = value

    def get(self, key, latest):
        if self.board.away:
            raise ConnectionError("no neighbour answers")
        self.looks += 1
        until = get_dht_time() + 60
        there = {subkey: ValueWithExpiration(value, until) for subkey, value in self.board.records.copy().items()}
        return ValueWithExpiration(there, until) if there else None

    def looks_again(self) -> None:
        """Wait until it has looked, and what it saw has been taken."""
        before = self.looks
        wait_until(lambda: self.looks >= before + 3)


class Link:
    """The messages to the node, and its own progress."""

    def __init__(self):
        self.told: list = []
        self.progress = None

    def send(self, message):
        self.told.append(message)

    def at(self, epoch: int) -> None:
        self.progress = SimpleNamespace(epoch=epoch)

    def heard(self, kind) -> list:
        return [each for each in self.told if isinstance(each, kind)]


@pytest.fixture
def board(monkeypatch):
    """The discovery's pauses are short."""
    monkeypatch.setattr(discovery, "LOOK_EVERY", 0.005)
    monkeypatch.setattr(discovery, "RENEWED_EVERY", 0.02)
    monkeypatch.setattr(discovery, "LOOK_LATER", 0.02)
    monkeypatch.setattr(discovery, "LOOK_ALONE", 0.02)
    monkeypatch.setattr(discovery, "SETTLE", 0.01)
    return Board()


@pytest.fixture
def join(board, monkeypatch):
    made = []

    def join(place: int, **settings):
        monkeypatch.setattr(discovery, "RSASignatureValidator", lambda: signer(place))
        link, dht = Link(), Dht(board, place)
        made.append(Discovery(dht, link, "run", **{"public": True, **settings}))
        return made[-1], link, dht

    yield join
    board.away = False
    for each in made:
        each.close()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_peer_that_finds_nobody_begins_the_run(board, join, is_first):
    _, link, dht = join(0, is_first=is_first)
    wait_until(lambda: link.heard(Found))
    wait_until(lambda: dht.own["epoch"] == 0)  # at once: its node may take seconds to begin, and others would as well
    link.at(1)
    wait_until(lambda: dht.own["epoch"] == 1)
    told = len(link.told)
    dht.looks_again()
    assert len(link.told) == told and not link.heard(Seen)


def test_a_peer_that_finds_others_with_parameters_joins_them(board, join):
    there, waiting = board.write(2, 7), board.write(3, -1)
    found, link, dht = join(0, is_first=True)
    wait_until(lambda: link.told)
    dht.looks_again()
    assert link.told == [Seen(((there, "", True, inf),))]
    assert {str(peer) for peer in found.others} == {there, waiting}


def test_the_first_of_those_that_wait_begins(board, join):
    board.write(1, -1)
    board.write(2, -1)
    _, link, _ = join(0)
    wait_until(lambda: link.heard(Found))


def test_another_one_waits_for_its_turn_and_joins_who_begins(board, join):
    board.write(0, -1)
    _, link, dht = join(1)
    dht.looks_again()
    assert not link.told
    first = board.write(0, 0)
    wait_until(lambda: link.told)
    assert link.told == [Seen(((first, "", True, inf),))]


def test_waiting_clients_hold_up_nobody(board, join):
    board.write(0, -1, public=False)
    _, link, _ = join(1)
    wait_until(lambda: link.heard(Found))


def test_a_client_begins_nothing_and_says_when_nobody_can_be_called(board, join):
    board.write(0, -1, public=False)
    found, link, dht = join(1, public=False, is_first=True)
    wait_until(lambda: found.uncallable == 1)
    dht.looks_again()
    assert not link.told
    board.write(2, -1)
    wait_until(lambda: found.uncallable == 0)


def test_what_changes_is_told(board, join):
    first = board.write(1, 1)
    _, link, _ = join(0)
    wait_until(lambda: link.heard(Seen))
    second = board.write(2, 2)
    link.at(5)
    wait_until(lambda: len(link.heard(Seen)) == 2)
    assert {peer for peer, _, _, _ in link.heard(Seen)[1].peers} == {first, second}


def test_records_under_another_name_and_garbage_are_not_seen(board, join):
    there = board.write(1, 5)
    board.write(2, 5, of=3)
    board.records[b"garbage"] = {"peer_id": b"", "epoch": 3, "public": True}
    board.records[signer(3).local_public_key] = {"peer_id": 5, "epoch": "many"}
    found, link, _ = join(0)
    wait_until(lambda: link.told)
    assert [peer for peer, _, _, _ in link.told[0].peers] == [there] == [str(peer) for peer in found.others]


def test_a_dht_that_is_away_for_a_while(board, join):
    board.away = True
    _, link, dht = join(0, is_first=True)
    board.away = False
    wait_until(lambda: link.heard(Found))
    wait_until(lambda: dht.own["epoch"] == 0)


def test_who_leaves_takes_its_record_back(board, join):
    found, _, dht = join(0)
    wait_until(lambda: dht.own)
    found.close()
    assert board.records == {dht.subkey: None}
