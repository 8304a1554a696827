"""Lending this machine to a run: terms -> login -> plan -> worker -> progress -> goodbye.

The kernel of a notebook, or the terminal's process, holds what a person sees; what trains is a process of its own
(stay.py, supervisor.py, worker.py), which finds its device and plan itself.
"""

from __future__ import annotations

import math
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from volunteer_kit import output, packages
from volunteer_kit.addressing import LISTEN
from volunteer_kit.auth.login import Identity, Login
from volunteer_kit.auth.patience import ask_patiently
from volunteer_kit.companion import Companion, swarm_of_two
from volunteer_kit.device import least_memory
from volunteer_kit.home import Home
from volunteer_kit.process_group import sigterm_as_interrupt, stops_as_one
from volunteer_kit.run_reader import RunError
from volunteer_kit.stay import Stay, last_seen, seen_elsewhere
from volunteer_kit.storage.holders import holders, what_is_stopped
from volunteer_kit.storage.places import adopt_home
from volunteer_kit.training.protocol import WorkerSpec
from volunteer_kit.widgets.progress import Progress
from volunteer_kit.widgets.surface import NOT_STARTED, Declined, Surface, open_surface
from volunteer_kit.widgets.terms import Terms
from volunteer_kit.widgets.words import duration, size
from volunteer_kit.worker_end import too_little_memory

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


@output.kept_up()
def join_swarm(
    run: str | Path = "demo",
    *,
    token: str | None = None,
    max_hours: float | None = None,
    max_mbps: float | None = None,
    max_gb: float | None = None,
    client_mode: bool | Literal["auto"] = "auto",
    name: str | None = None,
    hide_name: bool = False,
    data: str | Sequence[str] | None = None,
    allow_private_data: bool = False,
    allow_http: bool = False,
    initial_peers: str | Sequence[str] = (),
    accept_terms: bool = False,
    batch_size: int | None = None,
    home: str | Path | None = None,
    checkpoint_dir: str | Path | None = None,
    host_maddrs: str | Sequence[str] = LISTEN,
    announce_maddrs: str | Sequence[str] = (),
    identity_path: str | Path | None = None,
    new_swarm: bool = False,
    surface: str | Surface = "auto",
) -> Contribution:
    """Train with the swarm of `run` until you stop it, or a cap is reached, or the run is finished.

    It blocks. The stop button, or Ctrl-C, leaves in good order; a second one ends at once. Called again while a worker
    of this machine is in the run, it shows that one; `max_hours` and `max_gb` given then hold for it at once.

    :param run: a run's name, the path or address (https) of its YAML file, or org/name on the Hub
    :param token: a Hugging Face token that can only read; None: found, or asked for, where the run has an authority
    :param max_hours: leave after so long
    :param max_gb: leave after so much was sent and received, of the model and gradients; reading data, and small talk
        with other peers, come on top. `max_mbps`: Mbit/s each way, of the same, when others use the same line
    :param client_mode: True if nobody can connect to this machine, "auto": found out
    :param name: what others see beside your numbers; None: your name on the Hub
    :param hide_name: be "a volunteer", without a name, on the run's public page; your numbers stay. It holds for all
        that you gave and give to this run, until you take part without it
    :param data: shards, for runs that read shards: your own paths, pattern or addresses, which a run from a link cannot
        name
    :param allow_private_data: let a run from a link read data from your own network, too
    :param allow_http: read a run from another machine by http://, where anybody on the way can change it
    :param initial_peers: addresses of peers, if the run's file names none
    :param accept_terms: you know the terms that are shown first (for machines where nobody can press a button)
    :param batch_size: samples at once; None: measured
    :param home: the folder for identity and totals; another one makes a second volunteer of this machine
    :param checkpoint_dir: a folder for checkpoints, if some are to be kept here
    :param new_swarm: start without other peers

    Raises MissingDependency, RunError, DataError, LoginError, SwarmError, each a plain message with the way out, before
    anything starts; what befalls the worker later is in the Contribution.
    """
    adopt_home(home)
    surface = open_surface(surface, accept_terms=accept_terms) if isinstance(surface, str) else surface
    caps = {"max_hours": max_hours, "max_gb": max_gb, "max_mbps": max_mbps}
    signals = ExitStack()
    try:
        signals.enter_context(stops_as_one(surface.say))
        _check_choices(client_mode, batch_size, **caps)
        if _stay is not None and not _stay.over:
            return _attach(_stay, surface, batch_size=batch_size, name=name, hide_name=hide_name or None, **caps)
        with _before_the_start():
            Home(home)  # a user without a home folder learns at once that one must be named
            peers = _listed("--initial-peers", initial_peers, "/ip4/ADDRESS/tcp/PORT/p2p/PEER_ID")
            host_maddrs = _listed("--host-maddrs", host_maddrs, "/ip4/0.0.0.0/tcp/PORT")
            announce_maddrs = _listed("--announce-maddrs", announce_maddrs, "/ip4/PUBLIC.IP/tcp/PORT")
            allowed = {"allow_http": allow_http, "allow_private_data": allow_private_data}
            config, peers = _read(run, data, peers, new_swarm, max_mbps, **allowed)
            house = Home(home, config.run_id, config.fingerprint)
            is_ours = _lock(house)
        if not is_ours:
            return _look_on(house, surface)
        stay = Stay(house, _first_picture(config, house), max_hours=max_hours, max_gb=max_gb)
        try:
            with _before_the_start():
                stay.warm_up()
                who = _welcome(surface, config, run, token, **caps)
                spec = _spec(
                    config, house, peers, who, token, name=name, hide_name=hide_name, client_mode=client_mode,
                    checkpoint_dir=checkpoint_dir, host_maddrs=host_maddrs, announce_maddrs=announce_maddrs,
                    identity_path=identity_path, batch_size=batch_size, max_mbps=max_mbps,
                )  # fmt: skip
                companion, spec = (None, spec) if peers or new_swarm else swarm_of_two(config, house, spec)
                if companion:
                    surface.say("Nobody is in this run; a second volunteer is started on this machine: a swarm of two.")
                _begin(stay, spec, companion)
        except BaseException:
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
        signals.close()


