"""An answer that comes when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.proto.runtime_pb2 import ExpertUID

from volunteer_kit.swarm.net.pending_calls import PendingCalls, outlive_late_answers


def test_who_was_given_up_is_not_answered():
    async def late():
        calls = PendingCalls()
        calls["given up"], calls["awaited"] = asyncio.Future(), asyncio.Future()
        calls["given up"].cancel()
        for name in ("given up", "awaited", "never made"):  # as hivemind's reader does
            assert name in calls
            calls[name].set_result(name)
            calls[name].set_exception(ValueError(name))
        assert await calls["awaited"] == "awaited"
        assert calls.pop("given up").cancelled(), "who made the call still finds it"
        assert "never made" not in list(calls)

    asyncio.run(late())


@asynccontextmanager
async def two_peers() -> AsyncIterator[tuple[P2P, P2P]]:
    outlive_late_answers()
    outlive_late_answers()
    first, second = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"], startup_timeout=60), None
    try:
        second = await P2P.create(initial_peers=await first.get_visible_maddrs(), startup_timeout=60)
        yield first, second
    finally:
        for one in filter(None, (second, first)):
            await one.shutdown()


def ask(asking: P2P, asked: P2P, uid: str) -> asyncio.Task:
    return asyncio.ensure_future(asking.call_protobuf_handler(asked.peer_id, "slow", ExpertUID(uid=uid), ExpertUID))


class Told(logging.Handler):
    """Keeps log records, and sets an event when one comes."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.event = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.event.set()


def test_an_answer_of_megabytes_that_comes_too_late_is_not_written_out(monkeypatch):
    """As text it is four times as long, and takes the process three seconds; nobody sees it."""

    async def answer_late() -> list[logging.LogRecord]:
        asked, answer, told = asyncio.Event(), asyncio.Event(), Told()
        logger = logging.getLogger(ControlClient.__module__)

        async def slow(data: ExpertUID, context: object) -> ExpertUID:
            asked.set()
            await answer.wait()
            return ExpertUID(uid="\0" * 3_000_000)

        def missing(calls: PendingCalls, call_id: object) -> asyncio.Future:
            told.event.set()
            return find(calls, call_id)

        find = PendingCalls.__missing__
        monkeypatch.setattr(PendingCalls, "__missing__", missing)
        monkeypatch.setattr(logger, "level", logging.DEBUG)
        logger.addHandler(told)
        try:
            async with two_peers() as (first, second):
                await first.add_protobuf_handler("slow", slow, ExpertUID)
                late = ask(second, first, "late")
                await asked.wait()
                second._client.control._pending_calls.clear()  # as a turn after the timeout; the other side goes on
                answer.set()
                await told.event.wait()
                late.cancel()
        finally:
            logger.removeHandler(told)
        return told.records

    assert not asyncio.run(asyncio.wait_for(answer_late(), 240))


def test_a_process_goes_on_calling_after_an_answer_that_came_too_late():
    """As hivemind's reader meets it: the call cancelled, and its answer here before the caller has had its turn."""

    async def call_and_give_up() -> str:
        async with two_peers() as (first, second):
            asked, answer = asyncio.Event(), asyncio.Event()

            async def slow(data: ExpertUID, context: object) -> ExpertUID:
                asked.set()
                await answer.wait()
                return data

            await first.add_protobuf_handler("slow", slow, ExpertUID)
            task = ask(second, first, "1")
            await asked.wait()
            (_, future), *_ = second._client.control._pending_calls.items()
            task.cancel()  # the future is cancelled now; that it is forgotten takes a turn
            assert future.cancelled()
            answer.set()
            return (await ask(second, first, "2")).uid

    assert asyncio.run(asyncio.wait_for(call_and_give_up(), 240)) == "2"
