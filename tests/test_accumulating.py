"""What a microbatch counts: gradients are summed by true sizes until a round takes them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tests.allreduce_group import make_averager


def put_mean_gradient(averager, samples: list[torch.Tensor], scale: float = 1.0) -> None:
    """What backward() of a mean loss over `samples` (each a flat gradient) leaves in .grad."""
    mean = sum(samples) / len(samples) * scale
    for parameter, values in zip(
        averager.parameters, mean.split([p.numel() for p in averager.parameters]), strict=True
    ):
        parameter.grad = values.reshape(parameter.shape).clone()


def averaged(averager) -> torch.Tensor:
    averager.load_accumulators_into_averager_()
    with averager.get_tensors() as tensors:
        return torch.cat([tensor.flatten() for tensor in tensors])


def draw_samples(count: int, seed: int = 0) -> list[torch.Tensor]:
    return list(torch.randn(count, 14, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("sizes", [[8, 4], [4, 8, 8], [1], [8, 8, 8], [16, 1, 1], [1, 2, 3, 5, 8]], ids=str)
def test_microbatches_are_weighted_by_their_true_size(averager, sizes):
    """hivemind: 0.75 times the mean for 8 then 4, 1.67 times for 4, 8, 8 (FACTS, trap 16)."""
    samples = draw_samples(sum(sizes))
    first = 0
    for size in sizes:
        put_mean_gradient(averager, samples[first : first + size])
        assert averager.accumulate_grads_(size) is True
        first += size
    assert averager.local_samples_accumulated == sum(sizes) and averager.local_times_accumulated == len(sizes)
    assert torch.allclose(averaged(averager), sum(samples) / len(samples), rtol=1e-5, atol=1e-6)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(1, 32), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_any_sizes_give_the_mean_over_samples(peer, sizes, seed):
    averager = make_averager(peer, [torch.nn.Parameter(torch.zeros(14))])
    samples = draw_samples(sum(sizes), seed)
    for i, size in enumerate(sizes):
        put_mean_gradient(averager, samples[sum(sizes[:i]) :][:size])
        averager.accumulate_grads_(size)
    assert torch.allclose(averaged(averager), sum(samples) / len(samples), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_microbatch_that_is_not_finite_loses_itself_only(averager, broken, when):
    samples = draw_samples(8)
    for i in range(3):
        if i == when:
            put_mean_gradient(averager, [torch.full((14,), 1.0)])
            averager.parameters[1].grad[1] = broken  # one value of one parameter
            assert averager.accumulate_grads_(4) is False
        put_mean_gradient(averager, samples[4 * (i % 2) : 4 * (i % 2) + 4])
        if i < 2:
            assert averager.accumulate_grads_(4) is True
    assert averager.microbatches_lost == 1
    assert averager.local_samples_accumulated == 8 and averager.local_times_accumulated == 2
    assert torch.allclose(averaged(averager), sum(samples) / 8, rtol=1e-5, atol=1e-6)


def test_the_loss_scale_of_each_microbatch_is_undone(averager):
    samples = draw_samples(12)
    for first, size, scale in [(0, 4, 1024.0), (4, 8, 512.0)]:  # it was halved in between
        put_mean_gradient(averager, samples[first : first + size], scale)
        averager.accumulate_grads_(size, grad_scale=scale)
    assert torch.allclose(averaged(averager), sum(samples) / 12, rtol=1e-5, atol=1e-6)


def test_a_mean_over_other_things_than_samples_weighs_by_these(averager):
    """Words that a loss counts, for instance: two samples may have three of them, or three hundred."""
    words = draw_samples(30)
    for first, count in [(0, 3), (3, 26), (29, 1)]:
        put_mean_gradient(averager, words[first : first + count])
        assert averager.accumulate_grads_(2, weight=count) is True
    assert averager.local_samples_accumulated == 6 and averager.local_weight_accumulated == 30
    assert torch.allclose(averaged(averager), sum(words) / 30, rtol=1e-5, atol=1e-6)
    assert averager.accumulate_grads_(2, weight=0.0) is False, "a mean over nothing"
    averager.reset_accumulated_grads_()
    assert averager.local_weight_accumulated == 0


def test_one_microbatch_alone_is_its_own_gradient_to_the_last_bit(averager):
    [sample] = draw_samples(1)
    put_mean_gradient(averager, [sample])
    averager.accumulate_grads_(3, weight=7.0)
    assert torch.equal(averaged(averager), sample)


def test_16_bit_gradients_are_summed_in_32_bits(peer):
    """In 16 bits the later ones of a long row would change nothing: 256 + 1 is 256."""
    averager = make_averager(peer, [torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))])
    for number in range(600):
        averager.parameters[0].grad = torch.tensor([1.0, float(number % 2)], dtype=torch.bfloat16)
        averager.accumulate_grads_(1)
    assert averaged(averager).dtype == torch.float32
    assert torch.allclose(averaged(averager), torch.tensor([1.0, 0.5]), rtol=1e-5)


def test_nothing_accumulated_is_nothing_averaged(averager):
    assert averaged(averager).abs().max() == 0.0
    put_mean_gradient(averager, draw_samples(4))
    averager.accumulate_grads_(4)
    averager.reset_accumulated_grads_()
    assert averager.local_samples_accumulated == 0 and averaged(averager).abs().max() == 0.0


def test_a_parameter_without_a_gradient_counts_as_zero(averager):
    samples = draw_samples(4)
    put_mean_gradient(averager, samples)
    averager.parameters[1].grad = None
    assert averager.accumulate_grads_(4) is True
    mean = averaged(averager)
    assert torch.allclose(mean[:12], (sum(samples) / 4)[:12], atol=1e-6) and mean[12:].abs().max() == 0.0


def test_the_averager_waits_for_a_leader_less_than_for_the_group(peer):
    """hivemind's request timeout of 3 s deadlocks a swarm whose matchmaking takes less."""
    quick = make_averager(peer, [torch.nn.Parameter(torch.zeros(2))], min_matchmaking_time=1.5)
    assert quick.matchmaking_kwargs["request_timeout"] < 1.5
    slow = make_averager(peer, [torch.nn.Parameter(torch.zeros(2))], min_matchmaking_time=30.0)
    assert slow.matchmaking_kwargs["request_timeout"] == 3.0


def test_gradients_are_nobodys_state(averager):
    assert averager.load_state_from_peers(timeout=1.0) is None
