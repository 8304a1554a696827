"""What a run's file means to the trainer, the device plan and the swarm."""

from __future__ import annotations

import torch

from volunteer_kit.device import Workload
from volunteer_kit.runs import RunConfig, run_key_of
from volunteer_kit.swarm.options import SwarmOptions


def compute_loss(model: torch.nn.Module, batch) -> torch.Tensor:
    """The model's loss on a microbatch, moved to the model's device."""
    device = next(model.parameters()).device
    return model(batch.text.to(device, non_blocking=True), batch.codes.to(device, non_blocking=True)).loss


def workload(run: RunConfig, parameters: int) -> Workload:
    """What one sample of this run costs a device."""
    model = run.model
    logits = model.text_seq_len * (model.num_text_tokens + model.text_seq_len)
    return Workload(
        parameters=parameters,
        tokens=model.text_seq_len + model.image_seq_len,
        dim=model.dim,
        depth=model.depth,
        logits=logits + model.image_seq_len * model.num_image_tokens,
        reversible=model.reversible,
    )


def swarm_options(run: RunConfig) -> SwarmOptions:
    """Build the options of averaging that the run's file sets."""
    swarm = run.swarm
    return SwarmOptions(
        run_key=run_key_of(run),
        target_batch_size=run.target_batch_size,
        allreduce_timeout=swarm.allreduce_timeout,
        delay_optimizer_step=swarm.delay_optimizer_step,
        delay_grad_averaging=swarm.delay_grad_averaging,
        grad_rank=swarm.grad_rank if swarm.grad_compression == "powersgd" else None,
    )
