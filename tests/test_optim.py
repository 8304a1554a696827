"""LAMB beside the paper's formulas, its state through hivemind's functions, the recipe on dalle-pytorch's names."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hivemind.optim import state_averager
from torch import nn

from volunteer_kit.model.dalle import PRESETS, Dalle
from volunteer_kit.optim import Lamb, Lamb8bit, OptimizerConfig, build_optimizer_factory, param_groups, parameter_names
from volunteer_kit.optim.exact_state import ExactStateOptimizer
from volunteer_kit.optim.recipe import LinearSchedule, is_decayed


def make_params(seed: int = 0, shapes=((5, 3), (7,), (2, 3, 4))) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in shapes]


def set_grads(params, seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float32).to(param.dtype) * size


class PlainLamb:
    """The paper's algorithm in double precision, a tensor at a time, as slow and as simple as it can be."""

    def __init__(self, params, *, lr, betas, eps, weight_decay, max_grad_norm, clamp_value, debias):
        self.params = [param.detach().double().clone() for param in params]
        self.m = [torch.zeros_like(param) for param in self.params]
        self.v = [torch.zeros_like(param) for param in self.params]
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.max_grad_norm, self.clamp_value, self.debias, self.t = max_grad_norm, clamp_value, debias, 0

    def step(self, grads) -> None:
        self.t += 1
        norm = math.sqrt(sum(float((grad.double() ** 2).sum()) for grad in grads))
        scale = min(1.0, self.max_grad_norm / norm) if self.max_grad_norm else 1.0
        for i, grad in enumerate(grads):
            b1, b2 = self.betas
            g = grad.double() * scale
            self.m[i] = b1 * self.m[i] + (1 - b1) * g
            self.v[i] = b2 * self.v[i] + (1 - b2) * g**2
            m, v = self.m[i], self.v[i]
            if self.debias:
                m, v = m / (1 - b1**self.t), v / (1 - b2**self.t)
            direction = m / (v.sqrt() + self.eps) + self.weight_decay * self.params[i]
            weight, update = self.params[i].norm(), direction.norm()
            trust = min(float(weight), self.clamp_value) / float(update) if weight > 0 and update > 0 else 1.0
            self.params[i] = self.params[i] - self.lr * trust * direction


SETTINGS = dict(lr=0.02, betas=(0.9, 0.96), eps=1e-6, weight_decay=0.045, max_grad_norm=4.0, clamp_value=1e4)


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("change", [{}, {"clamp_value": 0.5}, {"max_grad_norm": None}, {"weight_decay": 0.0}])
@pytest.mark.parametrize(("batch_elements", "fused_size"), [(1, 2**16), (2**18, 2**16), (2**18, 1)])
def test_lamb_follows_the_formulas(monkeypatch, debias, change, batch_elements, fused_size):
    monkeypatch.setattr("volunteer_kit.optim.lamb.BATCH_ELEMENTS", batch_elements)
    monkeypatch.setattr(Lamb, "fused_size", fused_size)
    settings = {**SETTINGS, **change, "debias": debias}
    params = make_params()
    params.append(nn.Parameter(torch.zeros(4)))  # a zero weight has trust ratio 1, or it would never move
    plain = PlainLamb(params, **settings)
    lamb = Lamb(params, **settings)
    for step in range(6):
        set_grads(params, step, size=3.0 if step % 2 else 0.01)  # clipped and not clipped
        before = [param.grad.clone() for param in params]
        lamb.step()
        plain.step([param.grad for param in params])
        assert all(torch.equal(a, param.grad) for a, param in zip(before, params, strict=True))
    for param, expected in zip(params, plain.params, strict=True):
        torch.testing.assert_close(param.detach().double(), expected, rtol=2e-5, atol=1e-6)
    assert bool(params[-1].detach().any())


def test_the_defaults_are_the_original_runs():
    defaults = Lamb(make_params()).defaults
    assert (defaults["lr"], defaults["betas"], defaults["eps"]) == (2.5e-3, (0.9, 0.96), 1e-6)
    assert (defaults["weight_decay"], defaults["clamp_value"], defaults["debias"]) == (0.045, 1e4, False)
    assert Lamb(make_params()).max_grad_norm == 4.0
    assert OptimizerConfig().model_dump(exclude={"warmup_epochs", "total_epochs"}) == {
        "lr": 2.5e-3, "betas": (0.9, 0.96), "eps": 1e-6, "weight_decay": 0.045, "max_grad_norm": 4.0,
        "clamp_value": 1e4, "debias": False, "statistics_bits": 8,
    }  # fmt: skip
    assert (OptimizerConfig().warmup_epochs, OptimizerConfig().total_epochs) == (3125, 31250)


