"""The verbs of those who host and moderate a run; cli.py has the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from volunteer_kit import output, packages
from volunteer_kit.addressing import LOCALHOST

Run = Annotated[str, typer.Argument(help="A run's name, the path of its YAML file, or org/name.")]
Name = Annotated[str, typer.Argument(help="A name at the Hugging Face Hub.")]
OfRun = Annotated[str | None, typer.Option("--run", help="The run whose authority is meant.")]
Url = Annotated[str | None, typer.Option(help="The authority's address, instead of a run.")]
_say = output.say


def add_verbs(app: typer.Typer, plain_errors: Callable[..., Any]) -> None:
    """`plain_errors`: makes errors of ours one message and exit code 2."""
    app.command()(plain_errors(authority))
    moderators = typer.Typer(no_args_is_help=True, help="Let people into a run, and put them out: for its moderators.")
    for verb in (add, remove, ban, unban, members, bans, log):
        moderators.command()(plain_errors(verb))
    app.add_typer(moderators, name="moderate")


def authority(
    run: Run,
    folder: Annotated[Path | None, typer.Option(help="Has the keys and the database; default: ./RUN_ID-host")] = None,
    host: Annotated[str, typer.Option(help="Listen here; “::”: for others, with a certificate.")] = LOCALHOST,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8400,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate with its chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's key, PEM.")] = None,
    database: Annotated[
        str | None,
        typer.Option(
            envvar="VOLUNTEER_KIT_DATABASE",  # `ps` shows command lines to everybody
            help="A SQLite file, or postgresql://USER:PASSWORD@HOST/NAME; default: in the folder.",
        ),
    ] = None,
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="A proxy on this machine does TLS and says who asks.")
    ] = False,
    token_lifetime: Annotated[
        float | None, typer.Option(min=1, max=900, help="Seconds that an access token is good; default: 900.")
    ] = None,
    make_keys: Annotated[
        bool, typer.Option("--make-keys", help="Make the run's keys, print what its file has to have of them, and end.")
    ] = False,
    rotate_key: Annotated[
        bool, typer.Option("--rotate-key", help="Give the authority a new key, and end; one that runs takes it up.")
    ] = False,
) -> None:
    """Let people into a run by their login at the Hub; moderators have a page there, /moderate. Ctrl-C stops it."""
    packages.require("host")
    from volunteer_kit import authority_door

    if make_keys:
        authority_door.make_keys(run, folder=folder, say=_say)
        return
    if rotate_key:
        authority_door.rotate_key(run, folder=folder, say=_say)
        return
    authority_door.serve_authority(
        run,
        folder=folder,
        host=host,
        port=port,
        tls_cert=tls_cert,
        tls_key=tls_key,
        database=database,
        behind_proxy=behind_proxy,
        token_lifetime=token_lifetime,
        say=_say,
    )


def add(name: Name, run: OfRun = None, url: Url = None) -> None:
    """Let somebody in whom neither the organization nor the run file lets in."""
    from volunteer_kit.moderate import signed_in

    with signed_in(url, run) as moderation:
        _say(moderation.add(name))


def remove(name: Name, run: OfRun = None, url: Url = None) -> None:
    """Take back what `add` did; the person is out within a minute, and may be added again."""
    from volunteer_kit.moderate import signed_in

    with signed_in(url, run) as moderation:
        _say(moderation.remove(name))


def ban(
    name: Name,
    reason: Annotated[str, typer.Option(help="In a few words; the person will read it.")],
    run: OfRun = None,
    url: Url = None,
) -> None:
    """Put somebody out of the run within a minute, and keep him out."""
    from volunteer_kit.moderate import signed_in

    with signed_in(url, run) as moderation:
        _say(moderation.ban(name, reason))


def unban(name: Name, run: OfRun = None, url: Url = None) -> None:
    """Lift a ban."""
    from volunteer_kit.moderate import signed_in

    with signed_in(url, run) as moderation:
        _say(moderation.unban(name))


def members(
    part: Annotated[str, typer.Argument(help="Part of a name.")] = "", run: OfRun = None, url: Url = None
) -> None:
    """List the people who take part, or may."""
    from volunteer_kit.moderate import signed_in, tell_members

    with signed_in(url, run) as moderation:
        tell_members(moderation, part, _say)


def bans(run: OfRun = None, url: Url = None) -> None:
    """List the people who are banned, by whom and why."""
    from volunteer_kit.moderate import signed_in, tell_bans

    with signed_in(url, run) as moderation:
        tell_bans(moderation, _say)


def log(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Lines.")] = 50, run: OfRun = None, url: Url = None
) -> None:
    """List the deeds of moderators; nobody can change this list."""
    from volunteer_kit.moderate import signed_in, tell_log

    with signed_in(url, run) as moderation:
        tell_log(moderation, limit, _say)
