"""Is a stranger's newer state to be believed? A pure decision on what was measured, and what it leaves possible.

A joiner stands on ground that the monitor has signed (or, before the first manifest, on the run's seed at epoch 0), a
veteran on its own last state. From there a newer state is taken if all of these hold:

1. It fits and is finite (state.check_state).
2. Each tensor is no farther from the ground than the run's optimizer can have moved it in so many epochs
   (`StateTrust.step_bound`; for LAMB optim/step_bound.py). Without a bound nothing but signed checkpoints is taken.
3. Donors of other accounts, asked after the download, held the same after that epoch: same sketch, same lineage; and
   what they hold now is as near as the epochs since allow, by a sketch whose seed is drawn after the state has come (a
   known seed's sketch can be met by any model: it is 16 linear equations). A
   joiner wants one at least, if there are others further than its own ground, and no larger number of accounts that
   held another thing; who is some epochs away counts, if what it holds now is as near as they allow. A
   veteran some epochs behind wants only the latter: of three who each lost another part of one round nobody could
   confirm anybody, all three would wait for ever, and what one epoch's bound lets through is one step.
4. On samples that everybody can name, the loss has not risen by more than MAX_LOSS_RISE. Asked of who comes from a
   checkpoint or from far behind; for a gap of few epochs the bound says more than a few samples can.

What remains possible. (a) A harmful state inside the bound that hides its harm from the public samples, which the
attacker knows as well, and that an account in league confirms where no honest donor outnumbers them: it is worth
accounts, and it moves a joiner as far as honest steps could have, no farther; the joiner's next round shows it apart
(agreement.py), and it follows the others. (b) A run's first epochs, before a manifest, by the same means. (c) Optimizer
statistics are no part of sketches: they are checked for form only, unless they come signed. False ones turn the
joiner's next steps, by at most a step's size each, until it is apart and follows. (d) A bound grows with the gap, about
exponentially: 1,000 epochs after the last manifest it forbids little, and 3 and 4 carry the weight. Monitors sign every
ten. (e) With no other donor in reach (two peers, one of them the attacker) 3 says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from volunteer_kit.swarm.agreement import FRESH_SIZE, TOLERANCE, Told, distance, read_told
from volunteer_kit.swarm.manifest import MANIFEST_EVERY, Manifest, OpensEnvelopes

# nats. Losses of good states on a few public samples differ by some hundredths from epoch to epoch; a run that learns
# loses 0.15 only when something is broken (the original's loss fell by about as much in its last 2,000 epochs)
MAX_LOSS_RISE = 0.15
LARGE_GAP = MANIFEST_EVERY  # epochs; a veteran that missed more is treated as a joiner
SKETCH_ERROR = 1.25  # a distance is estimated within 15 % (agreement.FRESH_SIZE); the bound itself is of norms nearby
WITNESSES = 8  # donors of other accounts that are asked

Tensors = Sequence[torch.Tensor]
# (parameters of the ground, its epoch, the newer epoch) -> L2 distance that each can have moved
StepBound = Callable[[Tensors, int, int], Sequence[float]]
PublicLoss = Callable[[Tensors], float]  # nats on the run's public samples, parameters in the optimizer's order
FetchFromHub = Callable[[Manifest, int, int], bytes]  # (whose, offset, length) -> bytes of the signed state; may raise


@dataclass(frozen=True)
class StateTrust:
    """What a peer needs to check states; None in its place: donors are believed, as in a run among friends.

    :param authority: opens what the monitor signed (auth.keys.Trust)
    :param run_key: as in SwarmOptions
    :param folder: for signed checkpoints (two of them, each as large as a state) and what must outlast a restart
    :param step_bound: how far the run's optimizer can move a model; None: only signed checkpoints are taken
    :param seed: the run's initial parameters, in the optimizer's order: what who has gone astray before the first
        manifest stands on; None: it waits for that
    :param public_loss: loss on samples that everybody can name; None: not asked
    :param fetch_from_hub: one more source of signed checkpoints
    :param keep_own: put down our own state every MANIFEST_EVERY epochs, and serve it to joiners if it is what was
        signed; costs the disk a state each time
    :param on_refused: told (peer id, why) of each donor that gave what was not to be believed
    """

    authority: OpensEnvelopes
    run_key: str
    folder: Path
    step_bound: StepBound | None = None
    seed: Callable[[], Tensors] | None = None
    public_loss: PublicLoss | None = None
    fetch_from_hub: FetchFromHub | None = None
    keep_own: bool = True
    on_refused: Callable[[str, str], None] = lambda peer_id, why: None


@dataclass(frozen=True)
class Evidence:
    """What was measured of a state.

    :param epoch: its own; `ground`: that of what we stand on
    :param is_veteran: the ground is our own state, by our own steps
    :param moved, bounds: L2 distance of each parameter from the ground, and how large it can be; None: no bound known
    :param confirmed: other accounts that held the same at this epoch
    :param denied: other accounts that held something else at this epoch, or hold what it cannot become, by what it is
    :param silent: other accounts that answered, and were not at this epoch
    :param loss, loss_of_ground: nats on public samples; None: not asked
    """

    epoch: int
    ground: int
    is_veteran: bool = False
    moved: Sequence[float] = ()
    bounds: Sequence[float] | None = None
    confirmed: int = 0
    denied: Sequence[int] = ()
    silent: int = 0
    loss: float | None = None
    loss_of_ground: float | None = None

    @property
    def is_far(self) -> bool:
        return needs_more(self.is_veteran, self.epoch - self.ground)


def needs_more(is_veteran: bool, gap: int) -> bool:
    """Must another account confirm it, and the public loss be looked at?"""
    return not is_veteran or gap > LARGE_GAP


def reason_to_refuse_distance(evidence: Evidence) -> str | None:
    """Rule 2, which costs nobody else anything and is asked first."""
    if evidence.bounds is None:
        return "nothing is known of how far the optimizer can move a model: only signed checkpoints are taken"
    if len(evidence.bounds) != len(evidence.moved):
        return "the bound is of another model"
    for index, (moved, bound) in enumerate(zip(evidence.moved, evidence.bounds, strict=True)):
        if not moved <= bound:  # nor NaN
            epochs = evidence.epoch - evidence.ground
            return f"tensor {index} is {moved:.3g} from where {epochs} epochs can have moved it {bound:.3g} at most"
    return None


def reason_to_refuse_state(evidence: Evidence) -> str | None:
    """Why a state that fits is not taken; None: it is."""
    reason = reason_to_refuse_distance(evidence)
    if reason is not None:
        return reason
    others = max(evidence.denied, default=0)
    if others > evidence.confirmed + 1:  # the donor's own account counts
        return f"{others} other accounts hold another model than that of epoch {evidence.epoch}"
    if evidence.is_far:
        if not evidence.confirmed and (evidence.denied or evidence.silent):
            return f"no other account held this model at epoch {evidence.epoch}"
        return _reason_of_loss(evidence.loss, evidence.loss_of_ground)
    return None


def _reason_of_loss(loss: float | None, ground: float | None) -> str | None:
    if loss is None or ground is None:
        return None
    if not math.isfinite(loss):
        return "its loss on public samples is not finite"
    if math.isfinite(ground) and loss > ground + MAX_LOSS_RISE:
        return f"its loss on public samples is {loss:.3f}, and was {ground:.3f}"
    return None


# --- measuring ---


@dataclass
class Witnesses:
    """What donors of other accounts said."""

    confirmed: int = 0
    denied: list[int] = field(default_factory=list)
    silent: int = 0


@dataclass(frozen=True)
class Testimony:
    """What a donor says: what it held at the epoch (None: it was not there), and the epoch and sketch of what it holds
    now (None: it gave none), with the seed that it was given."""

    told: Told | None
    now: int = 0
    fresh: np.ndarray | None = None


def read_testimony(words: Any) -> Testimony:
    """A stranger's [told, epoch, fresh sketch]."""
    if not isinstance(words, (list, tuple)) or len(words) != 3:
        return Testimony(None)
    now, told = read_told(words[1:2]), read_told(words[0])
    return Testimony(told) if now is None else Testimony(told, now.epoch, _read_fresh(words[2]))


