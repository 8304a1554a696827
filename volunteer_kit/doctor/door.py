"""A checkup of this machine, and of a run as it looks from here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from volunteer_kit import output
from volunteer_kit.doctor import locks, looks, process, start_method, stopped, verdicts
from volunteer_kit.doctor.finding import Finding, report
from volunteer_kit.doctor.line import Line
from volunteer_kit.doctor.logs import logs
from volunteer_kit.doctor.looks import Look
from volunteer_kit.doctor.memory_limit import limit_of_memory
from volunteer_kit.doctor.proxies import proxies
from volunteer_kit.doctor.records import Told, kit, records, settings, wrong_clock
from volunteer_kit.doctor.same_key import same_key
from volunteer_kit.doctor.same_key import verdict as key_verdict
from volunteer_kit.doctor.steady_clock import steady_clock
from volunteer_kit.process_group import stops_as_one
from volunteer_kit.storage.places import NoHome, adopt_home, expanded, kit_folder

SHORT, LOADING, PEERS = 25.0, 60.0, 90.0  # s that a check may take; importing torch on two busy cores takes 20
HUB = "https://huggingface.co"
NOWHERE = "http://127.0.0.1:1"  # of an authority that was never started


class HostSide(NamedTuple):
    """What the folder of a host says."""

    folder: Path
    saved: dict[str, Any]  # host.json; {}: no host was started yet
    is_running: bool = False


@dataclass
class Said:
    """The things that a run's others have told about themselves.

    :ivar kit_of_host: its kit's version, by its authority; None: it did not answer
    :ivar records: of the peers of an open run; None: they could not be read
    """

    kit_of_host: str | None = None
    records: Told | None = None


def doctor(
    run: str | Path | None = None,
    *,
    folder: str | Path | None = None,
    home: str | Path | None = None,
    say: Callable[[str], None] = output.say,
) -> list[Finding]:
    """Look at everything at the same time, and tell what is wrong and what to do.

    :param run: a run's name, file, link or Hub id; None: only this machine
    :param folder: of the run's host, if this machine is it; found by itself where `volunteer-kit host` left it
    :param home: where a volunteer's files go; default: $VOLUNTEER_KIT_HOME or ~/.cache/volunteer_kit
    :returns: all findings; taking part can succeed if none is a problem
    """
    with stops_as_one(say, "the checkup"):
        return _examine(run, folder, home, say)


def _examine(
    run: str | Path | None, folder: str | Path | None, home: str | Path | None, say: Callable[[str], None]
) -> list[Finding]:
    surroundings = process.look(home)
    adopt_home(home)
    is_steady, line = steady_clock(), Line()
    pending = [
        Look("device", LOADING, lambda: looks.device(LOADING - 1)),
        Look(start_method.NAME, SHORT, lambda: start_method.start_method(SHORT - 1)),
        Look("open files", SHORT, looks.open_files),
    ]
    findings = [verdicts.current_python(), *surroundings]
    config, run_finding = _load(run, folder) if run is not None else (None, None)
    purpose = "finetune" if config is not None and not config.draws else "train"
    findings.append(Look("packages", SHORT, lambda: looks.packages(purpose)).finding())
    houses = _houses(home, config)
    pending += _looks_that_depend_on(config, _home(home), houses, line)
    findings += [look.finding() for look in pending]
    if run_finding is not None:
        findings.append(run_finding)
    host = None
    if config is not None:
        host = host_side(run, config.run_id, folder)
        if host is None and _has_no_key_yet(config):
            host = HostSide(_host_folder(config.run_id, folder), {})
        if host is not None and not host.saved:
            findings.append(verdicts.not_started(str(run)))
        findings += _of_run(config, host, houses[0] if houses else None, line)
    if run is not None:
        is_host = host is not None or (config is None and folder is not None)
        findings.append(Look("host packages", SHORT, lambda: looks.host_packages(is_host)).finding())
    findings.append(Look("line", SHORT, lambda: line.finding(looks.situation())).finding())
    findings.append(is_steady())
    for line_of_report in report(findings):
        say(line_of_report)
    return findings


def _houses(home: str | Path | None, config: Any) -> list[Path]:
    """The folder of the run's volunteer here, or those of all runs."""
    from volunteer_kit.home import Home

    try:
        if home or config is not None:
            return [Home(home, *([config.run_id, config.fingerprint] if config is not None else [])).path]
        return sorted(path for path in (kit_folder() / "runs").glob("*") if path.is_dir())
    except NoHome:  # told among the surroundings
        return []


