"""Where the seconds of all devices went: exact shares whose sum is 1."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Final

FAULTS: Final = ("dead", "stopped", "microbatch lost", "joining", "taken along")
"""What the faults themselves cost, whatever the protocol does:

dead             from a kill until the process runs again
stopped          from SIGSTOP to SIGCONT
microbatch lost  the microbatch that a kill or an end took
joining          a newcomer has no state of the run yet
taken along      samples that were not in an entry yet when their peer died for good
"""

Seconds = dict[str, Fraction]


def add(accounts: Iterable[Seconds]) -> Seconds:
    """The sum of some accounts."""
    total: Seconds = {}
    for account in accounts:
        for name, seconds in account.items():
            total[name] = total.get(name, Fraction(0)) + seconds
    return total


def less(account: Seconds, earlier: Seconds) -> Seconds:
    """What came between two moments."""
    return add((account, {name: -seconds for name, seconds in earlier.items()}))


class Shares:
    """Shares of the whole device time.

    :param account: seconds by where they went
    """

    def __init__(self, account: Seconds):
        self.account = account
        self.seconds = sum(account.values(), Fraction(0))
        self.by_name = {name: account[name] / self.seconds for name in sorted(account) if account[name]}

    def __getitem__(self, name: str) -> Fraction:
        return self.by_name.get(name, Fraction(0))

    @property
    def goodput(self) -> float:
        """Device time whose samples entered an entry of the branch that all follow."""
        return float(self["committed"])

    @property
    def ceiling(self) -> float:
        """1 less what the faults themselves cost."""
        return float(1 - sum((self[name] for name in FAULTS), Fraction(0)))

    @property
    def idle(self) -> float:
        """Of the time in which a device's process ran and had a state, the share in which it was not let compute."""
        live = 1 - sum((self[name] for name in ("dead", "stopped", "joining")), Fraction(0))
        return float(self["idle"] / live) if live else 0.0

    @property
    def losses(self) -> dict[str, Fraction]:
        """All that is not goodput, by cause."""
        return {name: share for name, share in self.by_name.items() if name != "committed"}

    @property
    def losses_sum(self) -> Fraction:
        """Goodput and losses: exactly 1."""
        return self["committed"] + sum(self.losses.values(), Fraction(0))
