"""A run's authority: `volunteer-kit authority RUN` serves it from a folder with its keys and its database, and with it
the run's page for people."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

from volunteer_kit import output, packages
from volunteer_kit.addressing import LOCALHOST
from volunteer_kit.auth.access_token import KeyFolder, TokenError, Trust
from volunteer_kit.run_reader import read_small, read_yaml
from volunteer_kit.runs import AuthorityConfig, RunConfig, RunError, load_run


def serve_authority(
    run: str | Path | RunConfig,
    *,
    folder: str | Path | None = None,
    host: str = LOCALHOST,
    port: int = 8400,
    tls_cert: str | Path | None = None,
    tls_key: str | Path | None = None,
    database: str | None = None,
    behind_proxy: bool = False,
    token_lifetime: float | None = None,
    run_link: str = "",
    say: Callable[[str], None] = output.say,
) -> None:
    """Until SIGTERM or Ctrl-C; says one JSON line {"ready": {"url", "moderate", "port"}} when it serves.

    :param folder: has keys/ and authority.sqlite; default ./RUN_ID-host
    :param database: the path of a SQLite file, or postgresql://USER:PASSWORD@HOST/NAME; default: in the folder
    :param behind_proxy: a proxy on this machine does TLS and says who asks
    :param token_lifetime: s, 900 at most; a shorter one asks the authority more often
    :param run_link: where volunteers get the run file
    Raises MissingDependency, RunError, KeysError, AuthorityError.
    """
    packages.require("host")
    config = run if isinstance(run, RunConfig) else load_run(run)
    authority = _require_authority(config)
    place = Path(folder) if folder else Path(f"{config.run_id}-host")
    keys = _open_keys(config.run_id, authority, place / "keys")
    from volunteer_kit.auth.authority.app import create_app
    from volunteer_kit.auth.authority.server import serve
    from volunteer_kit.auth.authority.settings import Settings
    from volunteer_kit.auth.authority.storage import Storage
    from volunteer_kit.auth.moderation import Allowlist
    from volunteer_kit.dashboard.board import Board
    from volunteer_kit.dashboard.landing import Landing, about, page_for
    from volunteer_kit.dashboard.state import run_info

    allowlist = Allowlist.of(authority.organization, authority.users, authority.moderators, authority.open)
    lifetime = {} if token_lifetime is None else {"token_lifetime": token_lifetime}
    settings = Settings(
        config.run_id,
        authority.url,
        allowlist,
        oauth_client_id=authority.oauth_client_id,
        help_url=config.help_url,
        run_link=run_link or f"{authority.url.rstrip('/')}/run.yaml",
        run_file=_run_file(run, place),
        behind_proxy=behind_proxy,
        **lifetime,
    )
    storage = Storage(database or place / "authority.sqlite", config.run_id)

    board = Board(place / "monitor", run_info(config))
    run_file = settings.run_file
    landing = Landing(board, place, about(config, has_run_file=run_file is not None), run_file)

    def ready(url: str) -> None:
        port = int(url.rpartition(":")[2])
        say(json.dumps({"ready": {"url": url, "moderate": f"{url}/moderate", "port": port}}))

    try:
        app = create_app(settings, storage, keys, page_for=page_for(landing, has_run_file=run_file is not None))
        landing.install(app)
        with storage.backed_up():
            serve(
                app, host=host, port=port, tls_cert=tls_cert, tls_key=tls_key, behind_proxy=behind_proxy, on_ready=ready
            )  # fmt: skip
    finally:
        board.close()
        storage.close()


def rotate_key(
    run: str | Path | RunConfig, *, folder: str | Path | None = None, say: Callable[[str], None] = output.say
) -> None:
    """Give the authority a new key. One that is running takes it up within seconds, and nobody is sent away: what the
    old one signed stays good until it expires. Needs root.pem. Raises RunError, KeysError."""
    config = run if isinstance(run, RunConfig) else load_run(run)
    place = Path(folder) if folder else Path(f"{config.run_id}-host")
    keys = _open_keys(config.run_id, _require_authority(config), place / "keys")
    certificate = keys.rotate("authority").certificate
    until = time.strftime("%Y-%m-%d (UTC)", time.gmtime(certificate.not_after))
    say(f"The authority of {config.run_id} signs with a new key from now on; it is renewed by itself before {until}.")


def make_keys(run: str, *, folder: str | Path | None = None, say: Callable[[str], None] = output.say) -> str:
    """The run's keys, made if there are none; :returns: and says the public one, which the run file has to have.

    `run`: the run's id, or its file, which need not be complete yet. Raises RunError, KeysError.
    """
    run_id = run
    if Path(run).is_file():
        run_id = str(read_yaml(read_small(Path(run)), run).values.get("run_id") or "")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", run_id):
        raise RunError(f"{run_id!r} is no run_id: letters, digits, “-”, “_” and “.”, 64 at most.")
    path = (Path(folder) if folder else Path(f"{run_id}-host")) / "keys"
    public_key = KeyFolder(path).create(run_id)
    say(f"The keys of {run_id} are in {path}: keep a copy of root.pem in a safe place. The run file has to have:")
    say(f"authority:\n  public_key: {public_key}")
    return public_key


def _run_file(run: str | Path | RunConfig, folder: Path) -> Path | None:
    """What volunteers are given: the host's own copy, or the file that the authority was started with."""
    given = None if isinstance(run, RunConfig) else Path(run)
    candidates = [folder / "run.yaml", *([given] if given else [])]
    return next((path.absolute() for path in candidates if path.is_file()), None)


def _require_authority(config: RunConfig) -> AuthorityConfig:
    if config.authority is None:
        raise RunError(
            f"The run {config.run_id!r} has no authority in its file.\n"
            "1. volunteer-kit host init  writes a run file that has one.\n"
            "2. Or add to the file: authority: {url: https://NAME, public_key: ..., moderators: [NAME]}"
        )
    return config.authority


def _open_keys(run_id: str, authority: AuthorityConfig, path: Path) -> KeyFolder:
    """Raises RunError, before anybody joins, where volunteers would not believe what these keys sign."""
    keys, trust = KeyFolder(path), Trust.of(run_id, authority.public_key)
    of = keys.run_id
    try:
        if of != run_id:
            raise TokenError("other_run", f"they are of the run {of!r}")
        trust.open(keys.signer("authority").sign("check", b""), "check", "authority", time.time())
    except TokenError as error:
        raise RunError(
            f"Volunteers would not believe the keys in {path}: {error}.\n"
            "1. Start with the folder that has this run's keys: --folder\n"
            "2. Or, with new keys, give out a new run file: authority.public_key must be the keys' own."
        ) from None
    return keys
