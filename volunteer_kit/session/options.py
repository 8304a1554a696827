"""What a run's file means to the trainer, the device plan and the swarm."""

from __future__ import annotations

from pathlib import Path

import torch

from volunteer_kit.device import Workload
from volunteer_kit.robust.standing import Settings
from volunteer_kit.runs import RunConfig, run_key_of
from volunteer_kit.swarm.codec import CODECS, leaves_out, make_codec
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


def swarm_options(run: RunConfig, max_mbps: float | None = None, left_over: Path | None = None) -> SwarmOptions:
    """The run file's section `swarm`, as the optimizer takes it, and what this machine's line may carry.

    :param left_over: file, of this machine's volunteer
    """
    swarm = run.swarm
    is_low_rank = swarm.grad_compression == "powersgd"
    small = "float16" if leaves_out(CODECS[swarm.small_compression]) else swarm.small_compression  # of a state
    return SwarmOptions(
        run_key=run_key_of(run),
        target_batch_size=run.target_batch_size,
        matchmaking_time=swarm.matchmaking_time,
        averaging_timeout=swarm.averaging_timeout,
        allreduce_timeout=swarm.allreduce_timeout,
        next_chunk_timeout=swarm.allreduce_timeout / 3,  # for a reducer twice as long, and still within the whole
        load_state_timeout=swarm.load_state_timeout,
        average_state_every=swarm.average_state_every,
        delay_optimizer_step=swarm.delay_optimizer_step,
        delay_grad_averaging=swarm.delay_grad_averaging,
        grad_codec=make_codec(
            swarm.small_compression,
            swarm.small_compression if is_low_rank else swarm.grad_compression,
            swarm.compress_above,
            swarm.grad_density,
        ),
        grad_rank=swarm.grad_rank if is_low_rank else None,
        state_codec=make_codec(small, swarm.state_compression, swarm.compress_above),
        verification=Settings(**run.verification.model_dump()) if run.verification else None,
        clips=swarm.aggregation == "centered_clip",
        marks_unused=run.marks_unused,
        refresh_period=min(0.5, swarm.matchmaking_time / 5),
        metadata_expiration=swarm.progress_expiration,
        max_mbps=max_mbps,
        left_over=left_over,
    )
