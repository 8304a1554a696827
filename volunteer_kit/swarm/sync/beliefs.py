"""Bound the samples that peers believe of an account, by a token bucket.

An account earns the time that passes, at most `max_staleness + 1` epochs of it, and spends what its entries hold. Its
devices' speed turns time into samples. Each peer measures with its own clock, so peers that judge allow more than a
sender sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Final

from volunteer_kit.swarm.sync.entries import Entry, Member

SENDER_SLACK: Final = 1.25  # times what the account earned; speeds vary from minute to minute
REDUCER_SLACK: Final = 2.0
VOTER_SLACK: Final = 4.0
BRANCH_SLACK: Final = 1.25  # for what a branch did since it parted from another
PLAUSIBLE_SLACK: Final = 2.0  # a branch with more is a liar's


class Beliefs:
    """What each account may bring.

    :param most_epochs: that an account saves up
    :param cells: of the parameter vector
    """

    def __init__(self, most_epochs: int, cells: int):
        self._most_epochs = most_epochs
        self._cells = cells
        self._speeds: dict[str, tuple[str, float]] = {}  # peer -> account, samples/s
        self._saved_at: dict[str, tuple[float, float]] = {}  # account -> s that it had saved up, and when

    def saw(self, member: Member, speed: float) -> None:
        """A record says that this peer's device does `speed` samples per second; others have checked it."""
        self._speeds[member.peer] = (member.account, max(0.0, speed))

    def speed(self, peers: Iterable[str]) -> float:
        """samples/s of these peers together, as far as records name them."""
        return sum(self._speeds[peer][1] for peer in peers if peer in self._speeds)

    def limit(self, account: str, now: float, epoch_seconds: float, slack: float) -> float:
        """Samples that are believed now.

        :param epoch_seconds: how long an epoch takes, at least as long as this one has lasted
        """
        return slack * self._speed(account) * self._saved(account, now, epoch_seconds)

    def why_refused(self, entry: Entry, now: float, epoch_seconds: float) -> str | None:
        """Why the weights of an entry are not believed; None: they are."""
        for account, cells in sorted(self._cells_of_accounts([entry]).items()):
            limit = self.limit(account, now, epoch_seconds, VOTER_SLACK)
            if cells > limit * self._cells:
                return f"{account} brings {cells / self._cells:.0f} samples, {limit:.0f} are believed"
        return None

    def committed(self, entry: Entry, now: float, epoch_seconds: float) -> None:
        """An entry was committed just now."""
        for account, cells in self._cells_of_accounts([entry]).items():
            speed = self._speed(account)
            spent = cells / self._cells / speed if speed > 0 else float("inf")
            self._saved_at[account] = (max(0.0, self._saved(account, now, epoch_seconds) - spent), now)

    def _saved(self, account: str, now: float, epoch_seconds: float) -> float:
        """s that an account has earned and not spent."""
        most = self._most_epochs * epoch_seconds
        if account not in self._saved_at:
            return most
        saved, at = self._saved_at[account]
        return min(most, saved + now - at)

    def believed(self, entries: Iterable[Entry], seconds: float) -> float:
        """Sample-cells of these entries, of each account no more than it can compute in so many seconds."""
        most = BRANCH_SLACK * seconds * self._cells
        brought = self._cells_of_accounts(entries)
        return sum(min(cells, most * self._speed(account)) for account, cells in sorted(brought.items()))

    def is_plausible(self, entries: Iterable[Entry], seconds: float, epoch_seconds: float) -> bool:
        """Whether accounts can have brought as much, with all that they had saved up before."""
        most = PLAUSIBLE_SLACK * (seconds + self._most_epochs * epoch_seconds) * self._cells
        return all(
            cells <= most * self._speed(account) for account, cells in self._cells_of_accounts(entries).items()
        )

    @staticmethod
    def _cells_of_accounts(entries: Iterable[Entry]) -> dict[str, int]:
        brought: dict[str, int] = {}
        for entry in entries:
            accounts = {member.peer: member.account for member in entry.group}
            for answer in entry.answers:
                for share in answer.shares:
                    account = accounts.get(share.peer, share.peer)
                    brought[account] = brought.get(account, 0) + share.samples * share.cells.bit_count()
        return brought

    def _speed(self, account: str) -> float:
        """samples/s; of an account that no record names, what others do."""
        speeds = [speed for owner, speed in self._speeds.values() if owner == account]
        return sum(speeds) if speeds else median([speed for _, speed in self._speeds.values()] or [float("inf")])
