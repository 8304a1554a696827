"""What a lossy codec leaves out comes later: nothing of it is lost, counted twice, or forgotten over a restart."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from hivemind.compression import CompressionInfo

from tests.allreduce_group import assert_equal_bytes, flat, make_group, make_tensors, run
from volunteer_kit.swarm.allreduce import SwarmAllReduce
from volunteer_kit.swarm.codec import CODECS, install_codecs, leaves_out, make_codec
from volunteer_kit.swarm.left_over import LARGEST_PART, LeftOver, part_size
from volunteer_kit.swarm.sparse_codec import SparseCodec

NUMEL = sum(tensor.numel() for tensor in make_tensors(0))


@pytest.fixture(autouse=True)
def our_codecs():
    install_codecs()


def one_round(kept, tensors, weights, *, fractions=None, codec=None, kinds=None, counted=None):
    """A round of a whole group. :returns: each one's averages, or what ended it for this one"""
    shares = [one.begin(own, weight) for one, own, weight in zip(kept, tensors, weights, strict=True)]
    places = iter(shares)

    async def story():
        with pytest.MonkeyPatch.context() as patch:
            made = SwarmAllReduce.__init__
            patch.setattr(SwarmAllReduce, "__init__", lambda self, **kw: made(self, share=next(places), **kw))
            runners = make_group(
                [share.tensors for share in shares], weights=weights, fractions=fractions, codec=codec or SparseCodec(),
                kinds=kinds, timeout=0.5, lost_parts_are_zero=True,
            )  # fmt: skip

        async def collect(runner):
            return [tensor async for tensor in runner]

        results = await asyncio.gather(*map(collect, runners.values()), return_exceptions=True)
        for share, runner, result in zip(shares, runners.values(), results, strict=True):
            if not isinstance(result, Exception):
                share.settle(runner.lost_places, sum(runner.weights.values()), runner.peer_id not in runner.refused)
        return results

    return run(story)


def still_to_come(kept, weights) -> torch.Tensor:
    """All that members have not heard yet, of a mean over all of `weights`: senders' rests, and reducers'."""
    total = sum(weights)
    return sum(one.unsent for one in kept) / total + sum(one.unanswered for one in kept)


@pytest.mark.parametrize("codec", ["sparse", "uniform4", "blockwise4"])
def test_what_has_come_and_what_is_to_come_are_all_there_is(codec):
    weights, codec = [3.0, 1.0, 4.0], CODECS[codec]
    kept = [LeftOver(NUMEL) for _ in weights]
    should, came = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for number in range(12):
        tensors = [make_tensors(10 * number + place) for place in range(3)]
        results = one_round(kept, tensors, weights, codec=codec)
        assert_equal_bytes(results)
        should += sum(w * flat(t).double() for w, t in zip(weights, tensors, strict=True)) / sum(weights)
        came += flat(results[0]).double()
        assert torch.allclose(came + still_to_come(kept, weights), should, atol=1e-4)
    assert still_to_come(kept, weights).norm() > 0.1  # or nothing of this was tested


def test_a_constant_gradient_arrives_in_full_over_time():
    weights, kept = [1.0, 1.0], [LeftOver(NUMEL) for _ in range(2)]
    constant = [make_tensors(1), make_tensors(2)]
    mean = (flat(constant[0]) + flat(constant[1])) / 2
    came, errors = torch.zeros(NUMEL), []
    for number in range(1, 121):
        came += flat(one_round(kept, constant, weights, codec=SparseCodec(1 / 8))[0])
        errors.append((came / number - mean).norm() / mean.norm())
    assert errors[-1] < 0.1 < errors[0]
    assert errors[-1] < 0.6 * errors[59]  # what has not come is bounded, so its share of all falls