def _load(run: str | Path, folder: str | Path | None) -> tuple[Any, Finding]:
    """The run, if it can be read within a minute."""
    loaded: list[Any] = []

    def load() -> Finding:
        from volunteer_kit.run_reader import RunError

        try:
            config = _read(run, folder)
        except RunError as error:
            return verdicts.run_file(str(error))
        loaded.append(config)
        return verdicts.run_file(None, config.run_id, config.fingerprint, is_open=config.authority is None)

    finding = Look("run file", LOADING, load).finding()
    return (loaded[0] if loaded else None), finding


def _read(run: str | Path, folder: str | Path | None) -> Any:
    """The run as its volunteers know it: of a host's own file, which need not say where its authority is, the one that
    the host made of it. Before its first start something holds the place of address and key. Raises RunError."""
    from volunteer_kit.auth.keys import NO_KEY
    from volunteer_kit.run_reader import find_run_file, read_small, read_yaml
    from volunteer_kit.runs import checked, load_run

    path = find_run_file(str(run))
    text = read_yaml(read_small(path), str(path))
    said = text.values.get("authority")
    lacks = isinstance(said, dict) and not {"url", "public_key"} <= said.keys()
    if lacks:
        text.values["authority"] = {"url": NOWHERE, "public_key": NO_KEY, **said}
    config = checked(text)
    written = _host_folder(config.run_id, folder) / "run.yaml"
    if config.authority is not None and written.is_file() and not written.samefile(path):
        found = load_run(written)
        same_key = found.authority is not None and found.authority.public_key == config.authority.public_key
        if found.run_id == config.run_id and (lacks or same_key):
            return found
    return config


def _has_no_key_yet(config: Any) -> bool:
    from volunteer_kit.auth.keys import NO_KEY

    return config.authority is not None and config.authority.public_key == NO_KEY


def _host_folder(run_id: str, folder: str | Path | None) -> Path:
    return Path(folder) if folder else Path(f"{run_id}-host")


def _looks_that_depend_on(config: Any, home: Path, houses: list[Path], line: Line) -> list[Look]:
    """:param houses: folders of volunteers here"""
    parameters = state = None
    if config is not None:
        from volunteer_kit.run_sizes import parameters_of, state_bytes

        with suppress(ImportError):  # told among the packages
            parameters, state = parameters_of(config), state_bytes(config)
    endpoint = os.environ.get("HF_ENDPOINT", HUB).rstrip("/")
    has_authority = config is not None and config.authority is not None
    needs_hub = has_authority or (config is not None and _reads_from_hub(config))
    clocks = [config.authority.url] if has_authority and config.authority.url != NOWHERE else []
    return [
        Look("memory", SHORT, lambda: looks.memory(parameters)),
        Look("memory limit", SHORT, lambda: limit_of_memory(parameters)),
        Look("disk", SHORT, lambda: looks.disk(home, parameters, state)),
        Look("locks", SHORT, lambda: locks.look(home)),
        Look("volunteer", SHORT, lambda: stopped.look("volunteer", houses)),
        Look("logs", SHORT, lambda: logs(houses)),
        Look("proxies", SHORT, lambda: proxies([*clocks, *[endpoint] * needs_hub])),
        Look("Hub", SHORT, lambda: looks.hub(endpoint, needs_hub, line)),
        Look("clock", 2 * SHORT, lambda: looks.clock([*clocks, endpoint])),
    ]


def _reads_from_hub(config: Any) -> bool:
    if config.data is None:  # a fine-tune; its base is the Hub's, unless it is a folder of this machine
        return config.model.transformers is not None and not Path(config.model.transformers).is_dir()
    return config.data.kind == "hub" or config.text_tokenizer.startswith("hub:")


