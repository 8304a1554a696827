"""Telling a whole group: who is dead, silent or lies keeps nobody else from hearing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgpack
import pytest
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.crypto import RSAPrivateKey

from tests.virtual_time import run_in_virtual_time
from volunteer_kit.auth.access_token import peer_id_of_key
from volunteer_kit.robust.messages import Commit
from volunteer_kit.swarm.broadcast import MAX_WAITING, MAX_WAITING_EACH, Boards, tell_all
from volunteer_kit.swarm.verify_wire import COMMIT, seal

ROUND, PATIENCE = b"a round", 0.5
KEYS = [RSAPrivateKey() for _ in range(5)]
PEERS = [PeerID(peer_id_of_key(key.get_public_key().to_bytes())) for key in KEYS]


def in_time(story: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """On a clock that waits for the machine: nobody's patience ends while it computes."""
    return run_in_virtual_time(story, 120)


class Network:
    """Members 0 to 2 can be called, 3 and 4 cannot. `dead` do not answer, `liars` answer with junk."""

    def __init__(self, dead=(), liars=()):
        self.boards, self.dead, self.liars = [Boards() for _ in PEERS], set(dead), set(liars)

    def stub(self, caller: int, peer: PeerID):
        callee, network = PEERS.index(peer), self

        class Stub:
            async def rpc_tell(self, request):
                if callee in network.dead:
                    raise ConnectionError("nobody is there")
                if callee in network.liars:
                    return averaging_pb2.DownloadData(metadata=b"\x92\xc4\x01x\x01")
                return await network.boards[callee].answer(request, PEERS[caller], PATIENCE)

        return Stub()

    async def tell(self, member: int, weight: float = 1.0, key: RSAPrivateKey | None = None) -> dict:
        board = self.boards[member].open(ROUND, PEERS)
        envelope = seal(key or KEYS[member], ROUND, COMMIT, Commit(weight, b"", b"", b""))
        stub_of = lambda peer: self.stub(member, peer)  # noqa: E731
        return await tell_all(board, COMMIT, envelope, PEERS[member], PEERS[:3], stub_of, PATIENCE)

    async def all_tell(self, members) -> dict[int, set[int]]:
        heard = await asyncio.gather(*(self.tell(member, float(member)) for member in members))
        assert all(message.weight == PEERS.index(peer) for one in heard for peer, message in one.items())
        return {m: {PEERS.index(peer) for peer in one} for m, one in zip(members, heard, strict=True)}


def test_all_hear_all():
    heard = in_time(lambda: Network().all_tell(range(5)))
    assert heard == {member: set(range(5)) for member in range(5)}


@pytest.mark.parametrize("dead", range(3))
def test_a_dead_member_keeps_nobody_from_hearing_the_others(dead):
    living = [member for member in range(5) if member != dead]
    heard = in_time(lambda: Network(dead=[dead]).all_tell(living))
    assert heard == {member: set(living) for member in living}


@pytest.mark.parametrize("liar", range(3))
def test_who_passes_on_junk_keeps_nobody_from_hearing_the_others(liar):
    others = [member for member in range(5) if member != liar]
    heard = in_time(lambda: Network(liars=[liar]).all_tell(others))
    assert all(set(others) <= heard[member] for member in others)


def test_a_word_before_its_round_is_known_waits_for_it():
    async def run():
        network = Network()
        first = asyncio.create_task(network.tell(0))
        await asyncio.sleep(0)
        return await asyncio.gather(first, *(network.tell(member) for member in range(1, 5)))

    assert all(len(heard) == 5 for heard in in_time(run))


def test_a_word_is_its_signers_and_nobody_elses():
    """Member 1 signs with member 4's key: what it says is not taken as its own, nor as member 4's from its hands."""

    async def run():
        network = Network()
        others = asyncio.gather(*(network.tell(member) for member in (0, 2)))
        with pytest.raises(ValueError, match="another member"):
            await network.tell(1, key=KEYS[4])
        return await others

    for heard in in_time(run):
        assert {PEERS.index(peer) for peer in heard} == {0, 2}


def test_the_first_word_counts():
    async def run():
        network = Network()
        heard = asyncio.gather(*(network.tell(member) for member in range(5)))
        await heard
        board = network.boards[0]._boards[ROUND]
        board.take(COMMIT, seal(KEYS[3], ROUND, COMMIT, Commit(99.0, b"", b"", b"")), PEERS[3])
        return board.stages[COMMIT].messages[PEERS[3]].weight

    assert in_time(run) == 1.0


# --- time ---


async def timed(network: Network, member: int) -> tuple[set[int], float]:
    began = asyncio.get_running_loop().time()
    heard = await network.tell(member)
    return {PEERS.index(peer) for peer in heard}, asyncio.get_running_loop().time() - began


