"""Lending this machine to a run: terms -> login -> plan -> worker -> progress -> goodbye.

The kernel of a notebook, or the terminal's process, holds what a person sees; what trains is a process of its own
(stay.py, supervisor.py, worker.py), which finds its device and plan itself.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from volunteer_kit.auth.login import Identity, Login
from volunteer_kit.companion import LOOPBACK, Companion
from volunteer_kit.home import Home
from volunteer_kit.process_group import sigterm_as_interrupt
from volunteer_kit.run_reader import RunError
from volunteer_kit.stay import Stay
from volunteer_kit.training.protocol import WorkerSpec
from volunteer_kit.widgets.progress import Progress
from volunteer_kit.widgets.surface import Declined, Surface, open_surface
from volunteer_kit.widgets.terms import Terms

STALE = 15.0  # s without a word from the process that trains
LOOK_EVERY = 0.2  # s between two looks at the worker's picture

_stay: Stay | None = None  # of this process; it goes on when a cell is run again


@dataclass(frozen=True)
class Contribution:
    """What this machine has given to a run, in all its stays."""

    samples: int  # that entered applied steps
    epochs: int  # applied steps that held some of them
    hours: float  # of training
    share: float | None  # of the samples of all volunteers that were here at the end, 0 to 1
    where: str  # to see it
    error: str | None = None  # in plain words, if the worker could not go on


def join_swarm(
    run: str | Path = "demo",
    *,
    token: str | None = None,
    max_hours: float | None = None,
    max_mbps: float | None = None,
    max_gb: float | None = None,
    client_mode: bool | Literal["auto"] = "auto",
    name: str | None = None,
    data: str | Sequence[str] | None = None,
    initial_peers: Sequence[str] = (),
    accept_terms: bool = False,
    batch_size: int | None = None,
    home: str | Path | None = None,
    checkpoint_dir: str | Path | None = None,
    host_maddrs: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
    announce_maddrs: Sequence[str] = (),
    identity_path: str | Path | None = None,
    new_swarm: bool = False,
    surface: str | Surface = "auto",
) -> Contribution:
    """Train with the swarm of `run` until you stop it, or a cap is reached, or the run is finished.

    It blocks. The stop button, or Ctrl-C, leaves in good order; a second one ends at once. Called again while a worker
    of this machine is in the run, it shows that one.

    :param run: a run's name, the path or address (https) of its YAML file, or org/name on the Hub
    :param token: a Hugging Face token that can only read; None: found, or asked for, where the run has an authority
    :param max_hours: leave after so long; `max_gb`: after so much was sent and received; `max_mbps`: Mbit/s each way,
        when others use the same line
    :param client_mode: True if nobody can connect to this machine, "auto": found out
    :param name: what others see beside your numbers; None: your name on the Hub
    :param data: shards, for runs that read shards: paths, pattern or addresses
    :param initial_peers: addresses of peers, if the run's file names none
    :param accept_terms: you know the terms that are shown first (for machines where nobody can press a button)
    :param batch_size: samples at once; None: measured
    :param home: the folder for identity and totals; another one makes a second volunteer of this machine
    :param checkpoint_dir: a folder for checkpoints, if some are to be kept here
    :param new_swarm: start without other peers

    Raises RunError, DataError, LoginError, SwarmError, each a plain message with the way out, before anything starts;
    what befalls the worker later is in the Contribution.
    """
    surface = open_surface(surface, accept_terms=accept_terms) if isinstance(surface, str) else surface
    try:
        _check_choices(client_mode, max_hours=max_hours, max_mbps=max_mbps, max_gb=max_gb, batch_size=batch_size)
        if _stay is not None and not _stay.over:
            return _attach(_stay, surface)
        stay = None
        try:
            config, peers = _read(run, data, initial_peers, host_maddrs, announce_maddrs, new_swarm)
            house = Home(home, config.run_id, config.fingerprint)
            if not _lock(house):
                return _look_on(house, surface)
            stay = Stay(house, _first_picture(config, house), max_hours=max_hours, max_gb=max_gb)
            stay.warm_up()
            who = _welcome(surface, config, token, max_hours=max_hours, max_mbps=max_mbps, max_gb=max_gb)
            local = not peers and not new_swarm
            spec = WorkerSpec(
                run=config.model_dump(mode="json"),
                name=(name or (who.name if who else "") or f"volunteer-{secrets.token_hex(2)}")[:64],
                initial_peers=peers,
                host_maddrs=[f"{LOOPBACK}/0"] if local else [*host_maddrs],
                announce_maddrs=[*announce_maddrs],
                identity_path=str(identity_path) if identity_path else None,
                client_mode=None if client_mode == "auto" else client_mode,
                checkpoint_dir=str(checkpoint_dir or house.checkpoints) if checkpoint_dir or local else None,
                home=str(house.path),
                batch_size=batch_size,
                peers_on_machine=2 if local else 1,
                max_mbps=max_mbps,
                finish_at=config.optimizer.total_epochs,
                hf_token=who.token if who else None,
                peer_seed=secrets.randbits(31),
            )
            if local:
                surface.say("Nobody is in this run, so a second volunteer is started on this machine: a swarm of two.")
            _begin(stay, spec, Companion(config, Home(house.path / "companion")) if local else None)
        except BaseException:
            if stay is not None:
                stay.close()
            raise
        return _accompany(stay, surface)
    except Declined as refusal:
        surface.say(str(refusal))
        return Contribution(0, 0, 0.0, None, "")
    except Exception as error:
        raise _without_traceback(error)  # noqa: B904
    finally:
        surface.close()


def status() -> Progress | None:
    """What the worker of this machine does now, or did last; None if there never was one."""
    if _stay is not None:
        return _stay.progress
    states = [Home(lock.parent).status() for lock in Home(None).path.parent.glob("*/volunteer.lock")]
    newest = max(filter(None, states), key=lambda state: state.get("updated", 0), default=None)
    return Progress.from_dict(newest) if newest else None


# --- before ---


def _read(run, data, initial_peers, host_maddrs, announce_maddrs, new_swarm):
    """The run, and whom to ask first. Raises RunError or DataError."""
    _check_addresses("--initial-peers", initial_peers, "/ip4/ADDRESS/tcp/PORT/p2p/PEER_ID")
    _check_addresses("--host-maddrs", host_maddrs, "/ip4/0.0.0.0/tcp/PORT")
    _check_addresses("--announce-maddrs", announce_maddrs, "/ip4/PUBLIC.IP/tcp/PORT")
    from volunteer_kit.runs import load_run, require_ready, with_data  # brings torch, which takes seconds

    config = with_data(load_run(run), data)
    require_ready(config)
    peers = [*initial_peers] or [*config.initial_peers]
    if not peers and not new_swarm and config.run_id != "demo":
        raise RunError(
            f"No peer of the run {config.run_id!r} is known, so there is nobody to join.\n"
            "1. Ask the run's host for its address, then: --initial-peers /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID\n"
            f"2. Or be the host yourself: volunteer-kit host {config.run_id}\n"
            "3. Or see a whole swarm on this machine: volunteer-kit demo"
        )
    return config, peers


def _check_addresses(option: str, addresses: Sequence[str], form: str) -> None:
    """Tell the usual mistakes, HOST:PORT and a missing id, in an instant; the worker's peer checks the rest."""
    for address in addresses:
        if not address.startswith("/") or ("/p2p/" in form and "/p2p/" not in address):
            raise RunError(f"{option}: {address!r} is no address.\n1. Write it like {form}")


