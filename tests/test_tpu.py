"""What the kit says and does about TPUs where torch_xla is absent; the rest is in tests/tpu."""

from __future__ import annotations

import contextlib
import copy
import sys
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from volunteer_kit.device import ORIGINAL, Device
from volunteer_kit.runs import load_run
from volunteer_kit.session import compute
from volunteer_kit.training.protocol import WorkerSpec
from volunteer_kit.training.tpu import MissingTorchXla, TpuCores, parts_of, require_torch_xla


class Rows(NamedTuple):
    x: torch.Tensor  # (B, 3)
    y: torch.Tensor  # (B, 1)


@pytest.fixture
def one_core(monkeypatch):
    """torch_xla, as far as one core needs it; the core is the CPU."""
    names = ("torch_xla", "torch_xla.runtime", "torch_xla.backends", "torch_xla.core", "torch_xla.core.xla_model")
    modules = {name: ModuleType(name) for name in names}
    top = modules["torch_xla"]
    top.device, top.sync = lambda: torch.device("cpu"), lambda: None
    top.runtime, top.backends, top.core = (modules[f"torch_xla.{name}"] for name in ("runtime", "backends", "core"))
    top.runtime.addressable_runtime_device_count = lambda: 1
    top.backends.set_mat_mul_precision = lambda precision: None
    top.core.xla_model = modules["torch_xla.core.xla_model"]
    top.core.xla_model.send_cpu_data_to_device = lambda tensors, device, **how: [each.clone() for each in tensors]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("importlib.metadata.version", lambda name: torch.__version__.split("+")[0])


@pytest.mark.parametrize(
    ("installed", "told"),
    [(None, "not installed"), ("2.0.1", "here as 2.0.1"), ("20.9.0", "here as 20.9.0")],
)
def test_a_missing_torch_xla_is_told_with_its_line(installed, told):
    from importlib.metadata import PackageNotFoundError

    found = mock.Mock(side_effect=PackageNotFoundError) if installed is None else mock.Mock(return_value=installed)
    with mock.patch("importlib.metadata.version", found), pytest.raises(MissingTorchXla) as error:
        TpuCores(lambda model, batch: None)
    short = ".".join(torch.__version__.split(".")[:2])
    assert told in str(error.value) and f"pip install 'torch_xla[tpu]=={short}.*'" in str(error.value)


def test_the_one_of_this_pytorch_is_taken():
    with mock.patch("importlib.metadata.version", return_value=torch.__version__.split("+")[0]):
        require_torch_xla()


@pytest.mark.parametrize("rows", [1, 4, 6, 7, 9, 12, 63])
def test_no_more_rows_are_computed_at_once_than_fit(one_core, rows):
    """Whatever their number, the gradients and the loss are the microbatch's."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    expected = copy.deepcopy(model)
    batch, at_once = Rows(torch.randn(rows, 3), torch.randn(rows, 1)), []

    def mean_loss(each, part):
        at_once.append(len(part.x))
        return torch.nn.functional.mse_loss(each(part.x), part.y)

    loss = TpuCores(mean_loss, precision="fp32", fits=4)(model, batch, scale=2.0)
    assert max(at_once) <= 4 and len(set(at_once)) == 1 and sum(at_once) == rows
    expected_loss = torch.nn.functional.mse_loss(expected(batch.x), batch.y)
    (2.0 * expected_loss).backward()
    torch.testing.assert_close(loss, expected_loss.detach())
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])


@pytest.mark.parametrize(
    ("rows", "fits", "cores", "parts"),
    [
        (63, None, 1, 1),
        (64, 4, 8, 2),  # 4 rows on each core, twice
        (32, 4, 8, 1),
        (6, 4, 8, 2),  # 3 rows, whole on each core
        (63, 4, 8, 21),
        (7, 4, 1, 7),
        (5, 0, 1, 5),
    ],
)
def test_a_microbatch_takes_the_fewest_equal_parts_that_fit(rows, fits, cores, parts):
    assert parts_of(rows, fits, cores) == parts


@pytest.mark.parametrize(("asked", "batch", "at_once"), [(None, 12, 4), (9, 8, 4), (6, 4, 4), (3, 3, 3)])
def test_a_volunteers_own_batch_size_is_cut_to_what_fits_and_that_is_told(monkeypatch, one_core, asked, batch, at_once):
    found = Device("tpu", "TPU v5e-1", 5.0, 5.0, None, 1, 8, 64.0)  # 4 rows of the original's model
    monkeypatch.setattr(compute, "detect_device", lambda: found)
    monkeypatch.setattr(compute, "workload", lambda run, parameters: ORIGINAL)
    told = {}
    run = load_run("demo").model_copy(update={"target_batch_size": 96})
    threads = torch.get_num_threads()
    try:
        spec = WorkerSpec(run=run.model_dump(mode="json"), batch_size=asked)
        chosen = compute.choose(run, spec, 0, lambda kind, **said: told.update(said))
    finally:
        torch.set_num_threads(threads)
    assert chosen.batch_size == told["batch_size"] == batch
    assert (asked is None or asked == batch) or f"a batch of {batch}, not {asked}" in told["why"]
    sizes = []

    def loss(model, part):
        sizes.append(len(part.x))
        return model(part.x).mean()

    monkeypatch.setattr(compute, "compute_loss", loss)
    cores = chosen.gradients(None)
    with mock.patch.object(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext()):
        cores(torch.nn.Linear(3, 1), Rows(torch.randn(batch, 3), torch.randn(batch, 1)))
    assert set(sizes) == {at_once}
