"""Showing our access token to a peer before we call it, and seeing its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from hivemind.p2p import PeerID
from hivemind.p2p.servicer import StubBase
from hivemind.proto import auth_pb2

from volunteer_kit.swarm.admission import Admission

# s that we take a peer for one that knows us: it may have begun anew since, and then knows nobody
KNOWN_FOR = 15.0
ANSWER_WITHIN = 10.0  # s


class Introductions:
    """Whom this process has introduced itself to lately."""

    def __init__(self, admission: Admission, clock: Callable[[], float] = time.monotonic):
        self._admission, self._clock = admission, clock
        self._until: dict[PeerID, float] = {}

    async def introduce(self, stub: StubBase, peer: PeerID) -> None:
        """Raises NotAdmitted if the other shows nothing that admits it, and what breaks a call."""
        if self._until.get(peer, 0.0) > self._clock() and self._admission.is_admitted(peer):
            return
        request = auth_pb2.AccessToken(signature=self._admission.own_token)
        answer = await asyncio.wait_for(stub.rpc_introduce(request), ANSWER_WITHIN)
        reason = self._admission.show(answer.signature, peer)
        if reason is not None:
            self._admission.refuse(peer, "outgoing", reason)
        self._until = {known: until for known, until in self._until.items() if until > self._clock()}
        self._until[peer] = self._clock() + KNOWN_FOR

    def forget(self, peer: PeerID) -> None:
        self._until.pop(peer, None)


class IntroducedStub:
    """A stub to a peer that is told who we are before each call, as far as it does not know.

    A reducer is not told: it has read our token in its group.
    """

    def __init__(self, stub: StubBase, peer: PeerID, admission: Admission, introductions: Introductions):
        self._stub, self._peer, self._admission, self._introductions = stub, peer, admission, introductions

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._stub, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if name == "rpc_aggregate_part":
                self._admission.check(self._peer, "outgoing")
                return await method(*args, **kwargs)
            await self._introductions.introduce(self._stub, self._peer)
            try:
                answer = await method(*args, **kwargs)
            except Exception:
                self._introductions.forget(self._peer)
                raise
            is_stream = hasattr(answer, "__anext__")
            return AnswerStream(answer, lambda: self._introductions.forget(self._peer)) if is_stream else answer

        return call


class AnswerStream:
    """A stream of answers; `on_error` if it breaks: a refusal comes as its first message, not when it is opened."""

    def __init__(self, stream: Any, on_error: Callable[[], None]):
        self._stream, self._on_error = stream, on_error

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            raise
        except Exception:
            self._on_error()
            raise

    async def aclose(self) -> None:
        await self._stream.aclose()
