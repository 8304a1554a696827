"""A schedule: the peers of a seed and every fault, as plain values, so that it can be printed and shrunk."""

from __future__ import annotations

from typing import Any, NamedTuple

from volunteer_kit.swarm.sync.entries import Member


class PeerPlan(NamedTuple):
    """A peer of a schedule."""

    member: Member
    founder: bool  # else a fault `join` starts it
    speed: float  # samples per second
    microbatch: int  # samples
    latency: float  # s
    uplink: float  # Mbit/s
    ahead: float  # s that its clock is ahead
    rate: float  # seconds of its clock in a true one
    liar: str = ""  # what it lies about


class Fault(NamedTuple):
    """Something that goes wrong, or that somebody does."""

    at: float  # s
    kind: str  # a method `_do_...` of `Simulation`
    peers: tuple[str, ...] = ()
    seconds: float = 0.0
    amount: float = 0.0
    what: str = ""

    def describe(self) -> str:
        """In words."""
        words = [f"FAULT {self.kind}", " ".join(self.peers), self.what]
        words += [f"for {self.seconds:.1f} s"] if self.seconds else []
        words += [f"({self.amount:g})"] if self.amount else []
        return " ".join(word for word in words if word)


class Schedule(NamedTuple):
    """Everything about a seed that is drawn before it runs."""

    mode: str
    seed: int
    peers: tuple[PeerPlan, ...]
    faults: tuple[Fault, ...]
    settings: dict[str, Any]  # of `SyncConfig`
    size: float  # bytes of all parameters on the wire
    quiet_from: float  # s; all faults are over by then
    end: float  # s, at most; a seed ends earlier when everybody agrees and commits go on