@pytest.mark.parametrize("how", ["listens", "does not know of the round", "hangs"])
@pytest.mark.parametrize("mute", range(3))
def test_who_can_be_called_and_says_nothing_costs_the_others_no_more_than_their_patience(mute, how, monkeypatch):
    """Members that can be called (0 to 2) and those that ask them (3 and 4): and all hear all others."""
    patience = 1.0
    monkeypatch.setattr("tests.test_broadcast.PATIENCE", patience)

    async def never(*_):
        await asyncio.sleep(60)

    async def run():
        network = Network()
        if how == "listens":
            network.boards[mute].open(ROUND, PEERS)
        elif how == "hangs":
            network.boards[mute].answer = never
        others = [member for member in range(5) if member != mute]
        found = await asyncio.gather(*(timed(network, member) for member in others))
        return dict(zip(others, found, strict=True))

    for member, (heard, took) in in_time(run).items():
        assert heard == set(range(5)) - {mute}, member
        assert took <= 1.3 * patience, member


def test_who_passes_nothing_on_costs_no_more_either():
    """Member 0 says nothing; member 1 hangs when it is asked for what others have told."""

    async def run():
        network = Network()
        answer = network.boards[1].answer

        async def stingy(request, caller, patience):
            if not request.tensor_part.buffer:
                await asyncio.sleep(60)
            return await answer(request, caller, patience)

        network.boards[1].answer = stingy
        return await asyncio.gather(*(timed(network, member) for member in range(1, 5)))

    for heard, took in in_time(run):
        assert heard == {1, 2, 3, 4}
        assert took <= 1.3 * PATIENCE


def test_who_is_heard_at_once_keeps_nobody_waiting():
    async def run():
        network = Network()
        return await asyncio.gather(*(timed(network, member) for member in range(5)))

    assert all(heard == set(range(5)) and took < PATIENCE / 2 for heard, took in in_time(run))


def request(round_id: bytes, word: bytes = b"") -> averaging_pb2.DownloadData:
    metadata = msgpack.packb([round_id, COMMIT, False], use_bin_type=True)
    return averaging_pb2.DownloadData(metadata=metadata, tensor_part=runtime_pb2.Tensor(buffer=word))


def test_one_caller_cannot_fill_the_waiting_places_of_all():
    async def run():
        boards = Boards()
        flood = [asyncio.create_task(boards.answer(request(b"%d" % i), PEERS[4], PATIENCE)) for i in range(1100)]
        await asyncio.sleep(0.01)
        assert len(boards._opened) == MAX_WAITING_EACH < MAX_WAITING
        word = seal(KEYS[0], ROUND, COMMIT, Commit(7.0, b"", b"", b""))
        early = asyncio.create_task(boards.answer(request(ROUND, word), PEERS[0], PATIENCE))
        await asyncio.sleep(0.01)
        board = boards.open(ROUND, PEERS)
        await early
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        assert not boards._waiting, "who waits no longer has its places back"
        return board.stages[COMMIT].messages[PEERS[0]].weight

    assert in_time(run) == 7.0


def test_who_calls_and_hangs_up_does_not_fill_them_either():
    async def run():
        boards = Boards()
        for i in range(20):
            call = asyncio.create_task(boards.answer(request(b"%d" % i), PEERS[4], PATIENCE))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        return len(boards._opened)

    assert in_time(run) <= MAX_WAITING_EACH


def test_an_answer_of_a_million_words_costs_nobody_a_second():
    """Who passes on what others told has no more words than the group has members."""
    words = b"\xdd" + (2**20).to_bytes(4, "big") + b"\xc4\x01x" * 2**20

    class Flood(Network):
        def stub(self, caller, peer):
            stub = super().stub(caller, peer)
            if PEERS.index(peer) in self.liars:
                stub.rpc_tell = lambda request: asyncio.sleep(0, averaging_pb2.DownloadData(metadata=words))
            return stub

    async def run():
        network = Flood(liars=[0])
        began = time.process_time()
        heard = await network.all_tell([1, 2, 3, 4])
        return heard, time.process_time() - began

    heard, seconds = in_time(run)
    assert heard == {member: {1, 2, 3, 4} for member in (1, 2, 3, 4)} and seconds < 5.0


@pytest.mark.parametrize(
    "metadata",
    [b"", b"\xc1", b"\x91" * 900, bytes(2**20), msgpack.packb([ROUND, True, True]), msgpack.packb([ROUND, 1.0, True]),
     msgpack.packb([ROUND, 9, True]), msgpack.packb([[ROUND], 0, True]), msgpack.packb([bytes(300), 0, True]),
     msgpack.packb({"round": ROUND})],
    ids=lambda metadata: metadata[:9].hex(),
)  # fmt: skip
def test_what_is_no_question_is_answered_as_one_of_an_unknown_round(metadata):
    answer = Boards().answer(averaging_pb2.DownloadData(metadata=metadata), PEERS[0], PATIENCE)
    assert asyncio.run(answer).metadata == b"unknown"
