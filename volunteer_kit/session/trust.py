"""A worker among strangers: which states it believes, and what it signs of others' work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from volunteer_kit.device import largest_batch
from volunteer_kit.public_samples import public_samples
from volunteer_kit.run_optimizers import build_step_bound
from volunteer_kit.runs import RunConfig, build_model, build_param_groups
from volunteer_kit.session.options import swarm_options
from volunteer_kit.swarm.acceptance import PublicLoss, StateTrust
from volunteer_kit.swarm.believed_speed import Speeds
from volunteer_kit.swarm.credit_bounds import Bounds
from volunteer_kit.swarm.receipts import ReceiptBoard, ReceiptWriter
from volunteer_kit.swarm.state_round import ROUNDING

if TYPE_CHECKING:
    from volunteer_kit.session import Session



class Among:
    """In a run with an authority states are checked before they are taken, and each round that we reduced is signed."""

    def __init__(self, session: Session):
        optimizer, dht = session.optimizer, session.peer.dht
        samples = public_samples(session.run, session.stream)  # on the CPU: the GPU is full of what trains
        optimizer.trust_states(state_trust(session, samples))
        board = ReceiptBoard(dht, optimizer.options.run_key)
        bounds = Bounds(
            session.run.target_batch_size,
            optimizer.options.max_samples_per_second,
            microbatch=largest_batch(session.run.target_batch_size),
        )
        account_of = session.peer.admission.account_of
        self._receipts = ReceiptWriter(board, bounds, session.board.fetch, account_of)
        self._speeds = Speeds(bounds, session.board.fetch, account_of)
        optimizer.on_reduced = self._receipts
        optimizer.believe_speeds(self._speeds)

    def close(self) -> None:
        self._receipts.close()
        self._speeds.close()


def state_trust(session: Session, public_loss: PublicLoss | None) -> StateTrust:
    """For SwarmOptimizer.trust_states. Signed states lie beside the identity: two of them, each as large as a state."""

    def tell(peer_id: str, why: str) -> None:
        session.emit("warning", kind="refused", message=f"A model was not taken: {why}. It came from {peer_id}.")

    averages = session.run.swarm.average_state_every > 0
    return StateTrust(
        session.membership.trust,
        swarm_options(session.run).run_key,
        Path(session.membership.identity_path).parent / "states",
        step_bound=build_step_bound(session.run, ROUNDING if averages else 0.0),
        seed=lambda: initial_parameters(session.run),
        public_loss=public_loss,
        on_refused=tell,
    )


def initial_parameters(run: RunConfig) -> list[torch.Tensor]:
    """What every peer of the run begins with, in the optimizer's order."""
    groups = build_param_groups(run, build_model(run))
    return [parameter.detach() for group in groups for parameter in group["params"]]
