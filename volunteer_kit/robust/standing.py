"""What a peer remembers of the others' honesty: whose work enters, who is on probation, who is banned, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from math import comb
from typing import Literal

Peer = Hashable
Cause = Literal["gradient", "false_report", "reducer", "statement", "false_accusation", "equivocation", "silence"]
CAUSES: dict[str, str] = {  # the words of auth/evidence.py, which this room cannot see
    "gradient": "what it sent is not what its samples give",
    "false_report": "what it reported of another's samples was wrong",
    "reducer": "the average that it made is not the one that the rule gives",
    "statement": "what it said of its parts is not what it sent",
    "false_accusation": "it accused somebody who had done nothing wrong",
    "equivocation": "it told different members different things",
    "silence": "it falls silent when its work is looked at, and hardly when it is not",
}
MAX_REMEMBERED = 10_000  # peers
# that a line which breaks at random is silent so often just when its work is looked at: three times of three at 1 in 16
SILENCE_CHANCE = 1e-3
MAX_SILENCES = 100  # of one peer


@dataclass(frozen=True)
class Settings:
    """Of verified averaging, equal on all members.

    :param share: chance that a member's contribution to a round is computed again. Raise it in small runs, where
        1 in 16 comes round rarely; the work of all is that much more
    :param tolerance: difference, as a share of a contribution's length, that precision and codec explain. Raise it when
        honest members are told of differences just above it
    :param strikes: mismatches confirmed by the group within `window` epochs that are a ban
    :param probation: microbatches of a newcomer, or of who has lost trust, that must be found right before what it
        sends counts. 0: newcomers count at once
    :param sums: numbers of a sketch
    :param bad_share: of the members that a jury must be safe from
    :param patience: rounds after which a question that was not answered is closed
    """

    share: float = 1 / 16
    tolerance: float = 0.2
    strikes: int = 3
    window: int = 1000
    probation: int = 8
    sums: int = 8
    bad_share: float = 7 / 16
    patience: int = 4


@dataclass(frozen=True)
class Strike:
    """A mismatch that more than half of those who had to judge confirmed.

    :param round_id: of the round in which it was done, at `epoch`
    :param measure: the difference as a share of the contribution's length, where there is one
    """

    peer: Peer
    epoch: int
    round_id: bytes
    cause: Cause
    votes_for: int
    votes_against: int
    electors: int
    measure: float = 0.0


class Standing:
    """By peer. Trusted are those whose work enters the average; in the first round that we see, everybody is."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._strikes: dict[Peer, list[Strike]] = defaultdict(list)
        self._proven: dict[Peer, int] = {}  # microbatches found right since trust began or was lost
        self._lost: dict[Peer, int] = defaultdict(int)  # times that it was suspended
        self._owed: dict[Peer, float] = defaultdict(float)  # samples found right that did not enter
        self._trusted: dict[Peer, None] = {}
        self._attending: dict[Peer, int] = {}  # who lost trust and trains nothing -> whole rounds since
        self._silences: dict[Peer, list[tuple[int, bool, float]]] = {}  # epoch; was its work drawn? with which chance?
        self.is_new = True  # have we seen no round yet?

    def is_trusted(self, peer: Peer) -> bool:
        return peer in self._trusted and not self.is_banned(peer)

    def is_banned(self, peer: Peer) -> bool:
        return len(self._recent(peer)) >= self.settings.strikes

    def strikes_of(self, peer: Peer) -> list[Strike]:
        return list(self._strikes.get(peer, ()))

    def banned(self) -> list[Peer]:
        return [peer for peer in self._strikes if self.is_banned(peer)]

    def meet(self, group: Iterable[Peer], trusted: Collection[Peer]) -> None:
        """A round begins. Who comes new takes the others' word for whom to trust; without probation all are."""
        if self.is_new:
            self._trusted.update(dict.fromkeys(trusted))
            self.is_new = False
        elif not self.settings.probation:
            new = (peer for peer in group if peer not in self._proven and peer not in self._strikes)
            self._trusted.update(dict.fromkeys(new))
        for memory in (self._trusted, self._proven, self._silences):
            while len(memory) > MAX_REMEMBERED:
                memory.pop(next(iter(memory)))

    def suspend(self, peer: Peer) -> None:
        """It did not answer, or is at fault: what it sends counts again once it was found right. Each time it takes
        twice as much for that; as much again, found right while it was trusted, and that time is forgotten."""
        if self._trusted.pop(peer, self) is None:
            self._lost[peer] += 1
            self._attending[peer] = 0
        elif peer in self._attending:
            self._attending[peer] = 0
        self._proven[peer] = 0

    def fell_silent(self, peer: Peer, epoch: int, looked_at: bool, share: float) -> bool:
        """It had promised a contribution that entered, and said nothing more. Lines break, but they do not know whose
        work was drawn.

        :param looked_at: was it drawn by chance? :param share: the chance that it had
        :returns: is it too often for a line that breaks?
        """
        known = [one for one in self._silences.get(peer, ()) if epoch - one[0] < self.settings.window]
        self._silences[peer] = known = [*known, (epoch, looked_at, share)][-MAX_SILENCES:]
        n, k, share = len(known), sum(looked for _, looked, _ in known), max(share for _, _, share in known)
        chance = sum(comb(n, i) * share**i * (1 - share) ** (n - i) for i in range(k, n + 1))
        return chance < SILENCE_CHANCE

    def attended(self, peer: Peer, trains: bool) -> None:
        """It went through a whole round. Who trains nothing, as a monitor, has no samples that could be found right; it
        was trusted before, and reduces again after as many rounds as there are microbatches to prove otherwise."""
        if trains or self._strikes.get(peer):
            self._attending.pop(peer, None)
        if peer in self._attending:
            self._attending[peer] += 1
            if self._attending[peer] >= self._needed(peer):
                del self._attending[peer]
                self._trusted[peer] = None

    def _needed(self, peer: Peer) -> int:
        return self.settings.probation << min(10, max(0, self._lost.get(peer, 0) - 1))

    def found_right(self, peer: Peer, microbatches: int, samples: float) -> float:
        """What it sent is what its samples give. How many microbatches they came in it says itself: no look proves more
        than half of what a newcomer needs.

        :returns: samples that are to be credited now: those of its probation, when it ends
        """
        proven = min(microbatches, max(1, self.settings.probation // 2))
        self._proven[peer] = self._proven.get(peer, 0) + proven
        if self.is_banned(peer):
            return 0.0
        is_proven = self._proven[peer] >= self._needed(peer)
        if self.is_trusted(peer):
            if is_proven and self._lost.get(peer):
                self._lost[peer] -= 1
                self._proven[peer] = 0
            return 0.0
        self._owed[peer] += samples
        if not is_proven:
            return 0.0
        self._trusted[peer], self._proven[peer] = None, 0
        return self._owed.pop(peer)

    def strike(self, strike: Strike) -> bool:
        """:returns: False if this round's was counted before"""
        if any(known.round_id == strike.round_id for known in self._strikes[strike.peer]):
            return False
        self._strikes[strike.peer].append(strike)
        self._owed.pop(strike.peer, None)
        if strike.cause == "silence":
            self._silences.pop(strike.peer, None)
        self.suspend(strike.peer)
        return True

    def forgive(self, peer: Peer) -> None:
        """A moderator has looked at it."""
        self._strikes.pop(peer, None)

    def _recent(self, peer: Peer) -> list[Strike]:
        strikes = self._strikes.get(peer, [])
        latest = max((strike.epoch for strike in strikes), default=0)
        return [strike for strike in strikes if latest - strike.epoch < self.settings.window]
