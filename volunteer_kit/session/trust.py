"""Decide which of strangers' states a newcomer believes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from volunteer_kit.public_samples import public_samples
from volunteer_kit.run_optimizers import build_step_bound
from volunteer_kit.swarm.state.plausibility import (
    MAX_GAP,
    Evidence,
    PublicLoss,
    StepBound,
    Tensors,
    distances,
    reason_to_refuse_state,
)

if TYPE_CHECKING:
    from volunteer_kit.session import Session

# (own parameters, their epoch, a stranger's, their epoch) -> why the stranger's are not taken
Judge = Callable[[Tensors, int, Tensors, int], "str | None"]


def judge_of_states(session: Session) -> Judge:
    """As judge_by, for a worker."""
    return judge_by(build_step_bound(session.run), public_samples(session.run, session.stream))


def judge_by(bound: StepBound | None, loss: PublicLoss | None) -> Judge:
    """For a newcomer among nodes. No peer signs states there, so it stands on the run's seed, or its own
    checkpoint."""

    def judge(ground: Tensors, ground_epoch: int, newer: Tensors, epoch: int) -> str | None:
        if epoch - ground_epoch > MAX_GAP:
            return f"it says that it is {epoch - ground_epoch} epochs ahead"
        is_bounded = bound is not None and epoch >= ground_epoch  # an order leads back behind a checkpoint
        evidence = Evidence(
            epoch=epoch,
            ground=ground_epoch,
            moved=distances(ground, newer) if is_bounded else (),
            bounds=bound(ground, ground_epoch, epoch) if is_bounded else (),
            loss=loss(newer) if loss is not None else None,
            loss_of_ground=loss(ground) if loss is not None else None,
        )
        return reason_to_refuse_state(evidence)

    return judge

