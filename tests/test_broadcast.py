"""Telling a whole group: who is dead, silent or lies keeps nobody else from hearing."""

from __future__ import annotations

import asyncio

import pytest
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.crypto import RSAPrivateKey

from volunteer_kit.auth.access_token import peer_id_of_key
from volunteer_kit.robust.messages import Commit
from volunteer_kit.swarm.broadcast import Boards, tell_all
from volunteer_kit.swarm.verify_wire import COMMIT, seal

ROUND, PATIENCE = b"a round", 0.5
KEYS = [RSAPrivateKey() for _ in range(5)]
PEERS = [PeerID(peer_id_of_key(key.get_public_key().to_bytes())) for key in KEYS]


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
    heard = asyncio.run(Network().all_tell(range(5)))
    assert heard == {member: set(range(5)) for member in range(5)}


@pytest.mark.parametrize("dead", range(3))
def test_a_dead_member_keeps_nobody_from_hearing_the_others(dead):
    living = [member for member in range(5) if member != dead]
    heard = asyncio.run(Network(dead=[dead]).all_tell(living))
    assert heard == {member: set(living) for member in living}


@pytest.mark.parametrize("liar", range(3))
def test_who_passes_on_junk_keeps_nobody_from_hearing_the_others(liar):
    others = [member for member in range(5) if member != liar]
    heard = asyncio.run(Network(liars=[liar]).all_tell(others))
    assert all(set(others) <= heard[member] for member in others)


def test_a_word_before_its_round_is_known_waits_for_it():
    async def run():
        network = Network()
        first = asyncio.create_task(network.tell(0))
        await asyncio.sleep(0)
        return await asyncio.gather(first, *(network.tell(member) for member in range(1, 5)))

    assert all(len(heard) == 5 for heard in asyncio.run(run()))


def test_a_word_is_its_signers_and_nobody_elses():
    """Member 1 signs with member 4's key: what it says is not taken as its own, nor as member 4's from its hands."""

    async def run():
        network = Network()
        others = asyncio.gather(*(network.tell(member) for member in (0, 2)))
        with pytest.raises(ValueError, match="another member"):
            await network.tell(1, key=KEYS[4])
        return await others

    for heard in asyncio.run(run()):
        assert {PEERS.index(peer) for peer in heard} == {0, 2}


def test_the_first_word_counts():
    async def run():
        network = Network()
        heard = asyncio.gather(*(network.tell(member) for member in range(5)))
        await heard
        board = network.boards[0]._boards[ROUND]
        board.take(COMMIT, seal(KEYS[3], ROUND, COMMIT, Commit(99.0, b"", b"", b"")), PEERS[3])
        return board.stages[COMMIT].messages[PEERS[3]].weight

    assert asyncio.run(run()) == 1.0
