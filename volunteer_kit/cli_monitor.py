"""The verbs of a run's monitor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from volunteer_kit import output
from volunteer_kit.cli_words import group_for, listed

Run = Annotated[str, typer.Argument(help="The run: its name, file, link, or org/name.")]
Folder = Annotated[Path | None, typer.Option(help="Folder of what it keeps; default: ./RUN_ID-host/monitor")]
Keys = Annotated[Path | None, typer.Option(help="The run's keys; default: keys/ beside the folder.")]
Addresses = Annotated[list[str] | None, typer.Option(help="Repeated, or with commas between them.")]
_say = output.say


def add_verbs(app: typer.Typer, plain_errors: Callable[..., Any]) -> None:
    """`plain_errors`: makes errors of ours one message and exit code 2."""
    group = typer.Typer(
        cls=group_for("watch"),
        no_args_is_help=True,
        help="Watch a run: `monitor RUN` keeps checkpoints, signs and judges; `monitor rollback RUN --to EPOCH`.",
    )
    group.command()(plain_errors(watch))
    group.command()(plain_errors(rollback))
    app.add_typer(group, name="monitor")


def watch(
    run: Run,
    folder: Folder = None,
    keys: Keys = None,
    initial_peers: Addresses = None,
    host_maddrs: Addresses = None,
    announce_maddrs: Addresses = None,
    push_to: Annotated[str | None, typer.Option(help="ORG/NAME on the Hub, for checkpoints and model card.")] = None,
    trackio: Annotated[bool, typer.Option("--trackio", help="Metrics to trackio as well.")] = False,
    wandb: Annotated[bool, typer.Option("--wandb", help="Metrics to Weights & Biases as well.")] = False,
    checkpoint_every: Annotated[int, typer.Option(min=1, max=10_000, help="Steps of the swarm.")] = 10,
) -> None:
    """Watch a run until Ctrl-C: records, metrics, checkpoints, credit; back to the last good one when it is ruined."""
    from volunteer_kit.monitor.door import monitor_run
    from volunteer_kit.monitor.errors import MonitorError

    if trackio and wandb:
        raise MonitorError("Metrics go to one tracker: --trackio or --wandb.")
    monitor_run(
        run,
        folder=folder,
        keys=keys,
        initial_peers=listed(initial_peers),
        host_maddrs=listed(host_maddrs),
        announce_maddrs=listed(announce_maddrs),
        push_to=push_to,
        tracker="trackio" if trackio else "wandb" if wandb else None,
        checkpoint_every=checkpoint_every,
        say=_say,
    )


def rollback(
    run: Run,
    to: Annotated[int, typer.Option(min=0, help="The step whose checkpoint everybody goes back to.")],
    folder: Folder = None,
    keys: Keys = None,
    initial_peers: Addresses = None,
) -> None:
    """Order everybody back to a checkpoint; the count of steps goes on."""
    from volunteer_kit.monitor.door import roll_back

    roll_back(run, to, folder=folder, keys=keys, initial_peers=listed(initial_peers), say=_say)
