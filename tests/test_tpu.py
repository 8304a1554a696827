"""What the kit says and does about TPUs where torch_xla is absent; the rest is in tests/tpu."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

from volunteer_kit.training.tpu import MissingTorchXla, Tpu, TpuCores, describe_tpu, require_torch_xla

STAND_IN = """
import sys, types
print("a library's own print")
def device(): return "xla:0"
runtime, core, xla = (types.ModuleType(f"torch_xla.{name}") for name in ("runtime", "core", "core.xla_model"))
runtime.addressable_runtime_device_count = lambda: 8
xla.xla_device_kind = lambda: "TPU v9"
xla.get_memory_info = lambda device: {"bytes_limit": 17_000_000_000}
core.xla_model = xla
sys.modules.update({module.__name__: module for module in (runtime, core, xla)})
"""


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


def test_nothing_is_asked_where_nothing_hints_at_a_tpu(tmp_path):
    with mock.patch.object(subprocess, "run", side_effect=AssertionError("asked")):
        assert describe_tpu(tmp_path, {}) is None
        assert describe_tpu(tmp_path, {"PJRT_DEVICE": "CUDA"}) is None


@pytest.mark.parametrize("hint", [{"PJRT_DEVICE": "TPU"}, {"TPU_ACCELERATOR_TYPE": "v9-8"}, "dev/accel0"])
def test_torch_xla_is_asked_in_a_process_of_its_own(tmp_path, hint):
    package = tmp_path / "torch_xla"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN)
    if isinstance(hint, str):
        (tmp_path / "dev").mkdir()
        (tmp_path / hint).touch()
        hint = {}
    environment = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"], **hint}
    assert describe_tpu(tmp_path, environment) == Tpu("TPU v9", 8, 17_000_000_000)
    assert "torch_xla" not in sys.modules


@pytest.mark.parametrize("body", ["raise RuntimeError('no chip')", "import os; os._exit(134)", "print('[1]')"])
def test_a_tpu_that_cannot_be_asked_is_none(tmp_path, body):
    package = tmp_path / "torch_xla"
    package.mkdir()
    (package / "__init__.py").write_text(body)
    environment = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"], "PJRT_DEVICE": "TPU"}
    assert describe_tpu(tmp_path, environment) is None
