"""A whole group of one round in one process: real runners, joined by function calls instead of sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.compression import NoCompression
from hivemind.p2p import P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2

from tests.virtual_time import run_in_virtual_time
from volunteer_kit.robust.mean import weighted_mean
from volunteer_kit.swarm.admission import Admission
from volunteer_kit.swarm.allreduce import SwarmAllReduce
from volunteer_kit.swarm.grad_averager import SwarmGradientAverager
from volunteer_kit.swarm.lost_answers import AnswersKept

SIZES = [(3, 7), (50,), (1,), (40, 40)]


def run(story: Callable):
    """For at most 20 s of a clock that waits for the machine."""
    return run_in_virtual_time(story, 20)


class Address:
    """What a runner knows of libp2p: its own id."""

    def __init__(self, peer_id: PeerID, runners: dict):
        self.peer_id, self.runners = peer_id, runners


class Wire(ServicerBase):
    """Calls the other runner in the same process; every message passes through its bytes."""

    @classmethod
    def get_stub(cls, p2p: Address, peer: PeerID, *, namespace=None):
        return Stub(p2p, p2p.runners[peer])


class Stub:
    def __init__(self, caller: Address, runner: SwarmAllReduce):
        self.caller, self.runner = caller, runner

    async def rpc_aggregate_part(self, requests):
        context = P2PContext("test", self.runner.peer_id, self.caller.peer_id)
        return pumped(self.runner.rpc_aggregate_part(pumped(requests), context))

    async def rpc_count_answers(self, request):
        return await self._server().rpc_count_answers(request, self._context())

    async def rpc_show_answer(self, request):
        return await self._server().rpc_show_answer(request, self._context())

    def _context(self) -> P2PContext:
        return P2PContext("test", self.runner.peer_id, self.caller.peer_id)

    def _server(self) -> AnswersKept:
        if not getattr(self.runner, "shows_answers", True):
            raise ConnectionError("gone")
        server = AnswersKept()
        server.traffic, server.doorkeeper = self.runner.traffic, Admission()
        server._kept_answers = {self.runner.group_id: self.runner.answers}
        return server


def pumped(messages):
    """Sends on what comes, whether or not anybody reads yet, as a socket does."""
    pipe: asyncio.Queue = asyncio.Queue()

    async def pump():
        try:
            async for message in messages:
                pipe.put_nowait(averaging_pb2.AveragingData.FromString(message.SerializeToString()))
        except Exception as e:
            pipe.put_nowait(e)
        finally:
            pipe.put_nowait(None)

    task = asyncio.create_task(pump())

    async def read():
        try:
            while (message := await pipe.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                yield message
        finally:
            task.cancel()

    return read()


def make_tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in SIZES]


def make_group(
    tensors: list[list[torch.Tensor]],
    *,
    weights=None,
    fractions=None,
    codec=None,
    kinds: dict[int, type] | None = None,
    timeout: float = 1.0,
    **options,
) -> dict[PeerID, SwarmAllReduce]:
    count = len(tensors)
    ids = [PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(count)]
    fractions = fractions or [1 / count] * count
    modes = [AveragingMode.CLIENT if fraction == 0 else AveragingMode.NODE for fraction in fractions]
    runners: dict[PeerID, SwarmAllReduce] = {}
    for i, own in enumerate(ids):
        runners[own] = (kinds or {}).get(i, SwarmAllReduce)(
            p2p=Address(own, runners),
            servicer_type=Wire,
            prefix="group",
            group_id=b"g" * 20,
            tensors=tensors[i],
            ordered_peer_ids=ids,
            peer_fractions=tuple(fractions),
            modes=modes,
            weight=(weights or [1.0] * count)[i],
            reduce=weighted_mean,
            max_weight=64.0,
            compression=codec or NoCompression(),
            part_size_bytes=1000,
            sender_timeout=timeout,
            reducer_timeout=2 * timeout,
            **options,
        )
    return runners


def average(make: Callable[[], dict]) -> tuple[list[SwarmAllReduce], list]:
    """Run a group. :returns: runners, and each one's averages or the exception that ended it."""

    async def collect(runner):
        return [tensor async for tensor in runner]

    async def story():
        runners = make()
        results = await asyncio.gather(*map(collect, runners.values()), return_exceptions=True)
        return list(runners.values()), results

    return run(story)


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def assert_equal_bytes(results) -> None:
    for result in results:
        for tensor, other in zip(result, results[0], strict=True):
            assert torch.equal(tensor, other)


def honest_mean(tensors, members) -> torch.Tensor:
    return sum(flat(tensors[i]) for i in members) / len(members)


def make_averager(peer, params, **options) -> SwarmGradientAverager:
    """Of gradients, not started."""
    return SwarmGradientAverager(params, dht=peer.dht, prefix="gradients", start=False, client_mode=False, **options)
