"""The samples that every peer of a run can name."""

from __future__ import annotations

import pytest
import torch

from volunteer_kit.optim.recipe import parameter_names
from volunteer_kit.public_samples import FEWEST, MOST, how_many, public_samples
from volunteer_kit.runs import build_model, build_stream, load_run, with_data


def parameters_of(model) -> list[torch.Tensor]:
    named = dict(model.named_parameters())
    return [named[name].detach() for name in parameter_names(model)]


@pytest.fixture(scope="module")
def run():
    return load_run("demo")


def test_all_peers_have_the_same_loss(run):
    """Whatever they have read before, and the model's own loss on these samples."""
    model = build_model(run).eval()
    stream = build_stream(run, peer_seed=5)
    stream.next_batch(7)
    place = stream.state_dict()
    mine, theirs = public_samples(run), public_samples(run, stream)
    assert stream.state_dict() == place
    parameters = parameters_of(model)
    assert mine(parameters) == theirs(parameters) and len(mine) == MOST
    with torch.no_grad():
        plain = model(mine._batch.text, mine._batch.codes).loss.item()
    assert mine(parameters) == pytest.approx(plain, rel=1e-5)
    moved = [parameter + 0.02 * torch.randn_like(parameter) for parameter in parameters]
    assert mine(moved) != mine(parameters) == pytest.approx(plain, rel=1e-5), "nothing is left of the last look"
    stream.close()


def test_a_large_model_is_looked_at_on_few_samples(run):
    assert how_many(run) == MOST and how_many(load_run("dalle-laion")) == FEWEST


def test_data_that_are_not_here_are_no_error(tmp_path):
    emoji = load_run("emoji")
    assert public_samples(emoji) is None
    assert public_samples(with_data(emoji, str(tmp_path / "none.tar"))) is None
