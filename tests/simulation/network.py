"""The network between peers: latency, loss, reordering, duplicates, cuts, and peers that only call out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tests.simulation.clock import Clock
from volunteer_kit.swarm.sync.messages import Items, Message, Promise, Propose, Vote

DECIDING = (Vote, Promise, Propose, Items)  # what a nasty network delays, loses, or crashes somebody upon
MEGABIT = 125_000  # bytes


class Line(NamedTuple):
    """A peer's line to everybody else."""

    latency: float  # s, one way
    uplink: float  # Mbit/s
    public: bool  # others can call it


class Trouble(NamedTuple):
    """A bad time for the whole network; probabilities are per message."""

    loss: float = 0.0  # lost, or late until the line is back
    duplicates: float = 0.0
    deciding: float = 0.0  # votes, promises and proposals: late by 0.2 to 12 s, lost, or a crash


CALM = Trouble()


class Network:
    """Carries messages, and says how long a transfer takes.

    Messages overtake each other: each has a delay of its own, as on streams of their own.

    :param deliver: called with (sender, receiver, message) when one arrives
    :param crash: called with a peer that dies upon a message
    """

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        deliver: Callable[[str, str, Message], None],
        crash: Callable[[str], None],
    ):
        self.lines: dict[str, Line] = {}
        self.slowed: dict[str, float] = {}  # a peer's line is slower by this factor
        self.stalled: dict[str, float] = {}  # nothing leaves a peer before this time, s
        self.trouble = CALM
        self.sent = 0
        self._clock = clock
        self._random = rng.random
        self._deliver = deliver
        self._crash = crash
        self._cuts: dict[tuple[str, str], int] = {}  # (from, to) -> how many faults cut it
        self._open: set[tuple[str, str]] = set()  # (client, public peer): a connection that the client opened

    def cut(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Nothing comes through in these directions."""
        for pair in pairs:
            self._cuts[pair] = self._cuts.get(pair, 0) + 1

    def mend(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Undo one `cut` of these directions."""
        for pair in pairs:
            if self._cuts[pair] == 1:
                del self._cuts[pair]
            else:
                self._cuts[pair] -= 1

    def connect(self, sender: str, to: str) -> None:
        """A client opens a connection to a public peer, over which it can be called back."""
        lines = self.lines
        if lines[to].public and not lines[sender].public and (sender, to) not in self._cuts:
            self._open.add((sender, to))

    def disconnect(self, peer: str) -> None:
        """A process ended, and with it its connections."""
        for pair in sorted(pair for pair in self._open if peer in pair):
            self._open.discard(pair)

    def is_cut(self, sender: str, to: str) -> bool:
        """Whether nothing comes through now."""
        return (sender, to) in self._cuts

    def can_call(self, sender: str, to: str) -> bool:
        """Whether the sender finds a way to the other one, if no line is cut."""
        lines = self.lines
        if lines[to].public:
            return True
        return lines[sender].public and (to, sender) in self._open

    def reaches(self, sender: str, to: str) -> bool:
        """Whether something that is sent now arrives."""
        return (sender, to) not in self._cuts and self.can_call(sender, to)

    def latency(self, sender: str, to: str) -> float:
        """Seconds of one small message, drawn anew for each."""
        lines = self.lines
        base = lines[sender].latency + lines[to].latency
        drawn = self._random()
        if drawn > 0.97:
            base *= 1 + 200 * (drawn - 0.97)  # up to 7 times
        return base * (0.8 + 0.4 * self._random()) * self.slowed.get(sender, 1.0)

    def seconds(self, sender: str, size: float) -> float:
        """How long the sender's line needs for so many bytes."""
        return size / (MEGABIT * self.lines[sender].uplink) * self.slowed.get(sender, 1.0)

    def send(self, sender: str, to: str, message: Message) -> None:
        """Carry a message, if fate wills it."""
        lines = self.lines
        if to not in lines:
            return
        if not lines[to].public:
            if not lines[sender].public or (to, sender) not in self._open:
                return
        elif not lines[sender].public and (sender, to) not in self._cuts:
            self._open.add((sender, to))
        self.sent += 1
        delay = self.latency(sender, to)
        if sender in self.stalled:
            delay += max(0.0, self.stalled[sender] - self._clock.now)
        if (sender, to) in self._cuts:
            if self._random() < 0.5:
                return
            self._clock.after(delay + 4 * self._random(), self._late, sender, to, message, 3)
            return
        trouble = self.trouble
        if trouble is not CALM:
            drawn = self._random()
            if trouble.deciding and isinstance(message.body, DECIDING) and drawn < trouble.deciding:
                drawn /= trouble.deciding  # anew between 0 and 1
                if drawn < 0.12:
                    self._clock.after(0.0, self._crash, sender)
                elif drawn < 0.24:
                    self._clock.after(delay, self._crash, to)
                elif drawn < 0.4:
                    return
                elif drawn < 0.5:
                    self._clock.after(0.0, self._crash, sender)
                    return
                else:
                    delay += 0.2 + 11.8 * self._random() ** 2
            elif drawn > 1 - trouble.loss:
                if self._random() < 0.5:
                    return
                delay += 1 + 5 * self._random()
            if trouble.duplicates and self._random() < trouble.duplicates:
                self._clock.after(delay + 3 * self._random(), self._deliver, sender, to, message)
        self._clock.after(delay, self._deliver, sender, to, message)

    def _late(self, sender: str, to: str, message: Message, tries: int) -> None:
        """A message that waits until its line is back."""
        if not self.is_cut(sender, to):
            self._deliver(sender, to, message)
        elif tries:
            self._clock.after(4.0, self._late, sender, to, message, tries - 1)
