"""Whoever has begun anew knows nobody: a refusal in a stream is heard, and the next call introduces us again."""

from __future__ import annotations

import asyncio

import pytest
from hivemind.p2p import PeerID
from hivemind.proto import auth_pb2

from tests.trust import RunKeys
from volunteer_kit.swarm.admission import NotAdmitted
from volunteer_kit.swarm.introduction import IntroducedStub, Introductions

A, B = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in (1, 2))


class Leader:
    """As P2P's stubs: opening the stream succeeds, and the first message is the refusal."""

    def __init__(self, token: bytes):
        self.token, self.introduced, self.forgets, self.closed = token, 0, False, 0

    async def rpc_introduce(self, request):
        self.introduced += 1
        return auth_pb2.AccessToken(signature=self.token)

    async def rpc_join_group(self, request):
        return self._messages()

    async def _messages(self):
        try:
            if self.forgets:
                raise NotAdmitted("it has begun anew")
            yield "accepted"
            yield "begin"
        finally:
            self.closed += 1


@pytest.fixture
def leader(tmp_path):
    run = RunKeys(tmp_path)
    other = Leader(run.token(B, "bob"))
    admission = run.admission(own=A)
    other.stub = IntroducedStub(other, B, admission, Introductions(admission, clock=lambda: 100.0))
    return other


async def join(leader: Leader) -> list[str]:
    return [message async for message in await leader.stub.rpc_join_group(None)]


def test_who_is_refused_in_a_stream_introduces_itself_again(leader):
    assert asyncio.run(join(leader)) == ["accepted", "begin"] and leader.introduced == 1
    leader.forgets = True
    with pytest.raises(NotAdmitted):
        asyncio.run(join(leader))
    leader.forgets = False
    asyncio.run(join(leader))
    assert leader.introduced == 2, "15 s of refusals otherwise"


def test_a_stream_is_hung_up_on_as_before(leader):
    async def first() -> str:
        stream = await leader.stub.rpc_join_group(None)
        message = await asyncio.wait_for(anext(stream), 5.0)
        await stream.aclose()
        return message

    assert asyncio.run(first()) == "accepted" and leader.closed == 1
