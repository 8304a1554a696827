"""Peers of the same name and other settings never meet in averaging: say so, instead of training alone."""

from __future__ import annotations

from collections.abc import Collection

from volunteer_kit.packages import update_lines
from volunteer_kit.runs import PROTOCOL_VERSION, RunConfig
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.records.kits import kit_words
from volunteer_kit.swarm.records.peer_record import PeerRecord


def check_same_run(run: RunConfig, others: Collection[PeerRecord], *, was_here: bool) -> str | None:
    """A warning where the others seem to train something else; None where all is well.

    Anybody can write a record, and until peers are admitted by an authority a stranger's can send newcomers away, as
    long as no honest one is there. Nothing that others write sends away who comes back from an outage.

    :param was_here: this machine was in the run with these settings a short while ago
    Raises SwarmError (outdated, wrong_run).
    """
    problem = _mismatch(run, list(others))
    if problem is None:
        return None
    if was_here:
        return f"{problem}\nThis machine was in the run lately, so it goes on and waits for the others of it."
    raise problem


def _mismatch(run: RunConfig, others: list[PeerRecord]) -> SwarmError | None:
    another_kit = kit_words(record.kit for record in others)
    if others and all(record.protocol > PROTOCOL_VERSION for record in others):
        return SwarmError(
            f"This kit is too old for the run {run.run_id!r}: the others have a newer one, and would not "
            f"understand yours. {another_kit or update_lines()}\n"
            "3. In a notebook, restart the kernel, and run the cells again.",
            kind="outdated",
        )
    if others and not any(record.fingerprint == run.fingerprint for record in others):
        told = (
            f"The swarm trains the run {run.run_id!r} with other settings than yours "
            f"(fingerprint {others[0].fingerprint[:12]}, yours is {run.fingerprint[:12]}), so your gradients would "
            "not fit."
        )
        if another_kit:
            what_else = "If that does not help, ask the host for the current run file."
            return SwarmError(f"{told} {another_kit}\n{what_else}", kind="wrong_run")
        return SwarmError(
            f"{told}\n1. Ask the host for the current run file and use it.\n"
            f"If it is the same file, update the kit:\n{update_lines(2)}",
            kind="wrong_run",
        )
    return None
