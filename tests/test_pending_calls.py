"""An answer that comes when nobody waits for it any more."""

from __future__ import annotations

import asyncio

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.proto.runtime_pb2 import ExpertUID

from volunteer_kit.swarm.pending_calls import PendingCalls, outlive_late_answers


def test_who_was_given_up_is_not_answered():
    async def late():
        calls = PendingCalls()
        calls["given up"], calls["awaited"] = asyncio.Future(), asyncio.Future()
        calls["given up"].cancel()
        assert "given up" not in calls and "awaited" in calls and "never made" not in calls
        assert calls.pop("given up").cancelled(), "who made the call still finds it"

    asyncio.run(late())


def test_a_process_goes_on_calling_after_an_answer_that_came_too_late():
    """As hivemind's reader meets it: the call cancelled, and its answer here before the caller has had its turn."""
    outlive_late_answers()
    outlive_late_answers()

    async def call_and_give_up() -> bytes:
        first, second = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"]), None
        try:
            second = await P2P.create(initial_peers=await first.get_visible_maddrs())
            asked, answer = asyncio.Event(), asyncio.Event()

            async def slow(data, context):
                asked.set()
                await answer.wait()
                return data

            await first.add_protobuf_handler("slow", slow, ExpertUID)
            task = asyncio.ensure_future(
                second.call_protobuf_handler(first.peer_id, "slow", ExpertUID(uid="1"), ExpertUID)
            )
            await asked.wait()
            client: ControlClient = second._client.control
            (call_id, future), *_ = client._pending_calls.items()
            task.cancel()  # the future is cancelled now; that it is forgotten takes a turn
            assert future.cancelled() and call_id not in client._pending_calls
            answer.set()
            return (await second.call_protobuf_handler(first.peer_id, "slow", ExpertUID(uid="2"), ExpertUID)).uid
        finally:
            for one in filter(None, (second, first)):
                await one.shutdown()

    assert asyncio.run(asyncio.wait_for(call_and_give_up(), 30)) == "2"