def test_the_clip_is_over_all_groups():
    params = make_params()
    lamb = Lamb([{"params": params[:1]}, {"params": params[1:]}], max_grad_norm=1.0)
    set_grads(params, 0, size=100.0)
    lamb.step()
    means = torch.cat([lamb.state[param]["exp_avg"].flatten() for param in params])
    assert float(means.norm()) == pytest.approx(0.1, rel=1e-4)  # (1 - beta1) of a gradient of norm 1


def test_it_trains():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))
    inputs = torch.randn(256, 8)
    targets = inputs[:, :1] * inputs[:, 1:2]
    optimizer = Lamb(param_groups(model, 0.01), lr=0.02)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    first = float(optimizer.step(closure))
    for _ in range(150):
        last = float(optimizer.step(closure))
    assert last < 0.1 * first


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_changes_nothing(poison):
    params = make_params()
    lamb = Lamb(params)
    set_grads(params, 0)
    lamb.step()
    before = copy.deepcopy(lamb.state_dict()), [param.detach().clone() for param in params]
    set_grads(params, 1)
    params[1].grad[3] = poison
    lamb.step()
    assert lamb.skipped_steps == 1
    assert flat(lamb.state_dict()) == flat(before[0])
    assert all(torch.equal(a, b) for a, b in zip(params, before[1], strict=True))
    set_grads(params, 1)
    lamb.step()
    assert lamb.skipped_steps == 1 and not torch.equal(params[0], before[1][0])


def test_a_parameter_without_gradient_keeps_its_state():
    params = make_params()
    lamb = Lamb(params)
    set_grads(params, 0)
    lamb.step()
    frozen, state = params[1].detach().clone(), lamb.state[params[1]]["exp_avg"].clone()
    params[1].grad = None
    lamb.step()
    assert torch.equal(params[1], frozen) and torch.equal(lamb.state[params[1]]["exp_avg"], state)
    assert [lamb.state[param]["step"] for param in params] == [2, 1, 2]
    for param in params:
        param.grad = None
    lamb.step()  # no gradient at all is no error
    assert lamb.skipped_steps == 0


def test_half_precision_parameters_have_fp32_statistics():
    param = nn.Parameter(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16))
    lamb = Lamb([param])
    set_grads([param], 0)
    before = param.detach().clone()
    lamb.step()
    assert lamb.state[param]["exp_avg"].dtype == torch.float32 and param.dtype == torch.bfloat16
    assert torch.isfinite(param).all() and not torch.equal(before, param)


@pytest.mark.parametrize(
    "bad", [{"lr": -1}, {"lr": math.nan}, {"betas": (0.9, 1.0)}, {"max_grad_norm": 0.0}, {"clamp_value": -1.0}]
)
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ValueError):
        Lamb(make_params(), **bad)


# state ---------------------------------------------------------------------------------------------------------


def flat(state) -> list:
    """Leaves of a state_dict, tensors as (dtype, values), comparable with ==."""
    leaves = state_averager.nested_flatten(state)
    return [(leaf.dtype, leaf.tolist()) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def test_the_structure_of_the_state_never_changes():
    params = make_params()
    lamb = Lamb(params)
    assert any(isinstance(leaf, torch.Tensor) for leaf in state_averager.nested_flatten(lamb.state_dict()))
    before = [type(leaf) for leaf in state_averager.nested_flatten(lamb.state_dict())]
    set_grads(params, 0)
    lamb.step()
    assert [type(leaf) for leaf in state_averager.nested_flatten(lamb.state_dict())] == before


def test_state_travels_through_hivemind_exactly():
    donor_params, own_params = make_params(0), make_params(1)
    donor, own = Lamb(donor_params, lr=0.1), Lamb(own_params, lr=0.3, weight_decay=0.5)
    for step in range(3):
        set_grads(donor_params, step)
        donor.step()
    memory = [own.state[param]["exp_avg"].data_ptr() for param in own_params]
    metadata, tensors = state_averager.dump_optimizer_state(donor)
    metadata = hivemind_serializer().loads(hivemind_serializer().dumps(metadata))
    state_averager.load_optimizer_state(own, metadata, [tensor.clone() for tensor in tensors])

    assert flat(own.state_dict()["state"]) == flat(donor.state_dict()["state"])
    assert memory == [own.state[param]["exp_avg"].data_ptr() for param in own_params]  # shared with the averager
    assert own.param_groups[0]["lr"] == 0.1 and own.param_groups[0]["weight_decay"] == 0.5
    with torch.no_grad():
        for param, given in zip(own_params, donor_params, strict=True):
            param.copy_(given)
    own.param_groups[0]["weight_decay"] = donor.param_groups[0]["weight_decay"]
    for optimizer, params in ((donor, donor_params), (own, own_params)):
        set_grads(params, 9)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(own_params, donor_params, strict=True))


