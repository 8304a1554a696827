"""What a peer stands on when it judges another's state: a checkpoint that the monitor signed, or its own last steps.

The measuring and asking for acceptance.py.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError  # not the built-in one on Python 3.10
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture
from hivemind.utils.logging import get_logger

from volunteer_kit.swarm.acceptance import (
    WITNESSES,
    Evidence,
    StateTrust,
    Testimony,
    Witnesses,
    both_ways,
    distances,
    hear,
    is_near,
    needs_more,
    read_testimony,
    reason_to_refuse_distance,
    reason_to_refuse_state,
)
from volunteer_kit.swarm.agreement import Told, fresh_sketch, sketch
from volunteer_kit.swarm.codec_wire import FLOAT32
from volunteer_kit.swarm.manifest import MANIFEST_EVERY
from volunteer_kit.swarm.transfer import StateRefused, StateTransfer

logger = get_logger(__name__)
# epochs that a veteran may have gone astray before it is told: its own steps of that time, and the others', lie between
ASTRAY = 2
MAX_GAP = 100_000  # epochs; a bound is a loop over them, and the original's run had 7,617 in all
DISTRUSTED_FOR = 30.0  # s; by then an honest donor that was set apart itself has followed the others
WITNESSES_WITHIN = 15.0  # s


@dataclass(frozen=True)
class Ground:
    """What a newer state is compared with."""

    epoch: int
    parameters: Sequence[torch.Tensor]
    is_veteran: bool


class GroundedState(StateTransfer):
    """Judges donors' states. Without `trust` it believes everybody, as among friends."""

    trust: StateTrust | None = None
    refused: tuple[str, str] | None = None  # the last donor that was not believed, and why
    later_order = False  # a donor is under an order that we have not heard of: it is time to look for it
    refused_for_distance = 0  # times since we last took or made a step

    def __init__(self, *args, **kwargs):
        self._distrusted: dict[bytes, float] = {}  # donor -> until
        self._is_veteran = False
        self._kept_ground: tuple[int, list[torch.Tensor]] | None = None
        self._ground_loss: tuple[Any, float] | None = None
        super().__init__(*args, **kwargs)

    def trust_only(self, trust: StateTrust) -> None:
        """From now on, what is signed, and what bears comparison with it. Call before the first state is taken."""
        self.trust = trust
        trust.folder.mkdir(parents=True, exist_ok=True)
        self._outer_pipe.send(("_serve_chunks", [str(trust.folder)], {}))
        self.describe()

    # --- what we stand on ---

    @property
    def _own_parameters(self) -> list[torch.Tensor]:
        """That the optimizer moves. Nothing bounds how far buffers move beside them; a joiner's go with its next round
        or, if they are not the others', with the state that it takes then."""
        return self.state_tensors()[: self.num_parameters - len(self.extra_tensors)]

    def _ground(self) -> Ground:
        epoch, parameters = self._kept_ground or (self._state_epoch, self._own_parameters)
        return Ground(epoch, parameters, self._is_veteran)

    def keep_ground(self) -> None:
        """Before parameters are taken whose statistics have not come: if they do not, it is the ground again. Else a
        row of donors that break off could each lead us a bit farther."""
        if self.trust is not None and self._kept_ground is None:
            self._kept_ground = (self._state_epoch, [tensor.clone() for tensor in self._own_parameters])

    def ground_is_own(self, is_veteran: bool = True) -> None:
        """What we hold now is whole, and is what we stand on."""
        self._is_veteran, self._kept_ground, self.refused_for_distance = is_veteran, None, 0

    def stand_on_seed(self) -> bool:
        """Compare what comes with the run's initial weights, as a joiner before the first manifest does.

        :returns: False if nobody can tell them
        """
        if self.trust is None or self.trust.seed is None:
            return False
        self._kept_ground, self._is_veteran = (0, [tensor.detach().cpu() for tensor in self.trust.seed()]), False
        self._distrusted.clear()
        self.refused_for_distance = 0
        return True

    # --- a donor's state ---

    def not_believed(self) -> list[bytes]:
        """Donors that are not asked for now."""
        now = time.monotonic()
        self._distrusted = {donor: until for donor, until in self._distrusted.items() if until > now}
        return list(self._distrusted)

    def judge(self, donor: bytes, metadata: dict, parameters: Sequence[torch.Tensor]) -> None:
        """Raises StateRefused unless a state that fits is to be believed."""
        if self.trust is None:
            return
        order = metadata.get("order", 0)
        if order != self.obeyed:
            self.later_order = self.later_order or order > self.obeyed
            raise StateRefused(f"it is under the monitor's order {order}, we are under {self.obeyed}")
        reason = self._reason_to_refuse(donor, metadata, parameters)
        if reason is not None:
            self.refuse(donor, reason)
            raise StateRefused(reason)

    def refuse(self, donor: bytes, why: str) -> None:
        """Remember, and tell."""
        self._distrusted[donor] = time.monotonic() + DISTRUSTED_FOR
        self.refused = (str(PeerID(donor)), why)
        logger.warning(f"The state of {PeerID(donor)} is not believed: {why}")
        self.trust.on_refused(*self.refused)

    def _reason_to_refuse(self, donor: bytes, metadata: dict, parameters: Sequence[torch.Tensor]) -> str | None:
        epoch, ground = metadata["epoch"], self._ground()
        if epoch - ground.epoch > MAX_GAP:
            return f"it says that it is {epoch - ground.epoch} epochs ahead"
        measured = {
            "epoch": epoch,
            "ground": ground.epoch,
            "is_veteran": ground.is_veteran,
            "moved": distances(ground.parameters, parameters[: len(ground.parameters)]),
            "bounds": self._bounds(ground, epoch),
        }
        reason = reason_to_refuse_distance(Evidence(**measured))
        if reason is not None:
            self.refused_for_distance += 1
            return reason
        heard = self._hear_witnesses(donor, metadata, parameters, ground)
        measured |= {"confirmed": heard.confirmed, "denied": heard.denied, "silent": heard.silent}
        reason = reason_to_refuse_state(Evidence(**measured))
        if reason is not None or not needs_more(ground.is_veteran, epoch - ground.epoch):
            return reason
        return reason_to_refuse_state(
            Evidence(**measured, **self._losses(ground, parameters[: len(ground.parameters)]))
        )

    def _bounds(self, ground: Ground, epoch: int, astray: int = ASTRAY) -> Sequence[float] | None:
        """:param astray: epochs before the earlier one in which both may have taken steps of their own"""
        bound = self.trust.step_bound
        if bound is None:
            return None
        if not ground.is_veteran:
            return bound(ground.parameters, ground.epoch, epoch)
        since = max(0, min(ground.epoch, epoch) - astray)
        norms = [torch.linalg.vector_norm(p, dtype=torch.float64).item() for p in ground.parameters]
        ours, theirs = bound(ground.parameters, since, ground.epoch), bound(ground.parameters, since, epoch)
        # where all was zero then, as biases are at first, each of us has taken his own first step
        zeros = [torch.zeros((), **FLOAT32).expand(p.shape) for p in ground.parameters]
        own_first, their_first = bound(zeros, since, ground.epoch), bound(zeros, since, epoch)
        far = [both_ways(*of_one) for of_one in zip(norms, ours, theirs, strict=True)]
        return [
            max(apart, norm + theirs) if norm <= ours else apart
            for apart, norm, ours, theirs in zip(far, norms, own_first, their_first, strict=True)
        ]

    def _losses(self, ground: Ground, parameters: Sequence[torch.Tensor]) -> dict[str, float]:
        if self.trust.public_loss is None:
            return {}
        key = (ground.epoch, self.obeyed, ground.is_veteran)
        if self._ground_loss is None or self._ground_loss[0] != key:
            self._ground_loss = (key, self.trust.public_loss(ground.parameters))
        return {"loss": self.trust.public_loss(parameters), "loss_of_ground": self._ground_loss[1]}

    def _hear_witnesses(
        self, donor: bytes, metadata: dict, parameters: Sequence[torch.Tensor], ground: Ground
    ) -> Witnesses:
        """Ask donors of other accounts what they held; those whose account is not known yet show it when called. Who is
        no further than our ground is as new as we are: two newcomers would else wait for each other for ever."""
        epoch, account_of = metadata["epoch"], self._admission.account_of
        seed = random.SystemRandom().getrandbits(63)
        own_sketch = np.frombuffer(sketch(parameters, seed=epoch), "<f4").astype(np.float64)
        state = Told(epoch, own_sketch, bytes.fromhex(metadata["lineage"]), metadata.get("order", 0))
        donors_account = account_of(PeerID(donor))
        others = [peer for peer in self.declared() if account_of(peer) is None or account_of(peer) != donors_account]
        asked = [peer.to_bytes() for peer in random.sample(others, min(len(others), 2 * WITNESSES))]
        answers: MPFuture = MPFuture()
        self._outer_pipe.send(("_ask_witnesses", [asked, epoch, seed, answers], {}))
        try:
            found = answers.result(WITNESSES_WITHIN) if asked else []
        except FutureTimeoutError:
            answers.cancel()
            found = []
        said: dict[bytes, Testimony] = {}
        for peer, words in found:
            account = account_of(PeerID(peer))
            testimony = read_testimony(words)
            is_new = testimony.told is None and testimony.now <= ground.epoch
            if account is not None and account != donors_account and not is_new:
                said.setdefault(account, testimony)
        contradicting = self._contradicting(parameters[: len(ground.parameters)], epoch, seed, said)
        against = {account for group in contradicting for account in group}
        near = [account for account, one in said.items() if one.fresh is not None and account not in against]
        close_by = [account for account in near if abs(said[account].now - epoch) <= MANIFEST_EVERY]
        return hear(state, {account: one.told for account, one in said.items()}, contradicting, near, close_by)

    def _contradicting(
        self, parameters: Sequence[torch.Tensor], epoch: int, seed: int, said: dict[bytes, Testimony]
    ) -> list[list[bytes]]:
        """Accounts whose present model is too far from what these parameters can have become, by models."""
        if all(one.fresh is None for one in said.values()):
            return []
        own = np.frombuffer(fresh_sketch(parameters, seed), "<f4").astype(np.float64)
        norm = math.hypot(*(torch.linalg.vector_norm(p, dtype=torch.float64).item() for p in parameters))
        found: list[tuple[Testimony, list[bytes]]] = []
        for account, one in said.items():
            if one.fresh is None or abs(one.now - epoch) > MAX_GAP:
                continue
            moved = math.hypot(*self.trust.step_bound(parameters, *sorted((epoch, one.now))))
            if is_near(own, one.fresh, moved, norm):
                continue
            here = ((first.fresh, group) for first, group in found if first.now == one.now)
            group = next((group for fresh, group in here if is_near(fresh, one.fresh, 0.0, norm)), None)
            if group is None:
                found.append((one, [account]))
            else:
                group.append(account)
        return [group for _, group in found]
