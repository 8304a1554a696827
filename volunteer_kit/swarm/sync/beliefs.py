"""How many samples of an account are believed: a token bucket.

An account earns what its devices can compute in the time since an entry last held something of it, at most
`max_staleness` epochs. Each voter measures with its own clock, so a voter allows more than a leader does.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Final

from volunteer_kit.swarm.sync.contributions import Share
from volunteer_kit.swarm.sync.log import Entry, Member

LEADER_SLACK: Final = 1.5  # times what the account earned; speeds vary from minute to minute
VOTER_SLACK: Final = 3.0  # commits reach voters at other moments
BURST_EPOCHS: Final = 0.5  # earned at once: a microbatch ends at any moment


class Beliefs:
    """What each account may bring."""

    def __init__(self, max_staleness: int):
        self._max_staleness = max_staleness
        self._speeds: dict[str, tuple[str, float]] = {}  # peer -> account, samples/s
        self._last: dict[str, float] = {}  # account -> when an entry last held something of it

    def saw(self, member: Member, speed: float) -> None:
        """A record says that this peer's device does `speed` samples per second; others have checked it."""
        self._speeds[member.peer] = (member.account, max(0.0, speed))

    def limit(self, account: str, now: float, epoch_seconds: float, slack: float) -> float:
        """Samples that are believed now.

        :param epoch_seconds: how long an epoch takes
        """
        speeds = [speed for owner, speed in self._speeds.values() if owner == account]
        speed = sum(speeds) if speeds else median([speed for _, speed in self._speeds.values()] or [float("inf")])
        most = (self._max_staleness + 1) * epoch_seconds
        last = self._last.get(account)
        earned = most if last is None else min(most, now - last + BURST_EPOCHS * epoch_seconds)
        return slack * speed * earned

    def why_refused(self, entry: Entry, now: float, epoch_seconds: float, slack: float) -> str | None:
        """Why the weights of an entry are not believed; None: they are."""
        accounts = {member.peer: member.account for member in entry.group}
        brought: dict[str, int] = {}
        for share in {share._replace(cells=0) for share in self._shares(entry)}:
            account = accounts.get(share.peer, share.peer)
            brought[account] = brought.get(account, 0) + share.samples
        for account, samples in sorted(brought.items()):
            limit = self.limit(account, now, epoch_seconds, slack)
            if samples > limit:
                return f"{account} brings {samples} samples, {limit:.0f} are believed"
        return None

    def committed(self, entry: Entry, now: float) -> None:
        """An entry was committed just now."""
        for share in self._shares(entry):
            owner = self._speeds.get(share.peer)
            self._last[owner[0] if owner is not None else share.peer] = now

    def replayed(self, entry: Entry) -> None:
        """An entry was committed, nobody knows when: its accounts start with a full bucket."""
        for share in self._shares(entry):
            owner = self._speeds.get(share.peer)
            self._last.pop(owner[0] if owner is not None else share.peer, None)

    @staticmethod
    def _shares(entry: Entry) -> Iterable[Share]:
        return (share for answer in entry.answers for share in answer.shares)
