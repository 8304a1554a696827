"""What peers write about themselves: who signed it, whether it can be true, and the same through a real DHT."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial

import pytest
from hivemind.dht import DHT, DHTNode
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import P2P, PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from volunteer_kit.swarm.identity import load_private_key, peer_id_of_owner
from volunteer_kit.swarm.peer import Peer
from volunteer_kit.swarm.records import (
    Limits,
    PeerBoard,
    PeerRecord,
    SwarmProgressTracker,
    believed_epoch,
    is_plausible,
    parse_record,
    peers_key,
)

NOW = 1_800_000_000.0
LIFETIME = 60.0


class Somebody:
    """A key of its own: its peer id, and the subkey that its records carry."""

    def __init__(self):
        self.key = RSAPrivateKey()
        self.validator = RSASignatureValidator(self.key)
        self.subkey = self.validator.local_public_key
        self.peer_id = peer_id_of_owner(self.subkey)

    def claims(self, peer_id: PeerID | None = None, **changes) -> dict:
        return {
            "peer_id": (peer_id or self.peer_id).to_bytes(),
            "epoch": 3,
            "samples_accumulated": 10,
            "samples_per_second": 5.0,
            "time": get_dht_time(),
            "client_mode": False,
            **changes,
        }


@pytest.fixture(scope="module")
def people():
    return [Somebody() for _ in range(5)]


# --- keys ---


def test_the_owner_of_a_record_is_the_peer_id_of_its_key(tmp_path):
    path = tmp_path / "identity.key"
    P2P.generate_identity(str(path))
    identity = path.read_bytes()
    key = load_private_key(identity)
    subkey = RSASignatureValidator(key).local_public_key
    assert peer_id_of_owner(subkey) == PeerID.from_identity(identity)
    signature = key.sign(b"words")
    assert key.get_public_key().verify(b"words", signature)
    other = tmp_path / "other.key"
    P2P.generate_identity(str(other))
    assert peer_id_of_owner(subkey) != PeerID.from_identity(other.read_bytes())


@pytest.mark.parametrize(
    "subkey",
    [
        b"",
        b"no owner",
        b"[owner:]",
        b"[owner:ssh-rsa AAAA]",
        b"[owner:ssh-rsa " + b"A" * 3000 + b"]",
        b"[owner:ssh-nonsense AAAAC3Nz]",
        b"[owner:\xff\xfe\x00]",
    ],
)
def test_a_subkey_without_a_key_has_no_owner(subkey):
    assert peer_id_of_owner(subkey) is None


# --- one record ---


def entry(value) -> ValueWithExpiration:
    return ValueWithExpiration(value, NOW + LIFETIME)


def test_a_record_counts_only_for_the_peer_that_signed_it(people):
    me, other = people[:2]
    record = parse_record(LocalTrainingProgress, me.subkey, entry(me.claims()))
    assert record.peer_id == me.peer_id.to_bytes() and record.epoch == 3
    assert parse_record(LocalTrainingProgress, me.subkey, entry(me.claims(other.peer_id))) is None
    assert parse_record(LocalTrainingProgress, other.subkey, entry(me.claims())) is None


@pytest.mark.parametrize(
    "broken",
    [
        lambda me: (me.subkey, me.claims()),  # without an expiration
        lambda me: (me.subkey, entry(None)),  # it has left
        lambda me: (me.subkey, entry("words")),
        lambda me: (me.subkey, entry([1, 2])),
        lambda me: (me.subkey, entry({})),
        lambda me: (me.subkey, entry(me.claims(epoch=-1))),
        lambda me: (me.subkey, entry(me.claims(epoch="3"))),
        lambda me: (me.subkey, entry(me.claims(samples_per_second=-1.0))),
        lambda me: (me.subkey, entry(me.claims(client_mode=1))),
        lambda me: (me.subkey, entry({**me.claims(), "peer_id": None})),
        lambda me: (me.subkey.decode(), entry(me.claims())),
        lambda me: (7, entry(me.claims())),
        lambda me: (b"nobody", entry(me.claims())),
    ],
)
def test_what_is_no_record_is_dropped(people, broken):
    subkey, value = broken(people[0])
    assert parse_record(LocalTrainingProgress, subkey, value) is None


# --- could it be true? ---

LIMITS = Limits(target_batch_size=256, max_samples_per_second=1000.0)


def claim(**changes) -> LocalTrainingProgress:
    values = dict(peer_id=b"x", epoch=3, samples_accumulated=10, samples_per_second=5.0, time=NOW, client_mode=False)
    return LocalTrainingProgress.construct(**{**values, **changes})


@pytest.mark.parametrize(
    "changes, plausible",
    [
        ({}, True),
        ({"samples_per_second": 0.0}, True),
        ({"samples_per_second": 1000.0}, True),
        ({"samples_per_second": 1000.1}, False),
        ({"samples_per_second": float("inf")}, False),
        ({"samples_per_second": float("nan")}, False),
        ({"samples_accumulated": 1024}, True),
        ({"samples_accumulated": 1025}, False),
        ({"samples_accumulated": 10**12}, False),
        ({"time": NOW + 4.9}, True),
        ({"time": NOW + 5.1}, False),
        ({"time": NOW + 1e9}, False),
        ({"time": NOW - 119}, True),
        ({"time": NOW - 121}, False),
        ({"time": float("nan")}, False),
        ({"time": float("inf")}, False),
        ({"epoch": 2**31 - 1}, True),
        ({"epoch": 2**31}, False),
    ],
)
def test_is_plausible(changes, plausible):
    assert is_plausible(claim(**changes), LIMITS, NOW, LIFETIME) is plausible


@pytest.mark.parametrize(
    "epochs, own, advance, believed, why",
    [
        ([], 7, 2, 7, "nobody else"),
        ([7, 7, 6], 7, 2, 7, "all are here"),
        ([8, 7, 7], 7, 2, 8, "one is ahead, as time allows"),
        ([9], 7, 2, 9, "the only other, as time allows"),
        ([10], 7, 2, 7, "the only other, faster than time allows"),
        ([10**6, 7, 7], 7, 2, 7, "one liar"),
        ([10**6, 9, 7], 7, 2, 9, "one liar does not hide an honest one"),
        ([10**6, 500, 7, 8], 7, 2, 8, "two liars who do not agree"),
        ([500, 500], 7, 2, 500, "two confirm each other: we were asleep"),
        ([500, 499, 7], 7, 2, 500, "one step apart is confirmation"),
        ([501, 499], 7, 2, 7, "two steps apart is none"),
        ([10**6, 500, 499], 7, 2, 500, "the highest that is confirmed"),
        ([300], 0, 2, 300, "a newcomer has only one witness"),
        ([10**6, 300, 300], 0, 2, 300, "a newcomer among several believes the confirmed one"),
        ([10**6, 300], 0, 2, 0, "a newcomer and two who disagree believes neither"),
        ([3, 2], 7, 2, 7, "we are ahead"),
        ([500], 7, 493, 500, "we slept long enough for it"),
    ],
)
def test_believed_epoch(epochs, own, advance, believed, why):
    assert believed_epoch(epochs, own, advance) == believed, why
    assert believed_epoch(list(reversed(epochs)), own, advance) == believed, "the order of claims does not matter"
    assert believed_epoch(iter(epochs), own, advance) == believed


# --- through a real DHT ---


@pytest.fixture
def tracker(peer, request):
    tracker = SwarmProgressTracker(
        peer.dht, f"t_{abs(hash(request.node.name))}", 256, limits=Limits(256, 1000.0), start=False
    )
    tracker.report_local_progress(local_epoch=3, samples_accumulated=20)
    tracker._own_epoch = (3, time.monotonic())
    return tracker


def test_the_tracker_counts_honest_peers_and_drops_lies(peer, tracker, people):
    honest, second, liar, thief, fast = people
    lies = {
        liar.subkey: entry(liar.claims(epoch=10**6)),
        thief.subkey: entry(thief.claims(honest.peer_id, samples_accumulated=200)),
        fast.subkey: entry(fast.claims(samples_per_second=1e300)),
        b"garbage": entry({"epoch": 1}),
    }
    claims = {
        honest.subkey: entry(honest.claims(samples_accumulated=100)),
        second.subkey: entry(second.claims(epoch=2, client_mode=True)),
        **lies,
    }
    progress = tracker._parse_swarm_progress_data(claims)
    assert progress.epoch == 3, "a lie must not become the swarm's epoch"
    assert tracker.highest_claim == 10**6, "but a newcomer waits a while, for it might be the only one who is right"
    assert progress.num_peers == 3 and progress.num_clients == 1, "ourselves, though our own record is not stored yet"
    # ours, once; the honest one's, and what it did since it wrote them; nothing of the thief's
    assert 100 <= progress.samples_accumulated <= 140
    assert tracker.claims_dropped == len(lies)
    assert progress.eta_next_epoch - get_dht_time() < 1000.0


def test_a_lone_liar_does_not_climb(tracker, people):
    """Each of its claims is one step beyond what was believed before; only time may raise what is believed."""
    liar = people[2]
    began, believed = time.monotonic(), 3
    for _ in range(200):
        believed = tracker._parse_swarm_progress_data({liar.subkey: entry(liar.claims(epoch=believed + 1))}).epoch
    assert believed <= 3 + 2 + (time.monotonic() - began) / tracker.limits.min_epoch_seconds


def test_what_a_client_says_does_not_move_the_swarms_epoch(tracker, people):
    """It cannot reduce or share state, so nobody could follow it."""
    honest, second = people[:2]
    claims = {honest.subkey: entry(honest.claims()), second.subkey: entry(second.claims(epoch=4, client_mode=True))}
    assert tracker._parse_swarm_progress_data(claims).epoch == 3
    claims = {second.subkey: entry(second.claims(epoch=5, client_mode=True))}
    assert tracker._parse_swarm_progress_data(claims).epoch == 3
    claims = {honest.subkey: entry(honest.claims(epoch=7))}
    assert tracker._parse_swarm_progress_data(claims).epoch == 3, "no step on the way to a larger lie, either"
    assert tracker._parse_swarm_progress_data({honest.subkey: entry(honest.claims(epoch=4))}).epoch == 4


def test_a_peer_that_has_left_is_no_lie(tracker, people):
    progress = tracker._parse_swarm_progress_data({people[0].subkey: entry(None)})
    assert progress.num_peers == 1 and tracker.claims_dropped == 0
    for nothing in (None, "words", []):
        assert tracker._parse_swarm_progress_data(nothing).epoch == 3


@contextlib.contextmanager
def running_tracker(peer: Peer, prefix: str) -> Iterator[SwarmProgressTracker]:
    tracker = SwarmProgressTracker(
        peer.dht, prefix, 256, limits=Limits(256), start=True, min_refresh_period=0.1, default_refresh_period=0.2
    )
    try:
        yield tracker
    finally:
        tracker.shutdown(timeout=10)


def stored_progress(peer: Peer, prefix: str) -> tuple[bytes, LocalTrainingProgress]:
    deadline = time.monotonic() + 20
    while (found := peer.dht.get(f"{prefix}_progress", latest=True)) is None:
        assert time.monotonic() < deadline
    [(subkey, value)] = found.value.items()
    return subkey, LocalTrainingProgress.parse_obj(value.value)


def test_a_thread_of_the_tracker_reports_itself_and_reads_it_back(peer):
    with running_tracker(peer, "thread") as tracker:
        tracker.report_local_progress(local_epoch=0, samples_accumulated=20)
        subkey, claim = stored_progress(peer, "thread")
        assert claim.samples_accumulated == 20
        assert peer_id_of_owner(subkey) == peer.peer_id, "records are signed with the libp2p identity"
        tracker.look_again(timeout=10)
        assert tracker.global_progress.num_peers == 1 and tracker.claims_dropped == 0


def test_who_only_attends_is_seen_at_once(peer):
    """Others would meet it in a round, take themselves for alone, and call the round off."""
    with running_tracker(peer, "attends") as tracker:
        tracker.look_again(timeout=10)
        assert peer.dht.get("attends_progress", latest=True) is None, "a newcomer without samples is not waited for"
        tracker.attend(epoch=0)
        _, claim = stored_progress(peer, "attends")
        assert claim.samples_accumulated == 0 and claim.epoch == 0


def record_of(peer_id: PeerID, **changes) -> PeerRecord:
    values = dict(
        peer_id=peer_id.to_bytes(),
        fingerprint="0123456789abcdef",
        name="a laptop",
        device="cpu",
        epoch=3,
        total_samples=1234,
        samples_per_second=2.5,
        loss=4.5,
        client_mode=False,
    )
    return PeerRecord(**{**values, **changes})


def fetch_until(board: PeerBoard, found, timeout: float = 20.0):
    deadline = time.monotonic() + timeout
    while not found(records := board.fetch()):
        assert time.monotonic() < deadline, records
    return records


async def _call_store(_, node: DHTNode, to: PeerID, key: DHTID, subkey: bytes, value: bytes, expiration: float):
    return list(await node.protocol.call_store(to, [key], [value], expiration, [subkey]))


def store_as(somebody: Somebody, stranger: DHT, to: PeerID, key: str, value, sign: bool = True) -> bool:
    """A stranger's client, which checks nothing, writes into `to`'s storage. :returns: whether it was taken."""
    serializer, key_id, expiration = DHTProtocol.serializer, DHTID.generate(source=key), get_dht_time() + 30
    record = DHTRecord(key_id.to_bytes(), serializer.dumps(somebody.subkey), serializer.dumps(value), expiration)
    raw = somebody.validator.sign_value(record) if sign else record.value
    call = partial(_call_store, to=to, key=key_id, subkey=somebody.subkey, value=raw, expiration=expiration)
    [taken] = stranger.run_coroutine(call)
    return taken


def test_the_board_through_a_real_dht(peer, people):
    board = PeerBoard(peer.dht, "board")
    assert board.fetch() == {}
    board.publish(record_of(peer.peer_id))
    records = fetch_until(board, lambda records: records)
    assert set(records) == {peer.peer_id}
    assert records[peer.peer_id] == record_of(peer.peer_id)

    # a stranger, honest; one with another's peer id; what does not fit the schema; what nobody signed
    dht = DHT(initial_peers=peer.visible_maddrs(), client_mode=True, start=True, startup_timeout=60)
    try:
        write = partial(store_as, stranger=dht, to=peer.peer_id, key=peers_key("board"))
        honest, thief, vandal = people[:3]
        assert write(honest, value=record_of(honest.peer_id, epoch=9).dict())
        assert write(thief, value=record_of(honest.peer_id, epoch=99).dict()), "dropped by its readers"
        assert not write(vandal, value={**record_of(vandal.peer_id).dict(), "name": "x" * 65})
        assert not write(vandal, value={**record_of(vandal.peer_id).dict(), "loss": float("nan")})
        assert not write(vandal, value={**record_of(vandal.peer_id).dict(), "epoch": "9"})
        assert not write(vandal, value=record_of(vandal.peer_id).dict(), sign=False)
    finally:
        dht.shutdown()
    records = fetch_until(board, lambda records: len(records) > 1)
    assert set(records) == {peer.peer_id, honest.peer_id} and records[honest.peer_id].epoch == 9

    board.publish(record_of(peer.peer_id, epoch=4, loss=None))
    assert fetch_until(board, lambda r: r[peer.peer_id].epoch == 4)[peer.peer_id].loss is None
    board.publish(None)
    assert set(fetch_until(board, lambda records: peer.peer_id not in records)) == {honest.peer_id}


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "short"},
        {"fingerprint": "a" * 65},
        {"fingerprint": "\x1b[2J0123456789"},  # what would clear the terminal that it is told in
        {"fingerprint": "0123456789abcdef\n"},
        {"fingerprint": "0123456789ABCDEF"},
        {"name": "x" * 65},
        {"epoch": -1},
        {"epoch": 2**31},
        {"epoch": 1.0},
        {"epoch": True},
        {"total_samples": -1},
        {"total_samples": 2**53},
        {"samples_per_second": float("nan")},
        {"samples_per_second": float("inf")},
        {"samples_per_second": -1.0},
        {"loss": float("nan")},
        {"loss": float("inf")},
        {"client_mode": 1},
    ],
    ids=str,
)
def test_a_record_is_typed_and_bounded(people, changes):
    with pytest.raises(ValueError):
        record_of(people[0].peer_id, **changes)
    assert record_of(people[0].peer_id, loss=None, total_samples=2**53 - 1)