def _read_fresh(values: Any) -> np.ndarray | None:
    if not isinstance(values, bytes) or len(values) != 4 * FRESH_SIZE:
        return None
    numbers = np.frombuffer(values, "<f4").astype(np.float64)
    return numbers if np.isfinite(numbers).all() else None


def is_near(state: np.ndarray, fresh: np.ndarray, moved: float, norm: float) -> bool:
    """May one model have become the other, by sketches of one seed?

    :param moved: L2 distance that all tensors together can have gone in the epochs between; `norm`: of the state
    """
    share = moved / norm if norm > 0 else math.inf
    return distance(state, fresh) <= TOLERANCE + SKETCH_ERROR * share


def hear(
    state: Told,
    said: Mapping[bytes, Told | None],
    contradicting: Sequence[Collection[bytes]] = (),
    near: Collection[bytes] = (),
    close_by: Collection[bytes] = (),
) -> Witnesses:
    """Count accounts.

    :param state: what was downloaded, its sketch made anew from it
    :param said: account -> what it held at that epoch, None: it was not there
    :param contradicting: accounts whose present model this state cannot have become; those of one model together
    :param near: accounts whose present model is as near as the epochs between allow: what anybody says that it held can
        be made to fit, so that nobody else confirms
    :param close_by: those of `near` that are few epochs away
    """
    others: list[tuple[Told, int]] = []
    found, against = Witnesses(), {account for group in contradicting for account in group}
    away: set[bytes] = set()
    for account, told in said.items():
        if told is None or told.epoch != state.epoch or told.sketch is None:
            away.add(account)
            found.confirmed += account in close_by
            found.silent += account not in close_by
        elif told.is_same(state) and account not in against:
            found.confirmed += account in near
            found.silent += account not in near
        else:
            for place, (other, count) in enumerate(others):
                if other.is_same(told):
                    others[place] = (other, count + 1)
                    break
            else:
                others.append((told, 1))
    denied = [count for _, count in others] + [len(away.intersection(group)) for group in contradicting]
    found.denied = sorted(filter(None, denied), reverse=True)
    return found


def distances(ground: Tensors, newer: Tensors) -> list[float]:
    """L2 distance of each pair, in float64, without a copy of a tensor's size."""
    found = []
    for before, after in zip(ground, newer, strict=True):
        total = 0.0
        pairs = zip(before.detach().reshape(-1).split(2**20), after.detach().reshape(-1).split(2**20), strict=True)
        for one, other in pairs:
            total += (one.double() - other.double()).square().sum().item()
        found.append(math.sqrt(total))
    return found


def both_ways(norm: float, ours: float, theirs: float) -> float:
    """How far apart two tensors can be that were one some epochs ago, ours of this norm now.

    :param ours, theirs: how far a tensor of our norm moves in the epochs since; then it was not ours yet: at most
        x = ours / norm smaller or larger, so each bound is off by 1 / (1 - x) at most
    """
    if norm <= 0:
        return ours + theirs
    share = ours / norm
    return float("inf") if share >= 1 else (ours + theirs) / (1 - share)