def test_weights_and_slices_that_change_lose_nothing():
    kept = [LeftOver(NUMEL) for _ in range(3)]
    should, came = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for number, (weights, fractions) in enumerate(
        [
            ([1.0, 2.0, 3.0], [0.5, 0.25, 0.25]),
            ([3.0, 2.0, 1.0], [0.2, 0.6, 0.2]),
            ([1.0, 4.0, 1.0], [0.0, 0.5, 0.5]),  # the first is in client mode now, and reduces nothing
            ([2.0, 2.0, 2.0], [0.4, 0.3, 0.3]),
        ]
    ):
        tensors = [make_tensors(10 * number + place) for place in range(3)]
        came += flat(one_round(kept, tensors, weights, fractions=fractions)[0])
        should += sum(w * flat(t) for w, t in zip(weights, tensors, strict=True)) / 6
        assert torch.allclose(came + still_to_come(kept, [6.0]), should, atol=1e-3)


def test_who_has_few_samples_this_time_is_not_cut_for_what_it_owes():
    """It divides what is left over by its weight, and would come out hundreds of times as long as the others."""
    kept = [LeftOver(NUMEL) for _ in range(4)]
    should, came = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for weights in [[8.0] * 4] * 5 + [[10.65625, 10.65625, 10.65625, 1 / 32]]:
        tensors = [make_tensors(0) for _ in weights]
        came += sum(weights) * flat(one_round(kept, tensors, weights, codec=SparseCodec(1 / 16))[0])
        should += sum(w * flat(t) for w, t in zip(weights, tensors, strict=True))
        assert torch.allclose(came + sum(weights) * still_to_come(kept, weights), should, atol=1e-2)


class HangsUp(SwarmAllReduce):
    """A reducer that answers nobody."""

    shows_answers = False

    async def rpc_aggregate_part(self, stream, context):
        if self.ordered_peer_ids.index(self.peer_id) == 1:
            raise ConnectionError("gone")
            yield
        async for message in super().rpc_aggregate_part(stream, context):
            yield message


def test_a_slice_whose_reducer_is_lost_comes_with_a_later_round():
    weights, kept = [1.0, 1.0, 1.0], [LeftOver(NUMEL) for _ in range(3)]
    tensors = [make_tensors(place) for place in range(3)]
    results = one_round(kept, tensors, weights, kinds={1: HangsUp})
    came = flat(results[0])
    lost = came == 0
    left = kept[0].unsent + kept[2].unsent
    sent = flat(tensors[0]) + flat(tensors[2])
    middle = slice(len(came) // 3 + 200, 2 * len(came) // 3 - 200)  # well inside of the lost slice
    assert lost[middle].all()
    assert torch.allclose(left[middle], sent[middle], atol=1e-5)


def test_a_round_that_ended_badly_changes_nothing():
    kept = LeftOver(NUMEL)
    kept.unsent.normal_()
    before = kept.unsent.clone()
    share = kept.begin(make_tensors(0), 2.0)
    part = share.tensors[0]
    share.sending(SparseCodec()).compress(part.view(-1), CompressionInfo.from_tensor(part))
    assert torch.equal(kept.unsent, before)
    share.settle([], 2.0, is_counted=False)  # nor does one in which our values did not count
    assert torch.equal(kept.unsent, before)


def test_who_has_no_samples_keeps_what_it_has_to_say():
    kept = LeftOver(NUMEL)
    kept.unsent.normal_()
    before = kept.unsent.clone()
    share = kept.begin([torch.zeros_like(tensor) for tensor in make_tensors(0)], 0.0)
    assert not flat(share.tensors).any()
    share.settle([], 5.0, is_counted=True)
    assert torch.equal(kept.unsent, before)


# --- over a restart ---


def test_it_outlives_its_process(tmp_path):
    path = tmp_path / "left_over.bin"
    first = LeftOver(NUMEL, path, "run")
    share = first.begin(make_tensors(0), 3.0)
    share.settle([], 12.0, is_counted=True)
    unsent = first.unsent.clone()
    assert unsent.any()
    again = LeftOver(NUMEL, path, "run")
    assert torch.equal(again.unsent, unsent) and again.total_weight == 12.0


@pytest.mark.parametrize("numel, about, age", [(NUMEL + 1, "run", 0), (NUMEL, "another", 0), (NUMEL, "run", 4000)])
def test_what_is_of_another_run_or_too_old_is_not_taken_up(tmp_path, monkeypatch, numel, about, age):
    path = tmp_path / "left_over.bin"
    first = LeftOver(NUMEL, path, "run")
    first.begin(make_tensors(0), 3.0).settle([], 12.0, is_counted=True)
    now = time.time()
    monkeypatch.setattr("volunteer_kit.swarm.left_over.time.time", lambda: now + age)
    again = LeftOver(numel, path, about)
    assert not again.unsent.any() and again.total_weight == 0.0


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"of": "run"}', b'{"total": "x", "order": 0, "at": 0}'])
def test_a_broken_note_is_no_reason_not_to_start(tmp_path, garbage):
    path = tmp_path / "left_over.bin"
    path.write_bytes(b"\1" * 100)
    path.with_suffix(".json").write_bytes(garbage)
    assert not LeftOver(NUMEL, path, "run").unsent.any()