def hivemind_serializer():
    from hivemind.utils.serializer import MSGPackSerializer

    return MSGPackSerializer


class ByteStatistics(ExactStateOptimizer):
    """A stand-in for 8-bit LAMB: what matters here is the types of its statistics."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def new_state(self, param, group):
        return {"step": 0, "codes": torch.zeros(param.shape, dtype=torch.uint8), "absmax": torch.zeros(2)}


def test_integer_statistics_keep_their_type():
    donor, own = ByteStatistics(make_params()), ByteStatistics(make_params())
    for state in donor.state.values():
        state["codes"].random_(0, 256, generator=torch.Generator().manual_seed(0))
    own.load_state_dict(copy.deepcopy(donor.state_dict()))
    assert flat(own.state_dict()) == flat(donor.state_dict())
    assert all(state["codes"].dtype == torch.uint8 for state in own.state.values())


def spoil(state, how):
    first = state["state"][0]
    if how == "shape":
        first["codes"] = first["codes"].flatten()[:3]
    elif how == "type":
        first["codes"] = first["codes"].float()
    elif how == "missing":
        del first["absmax"]
    elif how == "step":
        first["step"] = -1
    elif how == "tensor for a number":
        first["step"] = torch.tensor(3)
    elif how == "no state":
        del state["state"][1]
    elif how == "groups":
        state["param_groups"][0]["params"].pop()
    elif how == "lr":
        state["param_groups"][0]["lr"] = math.nan
    return state


@pytest.mark.parametrize("how", ["shape", "type", "missing", "step", "tensor for a number", "no state", "groups", "lr"])
def test_a_state_that_does_not_fit_changes_nothing(how):
    donor, own = ByteStatistics(make_params()), ByteStatistics(make_params())
    for state in donor.state.values():
        state["codes"].fill_(7)
        state["step"] = 5
    before = flat(own.state_dict())
    with pytest.raises(ValueError):
        own.load_state_dict(spoil(copy.deepcopy(donor.state_dict()), how))
    assert flat(own.state_dict()) == before


def test_added_groups_and_pickling():
    params = make_params()
    lamb = Lamb(params[:1])
    lamb.add_param_group({"params": params[1:], "weight_decay": 0.0})
    set_grads(params, 0)
    lamb.step()
    assert lamb.state[params[2]]["step"] == 1
    config = OptimizerConfig(warmup_epochs=2, total_epochs=4)
    factory, scheduler = pickle.loads(pickle.dumps(build_optimizer_factory(config)))
    assert scheduler(factory(params)).get_last_lr() == [config.lr / 2]


# recipe --------------------------------------------------------------------------------------------------------

# name in dalle_pytorch.DALLE 1.6.6, shape, decayed
DALLE_NAMES = [
    ("text_emb.weight", (32356, 64), True),
    ("image_emb.weight", (8192, 64), True),
    ("text_pos_emb.weight", (257, 64), True),
    ("image_pos_emb.weights.0", (1, 32, 1, 64), True),
    ("transformer.layers.blocks.0.f.net.scale", (1, 1, 64), False),
    ("transformer.layers.blocks.0.f.net.fn.norm.weight", (64,), False),
    ("transformer.layers.blocks.0.f.net.fn.norm.bias", (64,), False),
    ("transformer.layers.layers.0.0.scale", (1, 1, 64), False),
    ("transformer.layers.layers.0.0.fn.norm.weight", (64,), False),
    ("transformer.layers.layers.0.0.fn.norm_out.weight", (64,), False),
    ("transformer.layers.layers.0.0.fn.fn.fn.fn.to_qkv.weight", (192, 64), True),
    ("transformer.layers.layers.0.0.fn.fn.fn.fn.to_out.0.weight", (64, 64), True),
    ("transformer.layers.layers.0.0.fn.fn.fn.fn.to_out.0.bias", (64,), False),
    ("transformer.layers.layers.0.1.fn.fn.fn.net.0.weight", (512, 64), True),
    ("transformer.layers.layers.0.1.fn.fn.fn.net.3.bias", (64,), False),
    ("to_logits.0.weight", (64,), False),
    ("to_logits.0.bias", (64,), False),
    ("to_logits.1.weight", (40548, 64), True),
    ("to_logits.1.bias", (40548,), False),
]


@pytest.mark.parametrize(("name", "shape", "decayed"), DALLE_NAMES)
def test_decay_spares_norms_biases_and_layer_scale(name, shape, decayed):
    assert is_decayed(name, torch.empty(shape, device="meta")) is decayed


def test_decay_on_a_real_model():
    model = Dalle(PRESETS["tiny"])
    groups = param_groups(model, 0.045)
    assert [group["weight_decay"] for group in groups] == [0.045, 0.0]
    decayed, spared = (group["params"] for group in groups)
    assert len({id(param) for param in decayed + spared}) == len(decayed + spared) == len(list(model.parameters()))
    assert all(param.squeeze().ndim >= 2 for param in decayed)
    assert all(param.squeeze().ndim <= 1 for param in spared)
    named = dict(model.named_parameters())
    assert [id(named[name]) for name in parameter_names(model)] == [id(param) for param in decayed + spared]


def test_tied_and_frozen_parameters():
    model = nn.ModuleDict({"emb": nn.Embedding(5, 3), "out": nn.Linear(3, 5), "fixed": nn.Linear(2, 2)})
    model["out"].weight = model["emb"].weight
    model["fixed"].requires_grad_(False)
    named = list(model.named_parameters(remove_duplicate=False))
    assert parameter_names(named) == ["emb.weight", "out.bias"] == parameter_names(model)


def test_owner_tells_a_norm_from_its_neighbours():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.BatchNorm2d(4))
    assert parameter_names(model)[0] == "0.weight" and len(param_groups(model, 0.1)[0]["params"]) == 1


@pytest.mark.parametrize(
    ("epoch", "factor"), [(0, 1 / 3125), (3124, 1.0), (3125, 1.0), (17187, 0.50002), (31249, 1 / 28125), (31250, 0)]
)
def test_the_originals_schedule(epoch, factor):
    assert LinearSchedule(3125, 31250)(epoch) == pytest.approx(factor, abs=1e-4, rel=1e-3)


def test_the_schedule_follows_the_swarms_epochs_as_hivemind_steps_it():
    config = OptimizerConfig(lr=1.0, warmup_epochs=4, total_epochs=10)
    factory, make_scheduler = build_optimizer_factory(config)
    scheduler = make_scheduler(factory(make_params()))
    for local_epoch in (0, 1, 2, 6, 9, 10, 40):  # 6 and 40: this peer joined late or missed epochs
        while scheduler._step_count <= local_epoch:  # hivemind's TrainingStateAverager._update_scheduler
            scheduler.step()
        expected = (local_epoch + 1) / 4 if local_epoch < 4 else max(0, (10 - local_epoch) / 6)
        assert scheduler.get_last_lr()[0] == pytest.approx(expected)
    no_warmup = LinearSchedule(0, 10)
    assert no_warmup(0) == 1.0


@pytest.mark.parametrize(
    "bad",
    [{"lr": 0}, {"lr": math.nan}, {"warmup_epochs": 9, "total_epochs": 9}, {"betas": (0.9, 1)}, {"momentum": 0.9}],
)
def test_bad_configurations_are_refused(bad):
    with pytest.raises(ValueError):
        OptimizerConfig(**bad)


@pytest.mark.parametrize("kind", [Lamb, Lamb8bit])
def test_every_step_raises_the_version_of_what_it_changed(kind):
    """The copies on other devices are renewed by it; the compiled kernels write past PyTorch."""
    param = nn.Parameter(torch.ones(2**17))
    optimizer = kind([param])
    optimizer.fused_size = 2**16
    before = param._version
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert param._version > before
