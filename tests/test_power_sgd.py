"""PowerSGD over the kit's rounds: what a rank leaves out comes later, and members need nothing of each other's past."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID
from hivemind.utils.serializer import MSGPackSerializer

from tests.local_swarm import is_whole, local_swarm
from volunteer_kit.run_sections import SwarmConfig
from volunteer_kit.run_sizes import step_bytes
from volunteer_kit.runs import load_run
from volunteer_kit.session.options import swarm_options
from volunteer_kit.swarm.codec import CODECS
from volunteer_kit.swarm.left_over import LeftOver
from volunteer_kit.swarm.low_rank import matrix_of, values_of
from volunteer_kit.swarm.pace import Pace
from volunteer_kit.swarm.power_sgd import PowerSGDAverager, second_id
from volunteer_kit.swarm.round import Round
from volunteer_kit.swarm.told_group import MARK_SIZE

SHAPES, RANK = [(24, 40), (7,), (6, 4, 20)], 2
PEERS = [PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 5)]


class Room:
    """Where members exchange: each gets the weighted mean, when all have come."""

    def __init__(self, size: int):
        self.size, self._here = size, []
        self._full = asyncio.Event()

    async def meet(self, tensors: list[torch.Tensor], weight: float) -> list[torch.Tensor]:
        self._here.append((weight, [tensor.clone() for tensor in tensors]))
        if len(self._here) == self.size:
            self._full.set()
        await self._full.wait()
        total = sum(weight for weight, _ in self._here)
        return [sum(w / total * own[place] for w, own in self._here) for place in range(len(tensors))]


class Member(PowerSGDAverager):
    """The averager without its process and its network."""

    prefix, order, total_size, peer_id = "test", 0, sum(torch.Size(s).numel() for s in SHAPES), PEERS[0]

    def __init__(self, path=None):
        self._rank, self._matrices = RANK, [matrix_of(shape, RANK) for shape in SHAPES]
        self._feedback, self._qs, self._feedback_path = None, [], path
        self.pace = Pace(MSGPackSerializer, SimpleNamespace(mbps=None), None, None)
        self.began: list[list[torch.Tensor]] = []

    def __del__(self):
        """There is no process."""

    def _begin_with(self, group_info):
        self.began.append(super()._begin_with(group_info))
        return self.began[-1]

    async def _exchange_these(self, tensors, group_info, *, outcome, weight, group_id=None):
        room = self.rooms[group_id or group_info.group_id]
        for tensor, average in zip(tensors, await room.meet(tensors, weight), strict=True):
            tensor.copy_(average)
        outcome.weights = {PEERS[0]: weight}
        outcome.bytes_sent = sum(tensor.numel() for tensor in tensors)


def hold_round(members: list[Member], gradients: list[list[torch.Tensor]], number: int, weights=None) -> Round:
    """Each member's gradients become the round's averages."""
    weights, exchanged = weights or [1.0] * len(members), bytes([number]) * 36
    entries = [
        member.pace.told(MSGPackSerializer.dumps([None, 0, MSGPackSerializer.dumps(None)])) for member in members
    ]
    group = GroupInfo(exchanged, tuple(PEERS[: len(members)]), tuple(entries))
    Member.rooms = {name: Room(len(members)) for name in (exchanged, second_id(exchanged))}
    outcomes = [Round(group=group.peer_ids, round_id=exchanged) for _ in members]

    async def run():
        await asyncio.gather(
            *(
                member._run_allreduce_inplace_(own, group, outcome=outcome, weight=weight)
                for member, own, outcome, weight in zip(members, gradients, outcomes, weights, strict=True)
            )
        )

    asyncio.run(run())
    for others in gradients[1:]:
        assert all(torch.equal(one, other) for one, other in zip(gradients[0], others, strict=True))
    return outcomes[0]


def gradients_of(seed: int) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=numbers) for shape in SHAPES]


def test_a_tensor_is_a_matrix_where_that_is_less_than_half():
    assert [matrix_of(shape, RANK) for shape in SHAPES] == [(24, 40), None, (24, 20)]
    assert matrix_of((24, 40), 8) is None
    assert values_of(SHAPES, RANK) == 2 * 64 + 7 + 2 * 44


def test_gradients_of_that_rank_are_averaged_as_they_are():
    numbers = torch.Generator().manual_seed(0)
    left, right = torch.randn(24, 2, generator=numbers), torch.randn(2, 40, generator=numbers)
    own = [[left @ right * factor, torch.full((7,), factor), torch.zeros(6, 4, 20)] for factor in (1.0, 4.0)]
    outcome = hold_round([Member(), Member()], own, 1, weights=[3.0, 1.0])
    assert torch.allclose(own[0][0], 1.75 * left @ right, atol=1e-4)
    assert torch.allclose(own[0][1], torch.full((7,), 1.75)) and not own[0][2].any()
    assert outcome.bytes_sent == values_of(SHAPES, RANK), "of both exchanges"


def test_what_a_rank_leaves_out_comes_later():
    """Without it the mean of all rounds would stay as far from the gradients' as one round is."""
    members, total, errors = [Member() for _ in range(3)], [torch.zeros(shape) for shape in SHAPES], []
    mean = [sum(tensors) / 3 for tensors in zip(*map(gradients_of, range(3)), strict=True)]
    for number in range(1, 41):
        own = [gradients_of(seed) for seed in range(3)]
        hold_round(members, own, number)
        for tensor, came in zip(total, own[0], strict=True):
            tensor.add_(came)
        errors.append(sum((t / number - m).norm() for t, m in zip(total, mean, strict=True)).item())
    assert errors[-1] < errors[0] / 3


