"""Build the parts of a run's node and its optimizer, for every peer: worker, monitor, or one that only asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from volunteer_kit.optim.recipe import parameter_names
from volunteer_kit.runs import RunConfig, build_model, build_optimizer, build_param_groups
from volunteer_kit.session.options import swarm_options
from volunteer_kit.swarm.codecs.registry import make_codec
from volunteer_kit.swarm.node.beside import (
    BESIDE,
    StepBeside,
    beside_of,
    for_checkpoint,
    from_checkpoint,
    vector_with,
)
from volunteer_kit.swarm.rounds.beside import HeldBuffers
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.weighed import WeighedVector, most_weight_of, units_of, weighed_sync
from volunteer_kit.swarm.sync.config import SyncConfig


@dataclass(frozen=True)
class NodeParts:
    """The parts of a run's node, as NodeOptimizer and NodeSpec take them.

    Where members mark unused parameters, the last group has one parameter more, what goes round beside the gradients.

    :param names: of all parameters
    :param vector: where gradients lie with their weights; None: one after another
    :param most_weight, rank: see rounds.layout.Layout
    """

    groups: list[dict[str, Any]]
    names: list[str]
    optimizer: Callable[..., Any]
    scheduler: Callable[[Any], Any]
    vector: WeighedVector | None = None
    most_weight: float = 0.0
    rank: int = 0

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All of them, in the order of the groups."""
        return [parameter for group in self.groups for parameter in group["params"]]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of what is averaged."""
        return self.vector.shapes if self.vector else tuple(tuple(each.shape) for each in self.parameters)

    @property
    def origins(self) -> tuple[int, ...] | None:
        """See rounds.layout.Layout."""
        return self.vector.origins if self.vector else None

    @property
    def ends(self) -> tuple[int, ...]:
        """See rounds.layout.Layout."""
        return self.vector.ends if self.vector else ()

    @property
    def elements(self) -> int:
        """Return the number of elements of the vector that is averaged."""
        return self.vector.elements if self.vector else sum(each.numel() for each in self.parameters)

    @property
    def num_trained(self) -> int:
        """Parameters of the model; they come first."""
        return len(self.names) - (self.vector is not None)

    def for_checkpoint(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A state's tensors, by the names that a run's checkpoints have."""
        return for_checkpoint(tensors, self.num_trained) if self.vector else dict(tensors)

    def from_checkpoint(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A checkpoint's tensors, as the state takes them."""
        return from_checkpoint(tensors, self.num_trained) if self.vector else dict(tensors)


def node_parts(run: RunConfig, model: torch.nn.Module | None = None) -> NodeParts:
    """Those of a peer that trains the run's model, or holds it.

    :param model: the run's; None: it is built
    """
    model = model or build_model(run)
    groups, names = build_param_groups(run, model), parameter_names(model)
    optimizer, scheduler = build_optimizer(run)
    if not run.marks_unused:
        return NodeParts(groups, names, optimizer, scheduler, rank=rank_of(run))

    def beside_groups(given: Sequence[dict[str, Any]]) -> StepBeside:
        *own, last = given
        return StepBeside(optimizer(own), last["params"][0])

    beside = beside_of(len(names), HeldBuffers.of_run(model))
    return NodeParts(
        [*groups, {"params": [beside]}],
        [*names, BESIDE],
        beside_groups,
        lambda keeper: scheduler(keeper.behind),
        vector_with([parameter for group in groups for parameter in group["params"]], beside, rank_of(run)),
        most_weight_of(run.model.max_length),
        rank_of(run),
    )


def units_per_sample(run: RunConfig) -> float:
    """Return how many units the run's nodes count for one sample."""
    return units_of(run.target_batch_size) / run.target_batch_size if run.marks_unused else 1.0


def sync_settings(run: RunConfig) -> dict[str, Any]:
    """Return the fields of SyncConfig that a run sets. The device computes while a round runs, where a Trainer may not
    have asked for something else."""
    if run.marks_unused:
        return weighed_sync(swarm_options(run), run.swarm.max_staleness)
    return {
        "target_batch_size": run.target_batch_size,
        "max_staleness": run.swarm.max_staleness,
        "overlap": True,
        "exchange_ceiling": run.swarm.allreduce_timeout,
    }


def codec_of(run: RunConfig) -> tuple[str, str, int, float]:
    """See NodeSpec."""
    swarm = run.swarm
    large = swarm.small_compression if rank_of(run) else swarm.grad_compression
    return swarm.small_compression, large, swarm.compress_above, swarm.grad_density


def rank_of(run: RunConfig) -> int:
    """Return the rank of the factors that gradients travel as; 0: they travel as they are."""
    return run.swarm.grad_rank if run.swarm.grad_compression == "powersgd" else 0


def layout_of(run: RunConfig, parts: NodeParts) -> Layout:
    """Return how the run's vector is cut at its first step."""
    codec = make_codec(*codec_of(run))
    return Layout(parts.shapes, SyncConfig.cells, codec, parts.origins, parts.most_weight, parts.rank, parts.ends)
