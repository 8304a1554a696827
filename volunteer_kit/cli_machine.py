"""The verbs of a machine: `volunteer-kit host RUN.yaml`, `host init`, `doctor [RUN]`, `setup`, `notebook NAME`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from volunteer_kit import output
from volunteer_kit.cli_words import group_for, listed
from volunteer_kit.storage.places import expanded

Maddrs = list[str] | None
HUB_REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
say = output.say


def add_verbs(app: typer.Typer, plain_errors: Callable[..., Any]) -> None:
    """`plain_errors`: makes errors of ours one message and exit code 2."""
    hosting = typer.Typer(
        help="Be a run's host: `host RUN.yaml` starts all that it needs here, `host init` writes a run file.",
        cls=group_for("start"),
        no_args_is_help=True,
    )
    for verb in (start, init):
        hosting.command()(plain_errors(verb))
    app.add_typer(hosting, name="host")
    for verb in (doctor, setup, notebook):
        app.command()(plain_errors(verb))


def start(
    run: Annotated[str, typer.Argument(help="The run: its YAML file, name, link, or org/name.")],
    folder: Annotated[Path | None, typer.Option(help="Folder of all that is kept; default: ./RUN_ID-host")] = None,
    host_maddrs: Annotated[Maddrs, typer.Option(help="Where the first peer listens.")] = None,
    announce_maddrs: Annotated[
        Maddrs, typer.Option(help="Address that others dial: /ip4/PUBLIC.IP/tcp/PORT of a machine behind a router.")
    ] = None,
    initial_peers: Annotated[Maddrs, typer.Option(help="Other first peers of this run, if there are.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the authority; default: 8000.")] = None,
    dashboard_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: 8001.")] = None,
    public_url: Annotated[str | None, typer.Option(help="The authority as others see it: https://NAME")] = None,
    dashboard_url: Annotated[str | None, typer.Option(help="The dashboard, if not PUBLIC_URL/dashboard/.")] = None,
    tls_cert: Annotated[str | None, typer.Option(help="Certificate chain (PEM) for --public-url.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its key.")] = None,
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="A proxy on this machine serves https and passes on to --port.")
    ] = False,
    database: Annotated[
        str | None,
        typer.Option(
            envvar="VOLUNTEER_KIT_DATABASE",
            help="The authority's: postgresql://..., best by the variable, for `ps` shows options; default: a file.",
        ),
    ] = None,
    push_to: Annotated[
        str | None, typer.Option(help='ORG/NAME on the Hub, for notebook, checkpoints and model card; "": no longer.')
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Steps of the swarm; default: 10.")
    ] = None,
    trackio: Annotated[bool, typer.Option("--trackio", help="The run's metrics to trackio as well.")] = False,
    wandb: Annotated[bool, typer.Option("--wandb", help="The run's metrics to Weights & Biases as well.")] = False,
    identity_path: Annotated[Path | None, typer.Option(help="The first peer's key, if there is one already.")] = None,
    no_authority: Annotated[
        bool, typer.Option("--no-authority", help="Only a first peer; whoever knows its address takes part.")
    ] = False,
    install_service: Annotated[
        bool, typer.Option("--install-service", help="Print a systemd unit that does this after each reboot, and end.")
    ] = False,
) -> None:
    """Keep a run up: first peer, authority, monitor, dashboard. Ctrl-C ends it, the same command goes on.

    What is given here once is remembered in the folder.
    """
    from volunteer_kit.host import HostError, HostSettings, host_run

    if trackio and wandb:
        raise HostError("Metrics go to one tracker: --trackio or --wandb.")
    if push_to and not re.fullmatch(HUB_REPOSITORY, push_to):
        raise HostError(f"--push-to is {push_to!r}; it should look like ORG/NAME, a model on the Hub.")
    settings = HostSettings(
        port=port, dashboard_port=dashboard_port, public_url=public_url, dashboard_url=dashboard_url,
        tls_cert=_absolute(tls_cert), tls_key=_absolute(tls_key), behind_proxy=behind_proxy or None,
        database=database, push_to=push_to, checkpoint_every=checkpoint_every,
        tracker="trackio" if trackio else "wandb" if wandb else None,
    )  # fmt: skip
    if install_service:
        _print_service(run)
        return
    host_run(
        run,
        folder=folder,
        authority=not no_authority,
        settings=settings,
        identity_path=identity_path,
        host_maddrs=listed(host_maddrs),
        announce_maddrs=listed(announce_maddrs),
        initial_peers=listed(initial_peers),
        say=say,
    )


def _absolute(path: str | None) -> str | None:
    return str(expanded(path).absolute()) if path else None


def _print_service(run: str) -> None:
    """With the very words of this call."""
    from volunteer_kit.host.door import run_id_of
    from volunteer_kit.host.service import service_unit
    from volunteer_kit.run_reader import find_run_file

    words = sys.argv[sys.argv.index("host") + 1 :] if "host" in sys.argv else [run]
    words = [word for word in words if word not in ("--install-service", "start")]
    while "--database" in words:  # its password is not for a file that everybody can read
        at = words.index("--database")
        del words[at : at + 2]
        print("Start the host once by hand with --database: it is remembered, and not in the unit.", file=sys.stderr)
    words = [word for word in words if not word.startswith("--database=")]
    print(service_unit(run_id_of(find_run_file(run)), words), end="")


def init(
    out: Annotated[Path, typer.Argument(help="The file to write.")] = Path("my-run.yaml"),
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    model: Annotated[str | None, typer.Option(help="tiny, small or original.")] = None,
    data: Annotated[str | None, typer.Option(help="scenes, or shards: path, pattern or URL.")] = None,
    who: Annotated[str | None, typer.Option(help="open; a Hub organization; or names with commas.")] = None,
    moderators: Annotated[str | None, typer.Option(help="Names at the Hub, with commas.")] = None,
    address: Annotated[str | None, typer.Option(help="https://NAME of this machine; empty: this machine only.")] = None,
    help_url: Annotated[str | None, typer.Option(help="https://..., where volunteers find you.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: defaults for what is not given.")] = False,
) -> None:
    """Write a commented run file after a few questions."""
    from volunteer_kit.host.init import Answers, ask_all, write

    given = Answers(
        name=name, model=model, data=data, who=who, moderators=moderators, address=address, help_url=help_url
    )
    answers = given if yes else ask_all(given, _ask, say)
    for line in write(out, answers):
        say(line)


def _ask(question: str, default: str) -> str:
    return typer.prompt(question, default=default, show_default=bool(default)).strip()


def doctor(
    run: Annotated[str | None, typer.Argument(help="A run's name, file or link; without: only this machine.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder of the run's host, if this machine is it.")] = None,
    home: Annotated[Path | None, typer.Option(help="Where a volunteer's files go.")] = None,
) -> None:
    """Look whether this machine can take part, or host: versions, GPU, memory, disk, clock, network, the run itself."""
    from volunteer_kit.doctor import doctor as door

    findings = door(run, folder=folder, home=home, say=say)
    raise typer.Exit(any(finding.level == "problem" for finding in findings))


def setup(
    what: Annotated[
        list[str] | None, typer.Argument(help="host, finetune, metrics or tpu, for what only they need; or nothing.")
    ] = None,
) -> None:
    """Install what the kit lacks here: dalle-pytorch and taming-transformers, which no list of packages can bring."""
    from volunteer_kit.installer import set_up

    set_up(what or [], say=say)


def notebook(
    name: Annotated[str, typer.Argument(help="join, host_a_run, gallery or finetune_with_trainer.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; default: ./NAME.ipynb")] = None,
) -> None:
    """Write one of the kit's notebooks."""
    from volunteer_kit.notebook_files import write_notebook

    write_notebook(name, out, say)