def test_a_group_goes_on_from_its_last_round_and_a_newcomer_changes_that_for_all():
    members = [Member(), Member()]
    for number in (1, 2):
        hold_round(members, [gradients_of(0), gradients_of(1)], number)
    assert members[0].began[1] is not members[0].began[0]
    kept = members[0]._qs
    hold_round(members, [gradients_of(0), gradients_of(1)], 3)
    assert members[0].began[2] is kept and len(members[0].pace.mark) == MARK_SIZE
    members.append(Member())
    hold_round(members, [gradients_of(seed) for seed in range(3)], 4)
    for own in zip(*(member.began[-1] for member in members), strict=True):
        assert all(torch.equal(own[0], other) for other in own)
    assert not torch.equal(members[0].began[-1][0], kept[0])


def test_what_was_left_out_outlives_a_restart_and_a_lost_round(tmp_path):
    path = tmp_path / "left.bin"
    member = Member(path)
    gradient = gradients_of(0)
    hold_round([member, Member()], [gradient, gradients_of(0)], 1)
    left = [before - after for before, after in zip(gradients_of(0), gradient, strict=True)]
    again = Member(path)

    async def lost(*_, **__):
        raise ConnectionError

    again._exchange_these = lost
    with pytest.raises(ConnectionError):
        asyncio.run(again._run_allreduce_inplace_(gradients_of(1), GroupInfo(b"1" * 36, (), ()), outcome=Round()))
    kept = again._feedback.begin([torch.zeros(shape) for shape in SHAPES], 1.0)
    assert isinstance(again._feedback, LeftOver)
    for tensor, expected in zip(kept.tensors, left, strict=True):
        assert torch.allclose(tensor, expected, atol=1e-5)


def test_what_goes_beside_the_gradients_travels_exactly_and_leaves_nothing_for_later(tmp_path):
    with local_swarm(tmp_path) as swarm:
        peers = [swarm.add(grad_codec="blockwise8", grad_rank=RANK, marks_unused=True) for _ in range(3)]
        for peer in peers:
            peer.wait_whole()
        finished = swarm.finish(*peers)
    assert len({(e["epoch"], e["digest"]) for e in finished}) == 1
    assert [e["spare"] for e in finished] == [[1.0, 1.0]] * 3, "decayed, though nobody had a gradient of it"
    for peer in peers:
        steps = [e for e in peer.events if e["event"] == "epoch"]
        assert any(is_whole(e) and e["received"] == 1.0 for e in steps)


def test_real_peers_stay_equal_and_learn(tmp_path):
    with local_swarm(tmp_path) as swarm:
        peers = [swarm.add(grad_codec="float16", grad_rank=RANK, client_mode=number == 2) for number in range(3)]
        for peer in peers:
            peer.wait_whole()
        finished = swarm.finish(*peers)
    assert len({(e["epoch"], e["digest"]) for e in finished}) == 1
    values = values_of([(48, 32), (48,), (24, 48), (24,)], RANK)
    for peer in peers:
        steps = [e for e in peer.events if e["event"] == "epoch"]
        whole = list(filter(is_whole, steps))
        assert len(whole) > 1 and all(e["received"] == 1.0 for e in whole)
        assert all(0 < e["sent"] < 2 * 3 * values for e in whole)
        assert min(e["loss"] for e in steps[-3:]) < steps[0]["loss"]


def test_a_run_file_chooses_it():
    run = load_run("demo")
    run = run.model_copy(update={"swarm": SwarmConfig(grad_compression="powersgd", grad_rank=3)})
    options = swarm_options(run)
    assert options.grad_rank == 3 and options.grad_codec is CODECS["float16"]
    assert swarm_options(load_run("demo")).grad_rank is None
    assert step_bytes(run) < step_bytes(load_run("demo"))


@pytest.mark.parametrize(
    "more, what", [({"aggregation": "median"}, "factor"), ({"small_compression": "sparse"}, "exact")]
)
def test_what_does_not_go_with_it_is_said(more, what):
    with pytest.raises(ValueError, match=what):
        SwarmConfig(grad_compression="powersgd", **more)