def _of_run(config: Any, host: HostSide | None, house: Path | None, line: Line) -> list[Finding]:
    """:param house: the folder of the run's volunteer on this machine; None: there can be none"""
    own = str(host.saved.get("peer_id")) if host else ""
    is_running = bool(host and host.is_running)
    addresses = [a for a in config.initial_peers if is_running or not own or not a.endswith(own)]
    port = 0
    later: list[Look] = []
    said = Said()
    key = house / "identity.key" if house is not None and host is None else None
    trains_here = house is not None and stopped.is_at_work(house)
    if config.authority is not None and (host is None or is_running):
        later.append(Look("authority", 2 * SHORT, lambda: _authority(config, host, line, said)))
    if host is not None and host.saved:
        later.append(Look("ports", SHORT, lambda: _ports(host)))
        later.append(Look("host process", SHORT, lambda: stopped.look("host process", [host.folder])))
        later.append(Look("host logs", SHORT, lambda: logs([host.folder])._replace(name="host logs")))
        port = 0 if is_running else _peer_port(host.saved)

    def records_of_run() -> Finding:
        asks_for_key = key is not None and key.is_file() and not trains_here
        said.records = records(config.run_id, key if asks_for_key else None, addresses, PEERS - 1)
        return _kit(config, said)

    is_readable = config.authority is None and bool(addresses)
    reading = Look("kit", PEERS, records_of_run) if is_readable else None
    if key is not None:
        later.append(Look("key", PEERS, lambda: same_key(key, addresses, trains_here, PEERS - 1)))
    both: list[Finding] = []

    def peers() -> Finding:
        both.extend(looks.first_peers_and_reach(addresses, port, PEERS - 1, host is not None, not is_running, line))
        return both[0]

    first = Look("first peers", PEERS, peers).finding()
    found = both or [first, Finding("reachable", "warning", "could not be checked, as no peer could be started here")]
    found += [look.finding() for look in later]
    found.append(reading.finding() if reading is not None else _kit(config, said))
    told = said.records or Told()
    if told.is_key_taken and key is not None:  # by a machine that nobody can call, perhaps
        found = [key_verdict(key, True) if one.name == "key" else one for one in found]
    found += [settings(told.fingerprints, config.fingerprint), wrong_clock(told.wrong_clock)]
    return [one for one in found if one is not None]


def _kit(config: Any, said: Said) -> Finding:
    from volunteer_kit import __version__

    if config.authority is not None:
        return kit([said.kit_of_host] if said.kit_of_host else [], __version__, "the run's host", is_one=True)
    return kit(said.records.kits if said.records is not None else [], __version__, "the run's peers")


def _authority(config: Any, host: HostSide | None, line: Line, said: Said) -> Finding:
    found, said.kit_of_host = looks.authority(config, line)
    if host is None or found.level != "problem":
        return found
    return found._replace(way_out=f"Look at its log: {host.folder / 'logs' / 'authority.log'}")


def host_side(run: str | Path | None, run_id: str, folder: str | Path | None) -> HostSide | None:
    """Is this machine the run's host? Then its folder is named, or holds the run file, or lies where it is made."""
    places = [Path(folder)] if folder else [expanded(str(run)).parent, Path(f"{run_id}-host")]
    for place in places:
        try:
            saved = json.loads((place / "host.json").read_text())
        except (OSError, ValueError):
            continue
        if isinstance(saved, dict) and saved.get("run_id") == run_id:
            return HostSide(place, saved, _is_locked(place / "host.lock"))
    place = _host_folder(run_id, folder)
    if place.is_dir() and {path.name for path in place.iterdir()} == {"keys"}:
        return HostSide(place, {})  # as `host init` leaves it
    return None


def _is_locked(path: Path) -> bool:
    from volunteer_kit.storage.locks import is_locked

    try:
        return is_locked(path)
    except OSError:
        return True  # it is another user's


def _ports(host: HostSide) -> Finding:
    wanted = {"authority": host.saved.get("port"), "dashboard": host.saved.get("dashboard_port")}
    wanted["first peer"] = _peer_port(host.saved)
    taken = {}
    for what, port in wanted.items():
        if not isinstance(port, int) or not port or host.is_running:
            continue
        if _is_answered(port):
            taken[what] = port
    return verdicts.ports(taken, host.is_running)


def _is_answered(port: int) -> bool:
    """Does a program of this machine take calls there, by IPv4 or by IPv6?"""
    import socket

    for address in ("127.0.0.1", "::1"):
        with suppress(OSError), socket.create_connection((address, port), timeout=2):
            return True
    return False


def _peer_port(saved: dict[str, Any]) -> int:
    for maddr in saved.get("host_maddrs") or ():
        words = str(maddr).split("/")
        if "tcp" in words[:-1] and words[words.index("tcp") + 1].isdecimal():
            return int(words[words.index("tcp") + 1])
    return 0


def _home(home: str | Path | None) -> Path:
    try:
        return expanded(home) if home else kit_folder()
    except NoHome:  # told among the surroundings
        return Path.cwd()
