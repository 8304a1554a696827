"""A worker's part in a run that verifies: it computes others' samples again, tells its volunteer what is found, and
convicts who cheats."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from volunteer_kit.auth.evidence import CAUSES, MAX_DETAILS
from volunteer_kit.data.errors import NoSuchSample
from volunteer_kit.data.source import SampleName
from volunteer_kit.robust.messages import Event
from volunteer_kit.robust.standing import Strike
from volunteer_kit.runs import run_key_of
from volunteer_kit.session.options import compute_loss
from volunteer_kit.swarm.node.talk import Verdicts
from volunteer_kit.swarm.verification.convictions import ConvictionBoard, round_digest
from volunteer_kit.swarm.verification.convictions import Strike as SignedStrike
from volunteer_kit.swarm.verification.enforcement import Case, ConvictionKeeper

if TYPE_CHECKING:
    from volunteer_kit.session import Session

OURSELVES = {
    "mismatch": "What this machine sent was not what its samples give: {text}. If it comes again, look at the GPU "
    "(heat, overclocking, memory) or restart the machine; nothing else has to be done.",
    "strike": "The others have checked this machine's work: {text}. It is checked each time now. Three such findings "
    "end its stay: restart the machine, and leave out overclocking.",
    "suspended": "This machine's samples are checked before they count: {text}.",
    "trusted": "This machine's work was checked: {text}.",
}
OTHERS = {"strike": "Of {peer}: {text}.", "ban": "{peer} is shut out: it was found cheating {text}."}


class Recomputation:
    """Gradients of anybody's samples, on a model that was: swarm.node.recomputing.Recomputer. The trainer's own model
    is borrowed for a batch at a time."""

    def __init__(self, session: Session, parameters: Sequence[torch.nn.Parameter]):
        self._session, self._own = session, list(parameters)

    def __call__(
        self, names: Sequence[Hashable], parameters: Sequence[torch.Tensor]
    ) -> Iterator[list[torch.Tensor]]:
        trainer, stream = self._session.trainer, self._session.stream
        size = trainer.batch_size
        for first in range(0, len(names), size):
            some = names[first : first + size]
            try:
                batch = stream.fetch([_name(name) for name in some])
            except NoSuchSample:  # nobody can have computed anything from it
                yield [torch.full(p.shape, float("nan")) for p in self._own]
                continue
            yield self._gradients(batch, parameters, len(some))

    def _gradients(self, batch, parameters: Sequence[torch.Tensor], samples: int) -> list[torch.Tensor]:
        trainer, model = self._session.trainer, self._session.model
        scale, present = trainer.loss_scale.value, [p.detach().clone() for p in self._own]
        try:
            self._put(parameters)
            model.zero_grad(set_to_none=True)
            if trainer.compute_gradients is None:
                with trainer.autocast():
                    loss = compute_loss(model, batch)
                (loss * scale).backward()
            else:
                trainer.compute_gradients(model, batch, scale)
            return [p.grad.to("cpu", torch.float32) * (samples / scale) for p in self._own]
        finally:
            model.zero_grad(set_to_none=True)
            self._put(present)

    @torch.no_grad()
    def _put(self, parameters: Sequence[torch.Tensor]) -> None:
        for own, other in zip(self._own, parameters, strict=True):
            own.copy_(other)


def _name(name: Hashable) -> SampleName:
    """Raises NoSuchSample for what no stream has named."""
    if isinstance(name, str):
        try:
            return SampleName.parse(name)
        except ValueError:
            raise NoSuchSample(f"{name!r} is no name of a sample.") from None
    if not isinstance(name, tuple) or len(name) != 3 or any(type(part) is not int or part < 0 for part in name):
        raise NoSuchSample(f"{name!r} is no name of a sample.")
    return SampleName(*name)


class Verification:
    """What follows from each verified round."""

    def __init__(self, session: Session, groups: Sequence[dict]):
        self._session, self._optimizer = session, session.optimizer
        self._own_id, self._admission = session.peer.peer_id, session.peer.admission
        self._banned: dict[PeerID, float] = {}  # by our own verdict, at this DHT time
        self._optimizer.recompute = Recomputation(session, [p for group in groups for p in group["params"]])
        self._optimizer.on_verdicts = self._take
        self._board = ConvictionBoard(session.peer.dht, run_key_of(session.run))
        self._keeper = ConvictionKeeper(
            self._board,
            self._admission,
            session.board.fetch,
            on_convicted=self._on_convicted,
            on_condemned=self._optimizer.tell_admission,
        )

    def close(self) -> None:
        self._keeper.close()

    def _take(self, verdicts: Verdicts) -> None:
        for event in verdicts.events:
            self._tell(event)
        for named, strikes in verdicts.bans:
            peer = peer_of(named)
            self._banned[peer] = get_dht_time()
            self._board.publish(peer, [signed(strike) for strike in strikes])
        for peer in [peer for peer, at in self._banned.items() if self._admission.pardoned_at(peer) > at]:
            del self._banned[peer]
            self._optimizer.forgive(peer.to_base58())

    def _tell(self, event: Event) -> None:
        accused = peer_of(event.peer)
        is_own = accused == self._own_id
        words = (OURSELVES if is_own else OTHERS).get(event.kind)
        if words is not None:
            peer = self._admission.username_of(accused) or str(accused)
            kind = "verification" if is_own else "refused"
            message = f"Epoch {event.epoch}. {words.format(text=event.text, peer=peer)}"
            self._session.emit("warning", kind=kind, message=message)

    def _on_convicted(self, case: Case) -> None:
        if case.accused == self._own_id:
            message = f"The others do not work with this machine any more: {case.in_words()}"
            self._session.emit("warning", kind="verification", message=message)


def peer_of(named: Any) -> PeerID:
    """A peer as a node names it, in base58, or as hivemind does."""
    return PeerID.from_base58(named) if isinstance(named, str) else named


def signed(strike: Strike) -> SignedStrike:
    """As it is told to those who were not there."""
    difference = f", by {strike.measure:.2f} of its length" if strike.measure else ""
    against = f", {strike.votes_against} did not" if strike.votes_against else ""
    agreed = f"{strike.votes_for} of {strike.electors} who had to judge confirmed it{against}"
    return SignedStrike(
        accused=peer_of(strike.peer).to_bytes(),
        epoch=strike.epoch,
        round=round_digest(strike.round_id),
        cause=strike.cause,
        jurors_for=strike.votes_for,
        jurors_against=strike.votes_against,
        group_size=strike.electors,
        details=f"epoch {strike.epoch}: {CAUSES[strike.cause]}{difference}; {agreed}"[:MAX_DETAILS],
    )
