"""All that a volunteer is shown, in one place; every surface draws this and nothing else."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

State = Literal[
    "starting",  # a worker process begins
    "connecting",  # to the swarm's peers
    "downloading",  # the swarm's training state
    "training",
    "averaging",  # with others
    "reconnecting",  # the network is lost; it comes back by itself
    "restarting",  # the worker has crashed; it comes back by itself
    "paused",
    "leaving",
    "finished",  # the run is
    "left",
    "failed",  # and a person has to do something; `message` says what
]
POINTS = 300  # of the loss curve
WARNINGS = 5
PICTURES = 8


@dataclass
class Picture:
    """One picture that the run's model drew."""

    caption: str
    png: bytes
    epoch: int


@dataclass
class Progress:
    """One volunteer's stay. Times are s since the Unix epoch; what is not known yet is None."""

    run_id: str = ""
    description: str = ""
    name: str = ""  # of the volunteer, as others see it
    help_url: str = ""
    state: State = "starting"
    detail: str = ""  # of the state, in words: "43 %, about 2 min left", "with 3 others", "in 8 s"
    started: float = field(default_factory=time.time)
    updated: float = 0.0

    my_samples: int = 0  # that entered applied steps, over all restarts
    my_epochs: int = 0
    my_waiting: int = 0  # samples that are in the model of this side of a swarm in two parts; not in my_samples
    share: float | None = None  # of all samples of the volunteers now here, 0 to 1
    rank: int | None = None  # 1: the most samples
    volunteers: int | None = None  # now here, this one included
    samples_per_second: float = 0.0
    swarm_samples_per_second: float | None = None

    epoch: int | None = None  # the swarm's global step
    total_epochs: int | None = None  # the run ends there
    swarm_samples: int = 0  # collected for the next step
    target_batch_size: int | None = None
    seconds_to_step: float | None = None
    loss: list[tuple[int, float]] = field(default_factory=list)  # (epoch, mean loss), at most POINTS

    downloaded: float | None = None  # of the training state, 0 to 1; None when it is here
    seconds_left: float | None = None  # of the download
    bytes_sent: int = 0
    bytes_received: int = 0

    device: str = ""
    plan: str = ""  # "batches of 8, fp16, recomputing activations"
    why: str = ""
    restarts: int = 0
    checkpoint: str = ""  # the newest one's folder, where some are kept
    warnings: list[tuple[float, str]] = field(default_factory=list)  # newest last, at most WARNINGS
    pictures: list[Picture] = field(default_factory=list)  # newest first, at most PICTURES
    message: str = ""  # the last word: thanks, or what to do; may have several lines
    is_elsewhere: bool = False  # it is controlled from another window

    def as_dict(self) -> dict[str, Any]:
        """For a status file: JSON's types only, without pictures."""
        values = asdict(self)
        del values["pictures"]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        """What as_dict() wrote; unknown fields are ignored. Raises ValueError for anything else."""
        known = {f.name for f in fields(cls)} - {"pictures"}
        progress = cls(**{name: value for name, value in values.items() if name in known})
        if progress.state not in get_args(State):
            raise ValueError(f"no state of a volunteer: {progress.state!r}")
        if not isinstance(progress.updated, (int, float)):
            raise ValueError(f"no time: {progress.updated!r}")
        return progress