def _check_choices(client_mode: object, **numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
            raise RunError(f"{name} is {value!r}.\n1. Give a number above 0, or leave it out.")
    if client_mode not in ("auto", True, False):
        raise RunError(
            f"client_mode is {client_mode!r}.\n1. Leave it out: it is found out whether others can call this machine.\n"
            "2. Or say so: True if nobody can, False if they can."
        )


def _lock(house: Home) -> bool:
    """Be the one who trains in this run here; False while another process is."""
    try:
        return house.lock(patience=0 if _is_fresh(house) else STALE)
    except OSError as error:
        raise RunError(
            f"The folder {house.path}, which keeps who you are in this run, cannot be written: {error.strerror}.\n"
            "1. Make room or name another one: --home FOLDER, or join_swarm(..., home=FOLDER)\n"
            "2. Or move all of the kit's: export VOLUNTEER_KIT_HOME=FOLDER"
        ) from None


def _welcome(surface: Surface, config, token: str | None, **caps: float | None) -> Identity | None:
    """Terms and login, one screen. :returns: who it is; None where nobody asks."""
    from volunteer_kit.runs import state_bytes, step_bytes

    authority = config.authority
    login = Login(for_authority=True, organization=authority.organization) if authority else None
    if login is not None:
        login.find(token)
    terms = Terms(
        run_id=config.run_id,
        description=config.description,
        help_url=config.help_url,
        download_bytes=state_bytes(config),
        step_bytes=step_bytes(config),
        checked_by=urlsplit(authority.url).hostname or "" if authority else "",
        **caps,
    )
    surface.welcome(terms, login)
    return login.identity if login is not None else None


def _first_picture(config, house: Home) -> Progress:
    totals = house.totals()
    return Progress(
        run_id=config.run_id,
        description=config.description,
        help_url=config.help_url,
        my_samples=totals.samples,
        my_epochs=totals.epochs,
        total_epochs=config.optimizer.total_epochs,
        target_batch_size=config.target_batch_size,
    )


def _begin(stay: Stay, spec: WorkerSpec, companion: Companion | None) -> None:
    global _stay
    stay.begin(spec, companion)
    _stay = stay


# --- while it trains ---


def _accompany(stay: Stay, surface: Surface) -> Contribution:
    """Show the stay until it is over, or the cell is run again."""
    interrupts = 0
    wishes = {"pause": stay.pause, "resume": stay.resume, "leave": stay.leave}
    with sigterm_as_interrupt():
        while not stay.over:
            try:
                surface.show(stay.progress)
                for wish in surface.pump(LOOK_EVERY):
                    if wish == "detach":
                        surface.say("The cell was run again: the newer one shows the training, which goes on.")
                        return _contribution(stay)
                    wishes[wish]()
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts == 1:
                    stay.leave()
                else:
                    stay.close()
    surface.close(stay.progress)
    return _contribution(stay)


def _attach(stay: Stay, surface: Surface) -> Contribution:
    surface.say(f"Your worker is still in the run {stay.progress.run_id!r}; to join another one, leave it first.")
    return _accompany(stay, surface)


def _look_on(house: Home, surface: Surface) -> Contribution:
    """Show what another process of this machine does, until it ends or the looking is stopped."""
    surface.say("This machine trains in this run already, in another window. Stopping here ends only the looking.")
    try:
        with sigterm_as_interrupt():
            while not house.lock():
                surface.show(_shown_elsewhere(house))
                surface.pump(LOOK_EVERY)
    except KeyboardInterrupt:
        pass
    house.unlock()
    progress, totals = _shown_elsewhere(house), house.totals()
    surface.close(progress)
    return Contribution(totals.samples, totals.epochs, totals.seconds / 3600, progress.share, progress.help_url)


def _shown_elsewhere(house: Home) -> Progress:
    try:
        return Progress.from_dict(house.status())
    except (ValueError, TypeError):  # of another version
        return Progress(state="training")


def _is_fresh(house: Home) -> bool:
    """Whether a process that trains here has said something lately."""
    return time.time() - float(house.status().get("updated") or 0) < STALE


# --- after ---


def _contribution(stay: Stay) -> Contribution:
    progress, totals = stay.progress, stay.home.totals()
    error = progress.message if progress.state == "failed" else None
    where = progress.help_url
    return Contribution(totals.samples, totals.epochs, totals.seconds / 3600, progress.share, where, error)


def _without_traceback(error: Exception) -> Exception:
    """Errors of the kit are messages to a person; a notebook shows them as they are, not as a stack of calls."""
    if type(error).__module__.startswith("volunteer_kit"):
        error._render_traceback_ = lambda: str(error).splitlines()  # type: ignore[attr-defined]
    return error
