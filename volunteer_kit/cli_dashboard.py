"""The dashboard's verbs: `volunteer-kit dashboard RUN` serves, `volunteer-kit dashboard export RUN` writes files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from volunteer_kit import packages
from volunteer_kit.addressing import LOCALHOST
from volunteer_kit.cli_words import group_for

Run = Annotated[str, typer.Argument(help="The run: its name, file, link, or org/name.")]
Folder = Annotated[
    Path | None, typer.Option(help="The monitor's folder, with journal.sqlite; default: ./RUN_ID-host/monitor")
]


def add_verbs(app: typer.Typer, plain_errors: Callable[..., Any]) -> None:
    """`plain_errors`: makes errors of ours one message and exit code 2."""
    verbs = typer.Typer(
        help="Show a run to everybody: `dashboard RUN` serves the page, `dashboard export RUN` writes it as files.",
        cls=group_for("serve"),
        no_args_is_help=True,
    )
    for verb in (serve, export):
        verbs.command()(plain_errors(verb))
    app.add_typer(verbs, name="dashboard")


def serve(
    run: Run,
    folder: Folder = None,
    host: Annotated[str, typer.Option(help="Address to listen at; “::”: others see it, too.")] = LOCALHOST,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8080,
) -> None:
    """Serve a run's page, JSON (/api/state) and Prometheus (/metrics) until Ctrl-C."""
    packages.require("host")
    from volunteer_kit.dashboard.door import serve as door

    door(run, folder=folder, host=host, port=port)


def export(
    run: Run,
    out: Annotated[Path, typer.Option(help="Folder for the files, for a Hugging Face static Space or anywhere.")],
    folder: Folder = None,
) -> None:
    """Write the page as files that need no server."""
    packages.require("host")
    from volunteer_kit.dashboard.export import export_page

    print(f"Written: {export_page(run, out, folder=folder)}")
