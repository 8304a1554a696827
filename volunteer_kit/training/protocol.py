"""What the worker process and its supervisor say to each other, one JSON object a line.

The supervisor writes a WorkerSpec as the first line of the worker's stdin and commands after it; the worker writes
events to stdout. When stdin ends, the parent is gone and the worker leaves the swarm by itself, so that a killed
notebook kernel leaves no training process behind. Secrets travel here and nowhere else.
"""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from volunteer_kit.addressing import LISTEN

# Exit codes of a worker, beside 0 (it has left) and those of crashes:
REFUSED = 2  # it told an error that a restart would not mend
OFFLINE = 69  # nobody can be reached; what was there before may come back
RENEW = 75  # nothing is wrong, it wants to begin afresh
BROKEN = 70  # a process that it consists of has died, or their sockets are gone: a new start mends it


class WorkerSpec(BaseModel):
    """All that one worker process needs: the run (what peers share) and this machine's own choices."""

    model_config = ConfigDict(extra="forbid")

    run: dict[str, Any]  # a RunConfig, dumped; the worker validates it again
    name: str = "volunteer"  # what other people see beside this peer's numbers, 64 characters at most
    hide_name: bool = False  # not on the run's public page
    initial_peers: list[str] = []  # multiaddrs; empty: the first peer of a new swarm
    host_maddrs: list[str] = [*LISTEN]
    announce_maddrs: list[str] = []
    identity_path: str | None = None  # a file: the same peer id after a restart
    client_mode: bool | None = None  # None: find out whether others can reach this machine
    checkpoint_dir: str | None = None
    home: str | None = None  # a folder (home.py): what a restart goes on from
    resume: bool = True  # start from the newest good checkpoint in checkpoint_dir, if there is one
    batch_size: int | None = None  # microbatch; None: the device plan's
    most_samples: int | None = Field(None, ge=1)  # in a microbatch, whoever chooses: memory ran out with more
    recompute: bool = False  # activations in any case: memory ran out without
    threads: int | None = None  # CPU threads for torch; None: the device plan's
    peers_on_machine: int = 1  # volunteers that share this machine's cores and memory
    max_mbps: float | None = Field(None, gt=0)  # Mbit/s, each way
    renew_above_gb: float | None = Field(None, gt=0)  # memory of all processes; None: by its growth
    finish_at: int | None = None  # as FinishAt; a run's last epoch
    hf_token: str | None = Field(None, repr=False)  # for gated data sets and the authority; only in this pipe
    peer_seed: int = 0  # decorrelates what peers read; a random number per volunteer is right
    startup_timeout: float = 90.0  # s; p2pd alone needs more than 15 s on a busy Colab VM


class FinishAt(BaseModel):
    """Train until `epoch` is reached, save, then keep sharing state until told to leave."""

    command: Literal["finish_at"] = "finish_at"
    epoch: int


class Leave(BaseModel):
    """Save, say goodbye to peers, stop."""

    command: Literal["leave"] = "leave"


Command = Annotated[FinishAt | Leave, Field(discriminator="command")]
_commands: TypeAdapter[FinishAt | Leave] = TypeAdapter(Command)


def parse_command(line: str | bytes) -> FinishAt | Leave:
    """One line of stdin -> a command. Raises pydantic.ValidationError for anything else."""
    return _commands.validate_json(line)


# event -> the fields it carries beside "event" and "time" (s since the Unix epoch)
EVENTS: dict[str, tuple[str, ...]] = {
    "starting": ("pid", "name"),
    # also: `checkpointing`, and `memory_bytes` that training needs about
    "device": ("device", "batch_size", "precision", "threads", "why"),
    "plan": ("batch_size", "checkpointing", "why"),  # the tuner has settled, or had to think again
    "waiting": ("reason", "seconds"),  # for what passes by itself, before it can connect; it asks again in so long
    "connected": ("peer_id", "maddrs", "client_mode"),
    "downloading": ("done", "total"),  # bytes of the training state
    "state_loaded": ("epoch", "source"),  # source: "peers" | "checkpoint" | "new"
    "step": ("epoch", "samples", "samples_per_second", "loss", "num_peers", "swarm_samples", "target_batch_size"),
    "averaging": ("num_peers",),  # a round begins
    # one an applied global step: `samples` of this peer are in it; `loss`: the step's mean; `received`: 1.0 = all parts
    # also: `cause` (records/failures.py), if the round lacked something; of all stays, `rounds`, `complete_groups`,
    # `failed`
    "epoch": ("epoch", "samples", "total_samples", "loss", "group_size", "received", "seconds", "sent_bytes"),
    # of all stays of this machine in this run; also: `waiting`, samples of a branch that may lose, in no total yet
    "totals": ("samples", "epochs", "seconds"),
    "swarm": ("num_peers", "rank", "share", "samples_per_second"),  # who is here, by their own account
    "traffic": ("sent", "received"),  # bytes since this process began
    "cut_off": ("reason",),  # nobody can be reached; nothing is counted until "back"
    "back": (),
    "pictures": ("epoch", "pictures"),  # [{"caption", "path"}], drawn by the run's model
    "skipped": ("counts",),  # records of the stream left out, and leases lost, by cause; cumulative
    "turned_away": ("counts",),  # calls of peers that may not take part, by call and reason; cumulative
    "warning": ("kind", "message"),
    "error": ("kind", "message"),  # in plain words; the process ends with exit code 2 and must not be restarted as is
    "checkpoint": ("path", "epoch"),
    "renewing": ("message",),  # the process ends with exit code 75, to be started afresh
    "broken": ("message",),  # which process of the worker died, and how; it ends with exit code 70, to be started again
    "finished": ("epoch", "path", "total_samples"),  # the run's last epoch, or finish_at's: saved, still sharing
    "left": ("total_samples", "epochs"),
}


def dump_event(event: str, **fields: Any) -> str:
    """One line for stdout. Raises KeyError for an unknown event, ValueError for a missing field."""
    missing = set(EVENTS[event]) - fields.keys()
    if missing:
        raise ValueError(f"event {event!r} lacks {sorted(missing)}")
    return json.dumps({"event": event, "time": round(time.time(), 3), **fields}, allow_nan=False, default=str)


def parse_event(line: str) -> dict[str, Any] | None:
    """One line of the worker's stdout -> event, or None for a line that is no event (a library's print)."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    known = isinstance(event, dict) and isinstance(event.get("event"), str) and event["event"] in EVENTS
    return event if known else None
