"""8-bit LAMB's statistics on their way: to a late joiner, through codecs, from strangers, into a checkpoint."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.test_lamb8bit import make_model, random_steps
from tests.test_optim import flat
from volunteer_kit.checkpoint import load_checkpoint, save_checkpoint
from volunteer_kit.optim import Lamb8bit, OptimizerConfig, build_optimizer_factory, param_groups


def make_averager(peer, seed: int):
    """The averager of a run with 8-bit statistics, as SwarmOptimizer builds it, with the original run's codecs."""
    from volunteer_kit.swarm.codec import make_codec
    from volunteer_kit.swarm.state import SwarmStateAverager

    optimizer, scheduler = build_optimizer_factory(OptimizerConfig(lr=0.01, warmup_epochs=2, total_epochs=100))
    return SwarmStateAverager(
        dht=peer.dht, prefix="lamb8bit", params=param_groups(make_model(seed), 0.045), optimizer=optimizer,
        scheduler=scheduler, offload_optimizer=True, custom_gradients=True, client_mode=False,
        state_compression=make_codec("float16", "uniform8", 65_536), declare_state_period=5.0,
        min_matchmaking_time=1.0, next_chunk_timeout=10.0, start=False,
    )  # fmt: skip


def test_a_late_joiner_equals_its_donor_to_the_last_bit(peer):
    from hivemind.compression import NoCompression, deserialize_torch_tensor
    from hivemind.proto import runtime_pb2

    from volunteer_kit.swarm.state import digest

    donor, own = make_averager(peer, 0), make_averager(peer, 1)
    assert type(donor.optimizer) is Lamb8bit, "with offload_optimizer the statistics are of the copies on the CPU"
    random_steps(donor.optimizer, 3)
    metadata, tensors, infos = donor.get_current_state()
    assert sum(tensor.dtype == torch.uint8 for tensor in tensors) == 6
    codec = NoCompression()  # SwarmOptimizer's load_state_compression
    sent = [codec.compress(tensor, info).SerializeToString() for tensor, info in zip(tensors, infos, strict=True)]
    received = [deserialize_torch_tensor(runtime_pb2.Tensor.FromString(message)) for message in sent]
    own.check_state(metadata, received)
    own.adopt_state(metadata, received)
    assert digest(own.state_tensors()) == digest(donor.state_tensors())
    for averager in (donor, own):
        random_steps(averager.optimizer, 2, seed=50)
    assert digest(own.state_tensors()) == digest(donor.state_tensors()), "and stays equal"


@pytest.mark.parametrize("small", ["none", "float16", "uniform8", "blockwise8"])
@pytest.mark.parametrize("large", ["none", "float16", "uniform8", "blockwise8"])
def test_codes_pass_every_codec_untouched(small, large):
    from hivemind.compression import CompressionInfo, deserialize_torch_tensor

    from volunteer_kit.swarm.codec import make_codec

    codec = make_codec(small, large, 1000)
    for size in (100, 70_000):
        codes = torch.randint(0, 256, (size,), dtype=torch.uint8)
        message = codec.compress(codes, CompressionInfo.from_tensor(codes))
        assert torch.equal(deserialize_torch_tensor(message), codes)


@pytest.mark.parametrize("name", ["exp_avg_absmax", "exp_avg_sq_absmax", "exp_avg_sq"])
@pytest.mark.parametrize("value", [math.nan, -1e-9])
def test_a_strangers_impossible_statistics_are_refused(peer, name, value):
    from volunteer_kit.swarm.state import StateRefused

    donor, own = make_averager(peer, 0), make_averager(peer, 1)
    random_steps(donor.optimizer, 1)
    metadata, tensors, _ = donor.get_current_state()
    names = [key for _, key, statistic in donor._statistics() if torch.is_tensor(statistic)]
    keys = [None] * (len(tensors) - len(names)) + names
    index = next(i for i, key in enumerate(keys) if key == name and tensors[i].is_floating_point())
    own.check_state(metadata, tensors)
    tensors[index].view(-1)[-1] = value
    with pytest.raises(StateRefused):
        own.check_state(metadata, tensors)


def test_a_checkpoint_brings_everything_back(peer, tmp_path):
    donor = make_averager(peer, 0)
    random_steps(donor.optimizer, 2)
    names = [name for name, _ in make_model().named_parameters()]
    tensors = dict(zip([*names, *donor.statistic_keys(names)], donor.get_current_state()[1], strict=True))
    loaded = load_checkpoint(save_checkpoint(tmp_path, tensors, {"epoch": 3}), finite=True)
    assert loaded.tensors.keys() == tensors.keys()
    assert all(torch.equal(loaded.tensors[key], tensors[key]) for key in tensors)
    assert all(loaded.tensors[key].dtype == tensors[key].dtype for key in tensors)


def test_steps_from_a_background_thread():
    """hivemind's delayed step runs in an executor of its own, beside the training."""
    params = [make_model(0), make_model(0)]
    optimizers = [Lamb8bit(model.parameters()) for model in params]
    random_steps(optimizers[0], 2)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(random_steps, optimizers[1], 2).result()
    assert flat(optimizers[0].state_dict()) == flat(optimizers[1].state_dict())