def status() -> Progress | None:
    """What the worker of this machine does now, or did last; None if there never was one that can be read."""
    if _stay is not None:
        return _stay.progress
    pictures = [last_seen(Home(lock.parent)) for lock in Home(None).path.parent.glob("*/volunteer.lock")]
    return max(filter(None, pictures), key=lambda picture: picture.updated, default=None)


# --- before ---


@contextmanager
def _before_the_start() -> Iterator[None]:
    """Who presses stop here has declined."""
    try:
        yield
    except KeyboardInterrupt:
        raise Declined(NOT_STARTED) from None


def _listed(option: str, given: str | Sequence[str], form: str) -> list[str]:
    """Addresses; one string may hold several. Raises RunError for the usual mistakes, HOST:PORT and a missing id."""
    listed = given.replace(",", " ").split() if isinstance(given, str) else [str(one) for one in given or ()]
    for address in listed:
        if not address.startswith("/") or ("/p2p/" in form and "/p2p/" not in address):
            raise RunError(f"{option}: {address!r} is no address.\n1. Write it like {form}")
    return listed


def _read(
    run: str | Path, data: str | Sequence[str] | None, peers: list[str], new_swarm: bool, max_mbps: float | None,
    **allowed: bool,
):  # fmt: skip
    """The run, and whom to ask first. Raises RunError, DataError or MissingDependency."""
    packages.require("train")
    from volunteer_kit.run_sizes import parameters_of
    from volunteer_kit.runs import load_run, require_ready, with_data  # brings torch, which takes seconds

    config = with_data(load_run(run, **allowed), data)
    require_ready(config, max_mbps=max_mbps)
    if too_little := too_little_memory(least_memory(parameters_of(config))):
        raise RunError(too_little)
    peers = peers or [*config.initial_peers]
    if not peers and not new_swarm and config.run_id != "demo":
        raise RunError(
            f"No peer of the run {config.run_id!r} is known, so there is nobody to join.\n"
            "1. Ask the run's host for its address, then: --initial-peers /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID\n"
            f"2. Or be the host yourself: volunteer-kit host {shlex.quote(str(run))}\n"
            "3. Or see a whole swarm on this machine: volunteer-kit demo"
        )
    return config, peers


def _check_choices(client_mode: object, batch_size: object, **numbers: float | None) -> None:
    if batch_size is not None and not (isinstance(batch_size, Integral) and batch_size > 0):
        raise RunError(f"batch_size is {batch_size!r}.\n1. Give a whole number above 0, or leave it out.")
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
    seen = last_seen(house)
    is_fresh = seen is not None and time.time() - seen.updated < STALE
    try:
        is_ours = house.lock(patience=0 if is_fresh else STALE)
    except OSError as error:
        raise RunError(
            f"The folder {house.path}, which keeps who you are in this run, cannot be written: {error.strerror}.\n"
            "1. Make room or name another one: --home FOLDER, or join_swarm(..., home=FOLDER)\n"
            "2. Or move all of the kit's: export VOLUNTEER_KIT_HOME=FOLDER"
        ) from None
    if not is_ours and (holder := house.who_holds()):
        raise RunError(
            f"Another machine seems to train in the folder {house.path}, which keeps who you are in this run.\n"
            f"1. {holder}\n"
            "2. Or give this machine a folder of its own: --home FOLDER, or join_swarm(..., home=FOLDER)"
        )
    try:
        if is_ours:
            house.require_room()
    except OSError as error:
        house.unlock()
        raise RunError(str(error)) from None
    return is_ours


def _login(authority) -> Login | None:
    """With the browser too, where the host has an app of his own for it. Where others than an organization's members
    may come in as well, only the authority knows who."""
    if authority is None:
        return None
    only_members = not (authority.users or authority.moderators or authority.open)
    organization = authority.organization if only_members else None
    return Login(for_authority=True, organization=organization, client_id=authority.oauth_client_id)


