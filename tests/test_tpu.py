"""What the kit says and does about TPUs where torch_xla is absent; the rest is in tests/tpu."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from volunteer_kit.training.tpu import MissingTorchXla, TpuCores, require_torch_xla


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
