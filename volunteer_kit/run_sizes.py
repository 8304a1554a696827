"""How large a run is: what its model learns, what travels in a step, and what a newcomer downloads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from volunteer_kit.runs import RunConfig


def parameters_of(config: RunConfig) -> int:
    """How many numbers the run's model learns; takes no memory."""
    return config.model.parameters if config.draws else sum(map(math.prod, _learnt(config)))


def _learnt(config: RunConfig) -> list[torch.Size]:
    import torch

    from volunteer_kit.model.dalle import Dalle
    from volunteer_kit.model.transformers_model import shapes_of

    with torch.device("meta"):
        model = Dalle(config.model) if config.draws else shapes_of(config.model)
    return [parameter.shape for parameter in model.parameters() if parameter.requires_grad]


def state_bytes(config: RunConfig) -> int:
    """What a newcomer downloads: parameters in fp32, and the optimizer's two statistics of each; with local steps the
    outer one's momentum."""
    if config.swarm.local_steps is not None:
        return parameters_of(config) * 8
    return parameters_of(config) * (4 + config.optimizer.statistics_bits // 4)


def step_bytes(config: RunConfig) -> int:
    """What one global step sends and receives, about: gradients there and their average back."""
    if config.swarm.grad_compression == "powersgd":
        from volunteer_kit.swarm.codecs.low_rank import values_each_round

        values = values_each_round(_learnt(config), config.swarm.grad_rank)
        return math.ceil(2 * values * (4 if config.swarm.small_compression == "none" else 2))
    if config.swarm.grad_compression == "sparse":
        from volunteer_kit.swarm.codecs.topk import bits_per_value

        return math.ceil(2 * parameters_of(config) * bits_per_value(config.swarm.grad_density) / 8)
    bytes_each = {"none": 4, "float16": 2, "uniform4": 0.5, "blockwise4": 0.5}
    return math.ceil(2 * parameters_of(config) * bytes_each.get(config.swarm.grad_compression, 1))


def least_mbps(config: RunConfig) -> float:
    """Mbit/s each way without which a round fails, for all its members: it ends when gradients take too long."""
    return step_bytes(config) / 2 * 8e-6 / config.swarm.allreduce_timeout
