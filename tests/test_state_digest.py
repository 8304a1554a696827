"""A state's digest: of its bytes and their order, not of how they lie in memory."""

from __future__ import annotations

import pytest
import torch

from volunteer_kit.swarm.state import digest

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 0, 3)], ids=str)
def test_a_digest_is_of_the_bytes(dtype, shape):
    tensors = [torch.ones(3), torch.ones(shape).to(dtype)]
    before = digest(tensors)
    assert digest([tensor.clone() for tensor in tensors]) == before and len(before) == 32
    if tensors[1].numel():
        tensors[1].view(-1).view(torch.uint8)[-1] ^= 1  # one bit
        assert digest(tensors) != before


def test_a_digest_sees_what_equality_does_not():
    zeros = torch.tensor([0.0, 1.0])
    minus = torch.tensor([-0.0, 1.0])
    assert torch.equal(zeros, minus) and digest([zeros]) != digest([minus])
    nan = torch.tensor([float("nan")])
    assert digest([nan]) == digest([nan.clone()])
    first, second = torch.ones(2), torch.zeros(2)
    assert digest([first, second]) != digest([second, first])
    assert digest([]) == digest([])


def test_a_digest_is_of_the_values_not_of_the_memory():
    tensor = torch.arange(12.0).reshape(3, 4)
    assert digest([tensor.t()]) == digest([tensor.t().contiguous()])
    assert digest([torch.nn.Parameter(tensor)]) == digest([tensor])
    assert digest([tensor[:, 1]]) == digest([tensor[:, 1].clone()])
