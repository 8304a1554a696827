"""What a run says about meeting and averaging, and what is said of each global step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hivemind.compression import CompressionBase, NoCompression

from volunteer_kit.robust.standing import Settings
from volunteer_kit.swarm.failures import ALL_CLIENTS, REFUSED
from volunteer_kit.swarm.lost_answers import RECOVERY
from volunteer_kit.swarm.told_group import LONGEST

# of a verified round beside the exchange itself, and how much of allreduce_timeout each may take
STAGES, STAGE_SHARE = 3, 0.5
NEVER = 2**31  # epochs between rounds of state averaging


@dataclass(frozen=True)
class SwarmOptions:
    """How a run's peers meet and average; one object, equal on all peers but for nothing.

    :param run_key: prefix of all DHT keys: run id and fingerprint, so that peers of different runs never meet
    :param target_batch_size: samples of one epoch, swarm-wide
    :param matchmaking_time: s to wait for others before a round, at most; where groups come together sooner, no longer
        than they take, but for those who are here and will come LONGEST times as long. The larger the slower the
        slowest line. Raise it when rounds have fewer members than the swarm
    :param averaging_timeout: s after which a round is given up; twice what a round takes
    :param allreduce_timeout: s after which an exchange is given up, at most; once some rounds were seen, a few
        deviations after what they take
    :param next_chunk_timeout: s without a part from a member after which it is given up
    :param average_state_every: epochs between rounds in which parameters are averaged if they differ; 0: none, who is
        apart downloads. For lines so bad that most rounds leave most peers apart
    :param delay_optimizer_step: step in the background, apply at the next call: one epoch of staleness
    :param delay_grad_averaging: average in the background as well
    :param grad_codec: what gradients travel in; `state_codec`: parameters, when they differ
    :param max_samples_per_second: more than this, claimed by one peer, is not believed
    :param left_over: file for what a lossy `grad_codec` leaves out, kept over a restart; None: in memory. Its own
        choice
    :param max_mbps: Mbit/s that this peer may send, and as much that it may receive; None: as much as the line has. Its
        own choice: set it when the line is needed for something else
    :param grad_rank: of PowerSGD, by which gradients are averaged; `grad_codec` is then of its factors. None: not
    :param verification: contributions are looked at, and who cheats is banned; None: not. The rule must be
        CenteredClip, or (`clips` False) the mean
    :param verbose: say in the log when epochs and rounds begin
    :param min_epoch_seconds: s; a peer that claims epochs faster than this is not believed. Lower it for models so
        small that their epochs are shorter
    :param claim_inflation: times what a peer's samples weigh in a round that its claim of them may be; more where
        samples are of different lengths, or a batch of short ones is taken for a lie
    :param alone_after: s of silence after which a peer that joined others takes them for gone, and goes on alone; None:
        never, for its own line may be dead, and what it does meanwhile is lost
    :param marks_unused: a parameter of which no member had a gradient is left alone, as a plain trainer does, and the
        model's buffers are averaged: see beside.py. Costs a few bytes a round. Not with `verification`, which looks at
        gradients that can be computed again: only runs of the kit's own model have it, which uses all its parameters
        and has no such buffers
    :param refresh_period: s between looks at the others' progress, at least; at most they are half a matchmaking_time
    """

    run_key: str
    target_batch_size: int
    matchmaking_time: float = 15.0
    averaging_timeout: float = 180.0
    allreduce_timeout: float = 60.0
    next_chunk_timeout: float = 30.0
    load_state_timeout: float = 600.0
    average_state_every: int = 0
    delay_optimizer_step: bool = True
    delay_grad_averaging: bool = False
    grad_codec: CompressionBase = field(default_factory=NoCompression)
    state_codec: CompressionBase = field(default_factory=NoCompression)
    max_samples_per_second: float = 10_000.0
    max_mbps: float | None = None
    left_over: Path | None = None
    grad_rank: int | None = None
    verification: Settings | None = None
    clips: bool = True
    verbose: bool = False
    min_epoch_seconds: float = 0.2
    claim_inflation: float = 2.0
    alone_after: float | None = None
    marks_unused: bool = False
    refresh_period: float = 0.5
    metadata_expiration: float = 60.0

    def __post_init__(self):
        if self.marks_unused and self.verification is not None:
            raise ValueError("marks_unused cannot be had with verification")

    @property
    def seconds_of_verification(self) -> float:
        """That a round may take longer for it."""
        return STAGES * STAGE_SHARE * self.allreduce_timeout if self.verification is not None else 0.0

    def of_hivemind(self) -> dict[str, Any]:
        """Arguments of hivemind.Optimizer."""
        return {
            "run_id": self.run_key,
            "target_batch_size": self.target_batch_size,
            "matchmaking_time": self.matchmaking_time,
            "averaging_timeout": self.averaging_timeout
            + RECOVERY * self.allreduce_timeout
            + (LONGEST - 1) * self.matchmaking_time
            + self.seconds_of_verification,
            "allreduce_timeout": self.allreduce_timeout,
            "next_chunk_timeout": self.next_chunk_timeout,
            "load_state_timeout": self.load_state_timeout,
            "average_state_every": self.average_state_every or NEVER,
            "offload_optimizer": True,
            "delay_optimizer_step": self.delay_optimizer_step,
            "delay_grad_averaging": self.delay_grad_averaging,
            "delay_state_averaging": True,
            "grad_compression": self.grad_codec,
            "state_averaging_compression": self.state_codec,
            "load_state_compression": NoCompression(),  # a joiner equals its donor to the last bit
            "verbose": self.verbose,
            "tracker_opts": {
                "min_refresh_period": self.refresh_period,
                "default_refresh_period": 2 * self.refresh_period,
                # others wait a matchmaking for who is expected; hivemind's 10 s are longer than a quick swarm's
                "max_refresh_period": max(self.refresh_period, min(10.0, self.matchmaking_time / 2)),
                "metadata_expiration": self.metadata_expiration,
            },
        }


@dataclass(frozen=True)
class StepReport:
    """One applied global step, as this peer saw it.

    `samples`: this peer's own that were in it; `names`: what they are called; `failure`: why no round of averaging took
    them in, None if one did or nobody was in sight; `uncertain`: not known yet whether the others have this step; of
    all such steps a later report tells that the swarm goes on from those up to `kept_until`, and the rest is lost;
    `on_probation`: they are computed again by others before they count; `slow_network`: that the network cannot keep
    up, and which target batch would do;
    `apart`: why our state is not the others', who is being followed, None if it is theirs; `remarks`: peer id -> what
    is held against it, though it took part; `expected`: members that its group should have had, ourselves among them;
    `cause`: one of failures.CAUSES if its round failed or lacked something, though the step was taken;
    `made_up_for`: rounds before it that this peer had missed, and whose steps it has taken from their averages;
    `refused`: peer id (ours too) -> why its part did not enter the average;
    `is_postponed`: nobody came, or hardly any answers, and so no step was taken; what nobody got goes into the next.
    """

    epoch: int
    samples: int
    group_size: int
    received: float
    seconds: float
    bytes_sent: int
    bytes_received: int
    refused: dict[str, str]
    names: tuple[Hashable, ...] = ()
    failure: str | None = None
    apart: str | None = None
    uncertain: bool = False
    kept_until: int | None = None
    remarks: dict[str, str] = field(default_factory=dict)
    on_probation: bool = False
    slow_network: str | None = None
    expected: int = 1
    cause: str | None = None
    made_up_for: int = 0
    is_postponed: bool = False

    @property
    def why_postponed(self) -> str | None:
        if not self.is_postponed:
            return None
        if self.cause == ALL_CLIENTS:
            return "nobody in this run can be called"
        if self.cause == REFUSED:
            return f"its parts were refused ({self.refused_in_words})"
        return "nobody was met" if self.group_size <= 1 else "too few answers came"

    @property
    def refused_in_words(self) -> str:
        return "; ".join(f"{peer}: {why}" for peer, why in sorted(self.refused.items()))

    @property
    def is_round(self) -> bool:
        """Was there anybody to average with?"""
        return max(self.expected, self.group_size) > 1

    @property
    def is_complete(self) -> bool:
        """Did all meet who were expected?"""
        return self.is_round and self.group_size >= self.expected

    @property
    def counted(self) -> int:
        """Samples of ours that the step contains: everybody's, or for now our own if `uncertain`."""
        return 0 if self.failure and not self.uncertain else self.samples
