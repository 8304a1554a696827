"""8-bit LAMB's steps beside slow roads to the same place: the formulas in numpy, Lamb in fp32."""

from __future__ import annotations

import copy
import math
import re
import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from tests.test_lamb8bit_codes import codes_of, one_step
from tests.test_optim import flat, set_grads
from volunteer_kit.optim import Lamb, Lamb8bit, OptimizerConfig, build_optimizer_factory, fused, param_groups
from volunteer_kit.optim.fused import BLOCK, CHUNK

# a step --------------------------------------------------------------------------------------------------------


class Numpy8bitLamb:
    """The same algorithm, an array at a time, in numpy's float32; norms in float64."""

    def __init__(self, weight, *, lr, betas=(0.9, 0.96), eps=1e-6, weight_decay=0.045, clip=4.0, debias=False):
        self.weight, self.t = weight.numpy().copy().reshape(-1), 0
        self.settings = lr, betas, eps, weight_decay, clip, debias
        blocks = math.ceil(self.weight.size / BLOCK)
        self.codes = [np.full(self.weight.size, fused.ZERO_MEAN, np.uint8), np.zeros(self.weight.size, np.uint8)]
        self.absmax = [np.zeros(blocks, np.float32), np.zeros(blocks, np.float32)]

    def step(self, grad):
        (lr, betas, eps, decay, clip, debias), f = self.settings, np.float32
        self.t += 1
        grad = grad.numpy().reshape(-1)
        norm = math.sqrt(math.fsum(float(x) ** 2 for x in grad))
        g = grad * f(min(1.0, clip / (norm + 1e-6)))
        spread = [np.repeat(absmax, BLOCK)[: g.size] for absmax in self.absmax]
        m, v = (
            book[codes] * scale
            for book, codes, scale in zip((fused.MEAN_BOOK, fused.ROOT_BOOK), self.codes, spread, strict=True)
        )
        m = m * f(betas[0]) + g * f(1 - betas[0])
        v = v * v * f(betas[1]) + g * g * f(1 - betas[1])
        c1 = 1 / (1 - betas[0] ** self.t) if debias else 1
        c2 = 1 / math.sqrt(1 - betas[1] ** self.t) if debias else 1
        update = m * f(c1) / (np.sqrt(v) * f(c2) + f(eps)) + self.weight * f(decay)
        norms = [math.sqrt(math.fsum(x.astype(np.float64) ** 2)) for x in (self.weight, update)]
        trust = min(norms[0], 1e4) / norms[1] if all(norms) else 1.0
        self.weight = self.weight - update * f(lr * trust)
        normal, self.absmax[0] = self.normalize(m)
        self.codes[0] = codes_of(normal, fused.MEAN_TABLE)
        normal, self.absmax[1] = self.normalize(np.sqrt(v))
        places = np.arange(normal.size)
        shares = fused.SHARES[(self.t + 1021 * (places // BLOCK)) % BLOCK + places % BLOCK]
        slope, offset = fused.ROOT_LINES[:, normal.view(np.uint32) >> 16]
        self.codes[1] = (normal * slope + offset + shares).astype(np.uint8)

    @staticmethod
    def normalize(values):
        padded = np.pad(values, (0, -values.size % BLOCK)).reshape(-1, BLOCK)
        absmax = np.abs(padded).max(axis=1)
        absmax[absmax < fused.SMALLEST] = 0
        inverse = np.divide(np.float32(1), absmax, where=absmax > 0, out=np.zeros_like(absmax))
        return (padded * inverse[:, None]).reshape(-1)[: values.size], absmax


SIZES = st.one_of(
    st.integers(1, 3 * BLOCK),
    st.builds(lambda n, unit, off: max(1, n * unit + off), st.integers(1, 3), st.sampled_from([512, BLOCK, CHUNK]),
              st.integers(-1, 1)),
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    size=SIZES,
    seed=st.integers(0, 9),
    exponent=st.integers(-8, 4),
    debias=st.booleans(),
    decay=st.sampled_from([0.0, 0.045]),
)
def test_the_kernels_are_the_formulas_to_the_last_bit(size, seed, exponent, debias, decay):
    """Elementwise float32 as numpy has it: no fused multiply-add, no reordering, or peers would drift apart."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(size, generator=generator)
    weight[: size // 3] = 0
    param = nn.Parameter(weight.clone())
    own = Lamb8bit([param], lr=0.01, min_8bit_size=1, debias=debias, weight_decay=decay)
    plain = Numpy8bitLamb(weight, lr=0.01, debias=debias, weight_decay=decay)
    for _ in range(3):
        grad = torch.randn(size, generator=generator) ** 3 * 10.0**exponent
        grad[size // 2 : size // 2 + 5000] = 0
        param.grad = grad
        own.step()
        plain.step(grad)
        state = own.state[param]
        for name, codes, absmax in zip(("exp_avg", "exp_avg_sq"), plain.codes, plain.absmax, strict=True):
            np.testing.assert_array_equal(state[f"{name}_absmax"].numpy(), absmax)
            np.testing.assert_array_equal(state[name].numpy(), codes)
        np.testing.assert_array_equal(param.detach().numpy(), plain.weight)


@settings(max_examples=20, deadline=None)
@given(
    shape=st.sampled_from([(3, 7), (BLOCK,), (65, 1009), (2, CHUNK // 2 + 1)]),
    debias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_fused_fp32_is_torchs(shape, debias, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    by_torch, by_kernel = (nn.Parameter(weight.clone()) for _ in range(2))
    optimizers = [Lamb([param], lr=0.01, debias=debias) for param in (by_torch, by_kernel)]
    optimizers[0].fused_size, optimizers[1].fused_size = 10**9, 1
    for step in range(3):
        for param, lamb in zip((by_torch, by_kernel), optimizers, strict=True):
            set_grads([param], seed + step, size=0.1)
            lamb.step()
    torch.testing.assert_close(by_kernel, by_torch, rtol=1e-5, atol=1e-7)
    for name in ("exp_avg", "exp_avg_sq"):
        ours, theirs = (lamb.state[p][name] for lamb, p in zip(optimizers, (by_torch, by_kernel), strict=True))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8 if name == "exp_avg" else 1e-13)


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(300, 256), nn.LayerNorm(256), nn.Linear(256, 300), nn.Linear(300, 300))


def random_steps(optimizer, steps: int, seed: int = 0) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(steps):
        set_grads(params, seed + step, size=0.05)
        optimizer.step()


@pytest.mark.parametrize("optimizer", [Lamb, Lamb8bit])
def test_the_number_of_threads_changes_no_bit(optimizer):
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            generator = torch.Generator().manual_seed(0)
            params = [nn.Parameter(torch.randn(n, generator=generator)) for n in (5 * CHUNK + 321, CHUNK, 70_001)]
            lamb = optimizer(params)
            random_steps(lamb, 3)
            tensors = [*params, *(leaf for state in lamb.state.values() for leaf in state.values())]
            found.append([t.detach().clone() for t in tensors if isinstance(t, torch.Tensor)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_eight_bits_follow_fp32():
    models = [make_model() for _ in range(2)]
    for model, optimizer in zip(models, (Lamb, Lamb8bit), strict=True):
        random_steps(optimizer(param_groups(model, 0.045), lr=0.01), 20)
    start, exact, rounded = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (make_model(), *models))
    assert (rounded - exact).norm() < 0.08 * (exact - start).norm()
    assert not torch.equal(rounded, exact)


def test_a_small_square_does_not_blow_up_a_rare_row():
    """Rows of an embedding: one with huge gradients, one seen once, in one block. Its mean outlives its square."""
    rows = torch.zeros(4, 1024)
    found = []
    for optimizer, extra in ((Lamb, {}), (Lamb8bit, {"min_8bit_size": 1})):
        param = nn.Parameter(torch.full((4, 1024), 0.02))
        lamb = optimizer([param], lr=0.01, max_grad_norm=None, weight_decay=0.0, **extra)
        for step in range(4):
            param.grad = rows.clone()
            param.grad[0] = 1.0
            param.grad[1] = 1e-4 if step == 0 else 0.0
            lamb.step()
        found.append(param.detach()[1].sub(0.02).abs().max())
    assert found[1] < 2 * found[0], "1/eps of the mean otherwise"


def test_a_gradient_of_another_layout_or_none():
    generator = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn(300, 400, generator=generator) for _ in range(2))
    straight, turned, half = (
        one_step(weight, g, lr=0.1) for g in (grad, grad.t().contiguous().t(), grad.bfloat16().float())
    )
    assert torch.equal(straight[0], turned[0]) and not torch.equal(straight[0], half[0])
    used, unused = (nn.Parameter(weight.clone()) for _ in range(2))
    lamb = Lamb8bit([used, unused])
    set_grads([used], 0)
    lamb.step()
    assert torch.equal(unused, weight) and not torch.equal(used, weight)
    assert lamb.state[unused]["step"] == 0 and not lamb.state[unused]["exp_avg_absmax"].any()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_non_finite_gradient_changes_nothing(poison):
    model = make_model()
    lamb = Lamb8bit(model.parameters())
    random_steps(lamb, 2)
    before = copy.deepcopy(lamb.state_dict()), [param.detach().clone() for param in model.parameters()]
    set_grads(list(model.parameters()), 5)
    model[0].weight.grad[299, 255] = poison
    lamb.step()
    assert lamb.skipped_steps == 1 and flat(lamb.state_dict()) == flat(before[0])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before[1], strict=True))


def test_what_is_in_eight_bits():
    model = nn.ModuleDict({"emb": nn.Embedding(300, 256), "out": nn.Linear(256, 300), "small": nn.Linear(255, 257)})
    model["out"].weight = model["emb"].weight
    model["bf16"] = nn.Linear(300, 300, bias=False).to(torch.bfloat16)
    lamb = Lamb8bit(param_groups(model, 0.045))
    assert len(lamb.state) == 5, "tied weights once"
    state = lamb.state[model["emb"].weight]
    assert {name: getattr(value, "dtype", value) for name, value in state.items()} == {
        "step": 0, "exp_avg": torch.uint8, "exp_avg_absmax": torch.float32,
        "exp_avg_sq": torch.uint8, "exp_avg_sq_absmax": torch.float32,
    }  # fmt: skip
    assert state["exp_avg"].shape == (300, 256) and state["exp_avg_absmax"].shape == (math.ceil(300 * 256 / 4096),)
    for param in (model["small"].weight, model["bf16"].weight, model["out"].bias):
        assert lamb.state[param].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert lamb.state[param]["exp_avg"].dtype == torch.float32
    set_grads([param for group in lamb.param_groups for param in group["params"]], 0)
    lamb.step()
    assert {state["step"] for state in lamb.state.values()} == {1}


def peak_mb() -> float:
    """Largest resident set since the last reset, MB."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


@pytest.mark.parametrize("optimizer", [Lamb, Lamb8bit])
def test_a_step_takes_a_few_megabytes(optimizer):
    param = nn.Parameter(torch.randn(2**23))  # 32 MB
    param.grad = torch.randn(2**23)
    lamb = optimizer([param])
    lamb.step()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak cannot be reset here")
    before = peak_mb()
    lamb.step()
    assert peak_mb() - before < 4


# what stands in the way ----------------------------------------------------------------------------------------


def test_a_large_tensor_elsewhere_is_refused_with_a_way_out():
    Lamb8bit([nn.Parameter(torch.zeros(10, device="meta"))])
    for tensor in (torch.zeros(256, 256, device="meta"), torch.zeros(256, 257).t()):
        with pytest.raises(ValueError, match="statistics_bits: 32"):
            Lamb8bit([nn.Parameter(tensor)])


def test_numba_is_asked_for_by_those_with_large_tensors_only(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "volunteer_kit.optim.fused")
    monkeypatch.delattr("volunteer_kit.optim.fused")
    Lamb8bit([nn.Parameter(torch.zeros(65_535))])
    for optimizer in (Lamb, Lamb8bit):
        with pytest.raises(ImportError, match="(?s)numba.*volunteer-kit setup"):
            optimizer([nn.Parameter(torch.zeros(65_536))])


def test_kernels_compile_where_nothing_can_be_cached():
    namespace: dict = {}
    exec("def double(x):\n    return 2 * x", namespace)  # of no file, as a package in a folder that is read-only
    assert fused.compiled("i8(i8)")(namespace["double"])(21) == 42


@pytest.mark.parametrize(("bits", "kind"), [(8, Lamb8bit), (32, Lamb)])
def test_the_run_file_chooses(bits, kind):
    config = OptimizerConfig(statistics_bits=bits, lr=0.1, debias=True)
    optimizer = build_optimizer_factory(config)[0](make_model().parameters())
    assert type(optimizer) is kind and optimizer.defaults["lr"] == 0.1 and optimizer.defaults["debias"]
    assert type(build_optimizer_factory(OptimizerConfig())[0](make_model().parameters())) is Lamb8bit
    with pytest.raises(ValueError):
        OptimizerConfig(statistics_bits=16)


# state ---------------------------------------------------------------------------------------------------------


def test_a_state_dict_keeps_bytes_and_memory():
    donor, own = (Lamb8bit(param_groups(make_model(seed), 0.045)) for seed in (0, 1))
    random_steps(donor, 3)
    memory = [leaf.data_ptr() for state in own.state.values() for leaf in state.values() if torch.is_tensor(leaf)]
    own.load_state_dict(copy.deepcopy(donor.state_dict()))
    assert flat(own.state_dict()) == flat(donor.state_dict())
    after = [leaf.data_ptr() for state in own.state.values() for leaf in state.values() if torch.is_tensor(leaf)]
    assert memory == after


@pytest.mark.parametrize("name", ["exp_avg_absmax", "exp_avg_sq_absmax"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-9])
def test_a_scale_that_is_no_scale_is_refused(name, value):
    donor, own = (Lamb8bit(make_model(seed).parameters()) for seed in (0, 1))
    random_steps(donor, 1)
    before, state = flat(own.state_dict()), copy.deepcopy(donor.state_dict())
    state["state"][0][name][3] = value
    with pytest.raises(ValueError, match=name):
        own.load_state_dict(state)
    assert flat(own.state_dict()) == before


def test_negative_squares_are_refused_in_fp32_too():
    donor, own = (Lamb(make_model(seed).parameters()) for seed in (0, 1))
    state = copy.deepcopy(donor.state_dict())
    state["state"][0]["exp_avg_sq"][0] = -1.0
    with pytest.raises(ValueError, match="exp_avg_sq"):
        own.load_state_dict(state)
    state["state"][0]["exp_avg_sq"][0] = 1.0
    state["state"][0]["exp_avg"][0] = -1.0
    own.load_state_dict(state)


def training_state(seed: int):
    from volunteer_kit.swarm.node.training_state import TrainingState

    names = [name for name, _ in make_model(seed).named_parameters()]
    return TrainingState(make_model(seed).parameters(), Lamb8bit, None, names)


def test_a_newcomer_takes_codes_and_scales_to_the_last_bit(tmp_path):
    donor, own = training_state(0), training_state(1)
    random_steps(donor._optimizer, 3)
    donor.move_to(b"here", 3)
    donor.save(tmp_path / "state")
    own.load(tmp_path / "state", b"here", 3)
    assert own.digest() == donor.digest()
    for state in (donor, own):
        random_steps(state._optimizer, 2, seed=50)
    assert own.digest() == donor.digest(), "and stays equal"


@pytest.mark.parametrize("name", ["exp_avg_absmax", "exp_avg_sq_absmax"])
@pytest.mark.parametrize("value", [math.nan, -1e-9])
def test_a_strangers_impossible_scales_are_refused(tmp_path, name, value):
    from volunteer_kit.swarm.node.training_state import UnusableState

    donor, own = training_state(0), training_state(1)
    random_steps(donor._optimizer, 1)
    scale = next(tensor for key, tensor in donor.named().items() if key.endswith(name))
    with torch.no_grad():
        scale.view(-1)[-1] = value
    donor.save(tmp_path / "state")
    with pytest.raises(UnusableState):
        own.check(tmp_path / "state")