def _welcome(surface: Surface, config, run: str | Path, token: str | None, **caps: float | None) -> Identity | None:
    """Terms and login, one screen. :returns: who it is; None where nobody asks."""
    from volunteer_kit.run_data import data_words
    from volunteer_kit.run_sizes import state_bytes, step_bytes

    authority, login = config.authority, _login(config.authority)
    if login is not None:
        ask_patiently(
            lambda: login.find(token),
            lambda trouble, pause: surface.say(f"{trouble.first_line} It is asked again in {pause:.0f} s."),
            time.sleep,
        )
    terms = Terms(
        run=str(run),
        run_id=config.run_id,
        description=config.description,
        help_url=config.help_url,
        download_bytes=state_bytes(config),
        step_bytes=step_bytes(config),
        data=data_words(config),
        checked_by=urlsplit(authority.url).hostname or "" if authority else "",
        **caps,
    )
    surface.welcome(terms, login)
    return login.identity if login is not None else None


def _first_picture(config, house: Home) -> Progress:
    warnings: list[tuple[float, str]] = []
    totals = house.totals(lambda text: warnings.append((time.time(), text)))
    return Progress(
        warnings=warnings,
        run_id=config.run_id,
        description=config.description,
        help_url=config.help_url,
        my_samples=totals.samples,
        my_epochs=totals.epochs,
        my_waiting=totals.waiting_samples,
        total_epochs=config.optimizer.total_epochs,
        target_batch_size=config.target_batch_size,
    )


def _spec(
    config, house: Home, peers: list[str], who: Identity | None, token: str | None, *, name, client_mode,
    checkpoint_dir, identity_path, **chosen,
) -> WorkerSpec:  # fmt: skip
    """What the process that trains is told."""
    return WorkerSpec(
        run=config.dumped_for_worker(),
        name=(name or (who.name if who else "") or f"volunteer-{secrets.token_hex(2)}")[:64],
        initial_peers=peers,
        identity_path=str(identity_path) if identity_path else None,
        client_mode=None if client_mode == "auto" else client_mode,
        checkpoint_dir=str(checkpoint_dir) if checkpoint_dir else None,
        home=str(house.path),
        finish_at=config.optimizer.total_epochs,
        hf_token=who.token if who else token,  # without an authority: for data that are not public
        peer_seed=secrets.randbits(31),
        **chosen,
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
                        return _contribution(stay.progress, stay.home)
                    wishes[wish]()
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts == 1:
                    stay.leave()
                else:
                    stay.close()
    surface.close(stay.progress)
    return _contribution(stay.progress, stay.home)


def _attach(
    stay: Stay, surface: Surface, *, max_hours: float | None, max_gb: float | None, **fixed: object
) -> Contribution:
    """Show the stay that goes on; what was given now holds for it, as far as it can."""
    surface.say(f"Your worker is still in the run {stay.progress.run_id!r}; to join another one, leave it first.")
    stay.limit(max_hours, max_gb)
    limits = [duration(3600 * max_hours)] if max_hours else []
    limits += [size(1e9 * max_gb)] if max_gb else []
    if limits:
        surface.say(f"It leaves after {' or '.join(limits)} now, counted from its beginning.")
    others = [name for name, value in fixed.items() if value not in (None, getattr(stay.spec, name))]
    if others:
        surface.say(f"It keeps the {', '.join(others)} that it began with; to change that, leave and join again.")
    return _accompany(stay, surface)


def _look_on(house: Home, surface: Surface) -> Contribution:
    """Show what another process of this machine does, until it ends or the looking is stopped."""
    where = "This machine trains in this run already, in another window, which holds the controls, Pause and Leave."
    surface.say(f"{where} Stopping here ends only the looking.")
    if stopped := what_is_stopped(house.path, holders(house.path)):
        ways = "\n".join(f"{number}. {way}" for number, way in enumerate(stopped.ways_out, start=1))
        surface.say(f"{stopped.text[0].upper()}{stopped.text[1:]}.\n{ways}")
    with suppress(KeyboardInterrupt), sigterm_as_interrupt():
        while not house.lock():
            surface.show(seen_elsewhere(house))
            if {"leave", "detach"} & {*surface.pump(LOOK_EVERY)}:
                break
    house.unlock()
    progress = seen_elsewhere(house)
    surface.close(progress)
    return _contribution(progress, house)


# --- after ---


def _contribution(progress: Progress, home: Home) -> Contribution:
    totals, error = home.totals(), None
    if progress.state == "failed":
        error = progress.message or f"The training stopped. See the end of the log: tail -n 50 {home.log}"
    return Contribution(totals.samples, totals.epochs, totals.seconds / 3600, progress.share, progress.help_url, error)


def _without_traceback(error: Exception) -> Exception:
    """Errors of the kit are messages to a person; a notebook shows them as they are, not as a stack of calls."""
    if type(error).__module__.startswith("volunteer_kit"):
        error._render_traceback_ = lambda: str(error).splitlines()  # type: ignore[attr-defined]
    return error
