"""Sixteen peers in one process, seven of which attack; the network is a dictionary.

An epoch is what it is in a real swarm: progress is told, a leader names the group, everybody computes a gradient of
samples with public names, reducers average it part by part through the real 8-bit codec, and each takes its own
optimizer step. Peers whose averages differ drift apart with stock hivemind, which averages parameters every ten epochs.
With the kit a step that more than half have voted for is everybody's: who was not in its group has its state at the
epoch's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.byzantine_parts.attack import Attack, View
from benchmarks.byzantine_parts.defences import Defence, Sent
from benchmarks.byzantine_parts.digits import State, Task
from benchmarks.byzantine_parts.first_line import EPOCH_SECONDS

PEERS, ATTACKERS = 16, 7
TICKS = 16  # of an epoch, in which a peer computes its batch
STATE_EVERY = 10  # epochs between two rounds in which parameters are averaged
DELAY = 100  # epochs, of attackers that send old gradients; as many as there are, early in a run


@dataclass
class Plan:
    """One run. `attack_from`: epoch; `seed`: of the model, the data and who attacks."""

    attack: Attack
    epochs: int = 160
    attack_from: int = 10
    seed: int = 0


@dataclass
class Result:
    score: float
    ban_all: int | None = None  # epochs from the attack's begin until the last attacker was banned
    banned: int = 0
    false_bans: int = 0
    honest_epochs: int = 0
    honest_strikes: int = 0
    honest_suspensions: int = 0
    mismatch_max: float = 0.0  # of honest contributions; residuals of honest answers
    residual_max: float = 0.0
    said: list[str] = field(default_factory=list)
    curve: list[float] = field(default_factory=list)  # score of the first honest peer after each epoch


class Swarm:
    """All peers. Honest ones are 32-bit and 16-bit by turns, their batches small and large by turns."""

    def __init__(self, task: Task, defence: Defence, plan: Plan):
        self.task, self.defence, self.plan = task, defence, plan
        self._draw = torch.Generator().manual_seed(plan.seed)
        order = torch.randperm(PEERS, generator=self._draw).tolist()
        self.attackers = frozenset(order[:ATTACKERS])
        batches = {peer: task.batches[place % len(task.batches)] for place, peer in enumerate(order[::-1])}
        self.batches = [batches[peer] for peer in range(PEERS)]
        self.states: list[State] = [task.start(plan.seed)] * PEERS
        self.past: list[State] = []  # of the first honest peer, before each epoch
        self.epoch, self.seconds = 0, 0.0  # of the epoch, until the swarm believed that its target was reached
        self.guide = next(peer for peer in range(PEERS) if peer not in self.attackers)
        defence.begin(self)

    def is_bf16(self, peer: int) -> bool:
        return peer % 2 == 1

    @property
    def attacking(self) -> frozenset[int]:
        """Those who attack in this epoch."""
        return self.attackers if self.epoch >= self.plan.attack_from else frozenset()

    def conduct(self, peer: int) -> Attack:
        return self.plan.attack if peer in self.attacking else Attack()

    def run(self) -> Result:
        curve = []
        for epoch in range(self.plan.epochs):
            self.epoch = epoch
            self._one_epoch()
            curve.append(self.task.score(self.states[self.guide].params))
        honest = {id(self.states[p]): self.states[p] for p in range(PEERS) if p not in self.attackers}
        scores = {key: self.task.score(state.params) for key, state in honest.items()}
        mean = sum(scores[id(self.states[p])] for p in range(PEERS) if p not in self.attackers) / (PEERS - ATTACKERS)
        result = self.defence.result(mean)
        result.curve = curve
        return result

    def recompute(self, names: Sequence[int], epoch: int, peer: int) -> torch.Tensor:
        """The mean gradient of named samples on the model as it was before that epoch's step, in a peer's precision."""
        return self.task.gradient(self.past[epoch].params, names, self.is_bf16(peer))

    # --- an epoch ---

    def _one_epoch(self) -> None:
        self.past.append(self.states[self.guide])
        since = self.epoch - self.plan.attack_from
        here = [peer for peer in range(PEERS) if self.conduct(peer).is_here(since)]
        group = tuple(peer for peer in here if peer not in self.defence.left_out())
        shares = self._samples_done(group)
        order = torch.randperm(self.task.samples, generator=self._draw).tolist()
        names = {}
        for peer in range(PEERS):
            names[peer], order = tuple(order[: shares.get(peer, 0)]), order[self.batches[peer] :]
        leader = self.defence.leader(group, int(torch.randint(2**31, (1,), generator=self._draw)))
        told = self.conduct(leader).lists(group, self.attackers)
        for members in self.defence.groups(leader, told):
            self._average(members, names)
        if self.defence.first_line:
            self._follow()
        elif (self.epoch + 1) % STATE_EVERY == 0:
            self._average_states(group)

    def _follow(self) -> None:
        held = [self.states[peer] for peer in range(PEERS) if peer not in self.attackers]
        counts = {id(state): sum(other is state for other in held) for state in held}
        most = max(counts.values())
        own = self.states[self.guide]
        prevailing = own if counts[id(own)] == most else next(state for state in held if counts[id(state)] == most)
        self.states = [prevailing] * PEERS

    def _samples_done(self, group: Sequence[int]) -> dict[int, int]:
        """Samples of each peer when the swarm believes that its target is reached."""
        target = sum(self.batches[peer] for peer in group)
        for tick in range(TICKS + 1):
            done = {peer: self.batches[peer] * tick // TICKS for peer in group}
            claims = {peer: self.conduct(peer).progress(done[peer], sum(self.batches)) for peer in group}
            self.seconds = EPOCH_SECONDS * tick / TICKS
            if self.defence.counted(claims, sum(done.values())) >= target:
                break
        return done

    def _average(self, members: tuple[int, ...], names: dict[int, tuple[int, ...]]) -> None:
        sent = self._sent(members, names)
        averages = self.defence.average(members, sent)
        stepped: dict[tuple[int, int], State] = {}
        for peer, average in averages.items():
            key = (id(self.states[peer]), id(average))
            if key not in stepped:
                stepped[key] = self.task.step(self.states[peer], average, self.epoch)
            self.states[peer] = stepped[key]

    def _sent(self, members: Sequence[int], names: dict[int, tuple[int, ...]]) -> dict[int, Sent]:
        """What each member sends, as it arrives."""
        true = {peer: self._gradient(peer, names[peer]) for peer in members}
        honest = torch.stack([true[peer] for peer in members if peer not in self.attackers])
        sent = {}
        for peer in members:
            conduct = self.conduct(peer)
            vector = true[peer]
            if peer in self.attacking:
                vector = conduct.gradient(self._view(peer, conduct, names[peer], true[peer], honest))
            weight = conduct.weight(len(names[peer]), self.defence.bounds.weight_limit(peer))
            named = names[peer] if not conduct.names_others else self._named(peer, names[peer], int(weight))
            sent[peer] = Sent(vector, named, weight, true[peer])
        return sent

    def _named(self, peer: int, own: tuple[int, ...], wanted: int) -> tuple[int, ...]:
        """As many names of samples as a weight needs, its own and any others."""
        others = [name for name in range(self.task.samples) if name not in set(own)]
        return (own + tuple(others))[:wanted]

    def _gradient(self, peer: int, names: Sequence[int], **how) -> torch.Tensor:
        if not names:
            return torch.zeros(self.task.size)
        return self.task.gradient(self.states[peer].params, names, self.is_bf16(peer), **how)

    def _view(self, peer: int, conduct: Attack, names: Sequence[int], own: torch.Tensor, honest: torch.Tensor) -> View:
        flipped = self._gradient(peer, names, flipped=True) if conduct.needs_flipped else own
        late = own
        if conduct.needs_late and names:
            late = self.task.gradient(self.past[max(0, self.epoch - DELAY)].params, names, self.is_bf16(peer))
        since = self.epoch - self.plan.attack_from
        known = self.defence.known_directions()
        is_trusted = self.defence.is_trusted(peer)
        return View(peer, since, own, flipped, late, honest, self.attackers, known, PEERS, is_trusted)

    def _average_states(self, group: Sequence[int]) -> None:
        states = {peer: self.states[peer].params for peer in group}
        for peer, params in self.defence.average_states(states).items():
            if not torch.equal(params, self.states[peer].params):
                self.states[peer] = State(params, self.states[peer].memory)
