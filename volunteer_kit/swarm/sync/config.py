"""Define the settings of the protocol."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SyncConfig:
    """What every peer of a run shares; times in seconds. `benchmarks/protocol_goodput.py` shows where they come from.
    """

    target_batch_size: int  # samples of one epoch
    max_staleness: int = 4  # epochs
    cells: int = 16  # that the parameter vector is cut into
    overlap: bool = True  # devices compute while a round runs
    heartbeat: float = 1.0
    leader_timeout: float = 3.0  # without a word of the leader
    suspect_after: float = 5.0  # without a word of a member
    isolated_after: float = 10.0  # without a quorum in touch
    alone_after: float = 60.0  # then survivors open a branch
    epoch_deadline: float = 120.0  # a round begins by then, whatever is there
    exchange_ceiling: float = 60.0
    exchange_floor: float = 2.0
    vote_ceiling: float = 20.0
    vote_floor: float = 2.0
    gather: float = 1.0  # the leader waits so long for answers that only others have
    catching_up_patience: float = 40.0  # a round waits so long while most in touch are catching up
    fetch_patience: float = 8.0  # for answers, before another source is asked
    snapshot_patience: float = 120.0
    kept_entries: int = 48
    sketch_tolerance: float = 1e-3

    @property
    def most_epochs(self) -> int:
        """Epochs' worth of samples that a peer may have to bring: one of each age."""
        return self.max_staleness + 1