def refuse(*args, **kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("what", ["os.posix_fallocate", "pathlib.Path.open", "pathlib.Path.unlink"])
def test_without_a_place_on_the_disk_it_is_kept_in_memory(tmp_path, monkeypatch, what):
    """Every round would fail, or the averager's process end with a bus error."""
    monkeypatch.setattr(what, refuse)
    kept = LeftOver(NUMEL, tmp_path / "left_over.bin", "run")
    kept.begin(make_tensors(0), 3.0).settle([], 12.0, is_counted=True)
    assert kept.unsent.any() and not (tmp_path / "left_over.json").exists()


def test_its_place_on_the_disk_is_taken_at_once(tmp_path):
    path = tmp_path / "not there yet" / "left_over.bin"
    LeftOver(NUMEL, path, "run")
    assert path.stat().st_size == 8 * NUMEL and path.stat().st_blocks * 512 >= 8 * NUMEL


def test_a_disk_that_fills_up_later_costs_no_round(tmp_path, monkeypatch):
    kept = LeftOver(NUMEL, tmp_path / "left_over.bin", "run")
    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    kept.begin(make_tensors(0), 3.0).settle([], 12.0, is_counted=True)
    assert kept.unsent.any()


def test_an_order_of_the_monitor_forgets_what_led_to_it():
    kept = LeftOver(NUMEL)
    kept.unsent.fill_(1.0)
    assert not flat(kept.begin([torch.zeros_like(t) for t in make_tensors(0)], 1.0, order=7).tensors).any()


def test_who_was_away_for_long_forgets_what_it_had_to_say(monkeypatch):
    kept = LeftOver(NUMEL)
    kept.unsent.fill_(1.0)
    zeros = [torch.zeros_like(tensor) for tensor in make_tensors(0)]
    assert flat(kept.begin(zeros, 1.0).tensors).all()
    now = time.time()
    monkeypatch.setattr("volunteer_kit.swarm.left_over.time.time", lambda: now + 4000)
    assert not flat(kept.begin(zeros, 1.0).tensors).any()


def test_values_that_are_not_finite_are_forgotten():
    kept = LeftOver(NUMEL)
    kept.unsent[3] = float("nan")
    assert torch.isfinite(flat(kept.begin(make_tensors(0), 1.0).tensors)).all()


# --- which codecs, and in which parts ---


def test_which_codecs_leave_something_for_later():
    later = {name for name, codec in CODECS.items() if leaves_out(codec)}
    assert later == {"uniform4", "blockwise4", "sparse"}
    assert leaves_out(make_codec("float16", "sparse", 100)) and not leaves_out(make_codec("none", "uniform8", 100))


@pytest.mark.parametrize("numel, size", [(1000, 4096), (10**6, 15_625), (125_900_000, LARGEST_PART)])
def test_parts_are_small_enough_to_be_shared_out(numel, size):
    assert part_size(numel) == size
