"""What measured facts mean: pure functions, one a check."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from volunteer_kit.device.plan import least_memory
from volunteer_kit.doctor.finding import Finding, Level
from volunteer_kit.packages import Lack
from volunteer_kit.swarm.net.clock_watch import LIMIT, SET_CLOCK, in_words

GB = 1e9
CHECKPOINTS = 3  # kept at a time, and one that is being written
NODE_STATES = 2  # that a node keeps for newcomers
NODE_SLOTS = 6  # of gradients, float32, in its file: granted ones, and those on their way into a step
CERTIFICATE_SOON = 14.0  # days
OPEN_FILES = 65_536  # every tensor that crosses processes holds a file; 1,024 end a run after minutes


def python(version: Sequence[int]) -> Finding:
    text = ".".join(map(str, version[:3]))
    if tuple(version[:2]) < (3, 10):
        return Finding("Python", "problem", f"{text}; the kit needs 3.10 or newer", "https://www.python.org/downloads")
    return Finding("Python", "ok", text)


def packages(
    lacks: Sequence[Lack], needed: Sequence[Lack], versions: Mapping[str, str | None], way_out: str
) -> Finding:
    """Of who trains.

    :param lacks: all that is absent, or older than the kit asks for
    :param needed: those of them without which training cannot begin
    :param versions: of the packages that decide most
    """
    if lacks:
        return Finding("packages", "problem" if needed else "warning", _told(lacks), way_out)
    return Finding("packages", "ok", ", ".join(f"{name} {version}" for name, version in versions.items() if version))


def host_packages(lacks: Sequence[Lack], way_out: str, is_host: bool) -> Finding:
    """Of who hosts a run; for others that is a remark."""
    if lacks:
        text = _told(lacks) if is_host else f"only a host needs them: {_told(lacks)}"
        return Finding("host packages", "problem" if is_host else "ok", text, way_out)
    return Finding("host packages", "ok", "all are there")


def _told(lacks: Sequence[Lack]) -> str:
    absent = [lack.name for lack in lacks if lack.found is None]
    wrong = [f"{lack.name} {lack.found} (needs {lack.line[len(lack.name) :]})" for lack in lacks if lack.found]
    return "; ".join([*([f"missing: {', '.join(absent)}"] if absent else []), *wrong])


def device(name: str, kind: str, free_gb: float, problems: Sequence[str]) -> Finding:
    """:param problems: accelerators that are here but cannot be used, each with what to do"""
    if problems:
        first, _, rest = problems[0].partition("\n")
        return Finding("device", "warning", f"{first} Training would use {name}.", rest.strip() or "see above")
    if kind == "cpu":
        return Finding("device", "ok", f"{name}; no GPU was found, so it trains slowly")
    return Finding("device", "ok", f"{name}, {free_gb:.1f} GB free")


def memory(total: float, free: float, parameters: int | None) -> Finding:
    """Bytes of RAM that this process may have. :param parameters: of the run's model; None: no run was given"""
    need = least_memory(parameters or 0)
    text = f"{free / GB:.1f} of {total / GB:.1f} GB free; training needs about {need / GB:.1f}"
    if total < need:
        return Finding("memory", "problem", text, "Use a machine with more memory, or join a smaller run.")
    if free < need:
        return Finding("memory", "warning", text, "Close other programs; who takes most: ps aux --sort=-rss | head")
    return Finding("memory", "ok", text)


def disk(folder: str, free: float, parameters: int | None, state_bytes: int | None) -> Finding:
    """Free bytes where checkpoints, the node's files and the cache lie.

    :param parameters: that the run's model learns, :param state_bytes: of weights and statistics; None: no run was
        given
    """
    need = 1 * GB + (CHECKPOINTS + 1 + NODE_STATES) * (state_bytes or 0) + NODE_SLOTS * 4 * (parameters or 0)
    text = f"{free / GB:.1f} GB free in {folder}; about {need / GB:.1f} are needed"
    way_out = f"Make room (du -xh {folder} | sort -h | tail), or choose another disk: export VOLUNTEER_KIT_HOME=/PATH"
    if free < need / 4:
        return Finding("disk", "problem", text, way_out)
    return Finding("disk", "warning", text, way_out) if free < need else Finding("disk", "ok", text)


def open_files(hard: float) -> Finding:
    """:param hard: the limit that this process cannot lift"""
    way_out = "ulimit -Hn 65536 as root, or LimitNOFILE=65536 in the service (docker run --ulimit nofile=65536)"
    if hard < 4096:
        return Finding("open files", "problem", f"at most {hard:.0f} at once; training needs thousands", way_out)
    if hard < OPEN_FILES:
        return Finding("open files", "warning", f"at most {hard:.0f} at once, {OPEN_FILES} are better", way_out)
    return Finding("open files", "ok", f"up to {hard:.0f}" if hard != float("inf") else "no limit")


def clock(offset: float | None, uncertainty: float, source: str, synchronized: bool | None) -> Finding:
    """:param offset: s that this machine is behind `source`; None: nobody told the time
    :param synchronized: what the system says about NTP; None: it does not say"""
    way_out = f"{SET_CLOCK}   (in a notebook: restart its machine)"
    ntp = {True: "; set from the network", False: "; not set from the network", None: ""}[synchronized]
    if offset is None:
        level = "ok" if synchronized else "warning"
        return Finding("clock", level, f"nobody could be asked for the time{ntp}", "" if synchronized else way_out)
    off = abs(offset)
    told = f"{off:.1f} s" if off < 90 else in_words(off)
    text = f"{told} {'behind' if offset > 0 else 'ahead of'} {source} (±{uncertainty:.1f} s){ntp}"
    if off - uncertainty > LIMIT:
        return Finding("clock", "problem", f"{text}; others refuse a peer that is more than {LIMIT:.0f} s off", way_out)
    if off - uncertainty > LIMIT / 2 or synchronized is False:
        return Finding("clock", "warning", text, way_out)
    return Finding("clock", "ok", text)


def hub(endpoint: str, error: str | None, seconds: float, needed: bool, status: int = 0) -> Finding:
    """:param error: what it does instead of answering well ("does not answer: ..."); None: it answers well
    :param needed: the run's login or data are there
    :param status: of HTTP, that it has answered with; 0: it has not answered"""
    if error is None:
        return Finding("Hub", "ok", f"{endpoint} answers in {seconds:.1f} s")
    level: Level = "problem" if needed else "warning"
    if not status:
        way_out = f"curl -I {endpoint}   shows why (behind a proxy: export HTTPS_PROXY=http://HOST:PORT)"
        return Finding("Hub", level, f"{endpoint} {error}", way_out)
    text = f"{endpoint} {error}"
    if passes_by_itself(status):
        return Finding("Hub", level, text, f"{WAIT} The Hub tells of its troubles at https://status.huggingface.co")
    return Finding("Hub", level, text, f"curl -I {endpoint}   shows it; is HF_ENDPOINT right?")


WAIT = "Wait: a first join asks again by itself, for 15 minutes."


def passes_by_itself(status: int) -> bool:
    """Whether an answer of HTTP says "later"."""
    return status in (408, 429) or status >= 500


def status_words(status: int, wait: float | None) -> str:
    """An answer of HTTP that helps nobody, in words. :param wait: s that it asks us to wait; None: it does not say"""
    why = ""
    if status == 429:
        why = ", for it is asked too often from this network"
    elif status >= 500:
        why = ": it is up, and has trouble of its own"
    later = f"; to be asked again in {in_words(wait)}" if wait else ""
    return f"answers with HTTP {status}{why}{later}"


def run_file(error: str | None, run_id: str = "", fingerprint: str = "", is_open: bool = False) -> Finding:
    if error is not None:
        first, _, rest = error.partition("\n")
        return Finding("run file", "problem", first, rest or "Ask the host for the right link.")
    door = "everybody may join" if is_open else "its authority lets people in"
    return Finding("run file", "ok", f"{run_id}, fingerprint {fingerprint[:8]}; {door}")


def first_peers(results: Mapping[str, str], is_host: bool = False) -> Finding:
    """:param results: address -> "" if it answered as who it should be, or why not
    :param is_host: the run's host asks: its own peer may be meant"""
    if not results:
        way_out = "" if is_host else "Ask the host for a link whose run file has initial_peers."
        text = "no others than this machine's" if is_host else "the run file names none"
        return Finding("first peers", "ok" if is_host else "warning", text, way_out)
    silent = {address: why for address, why in results.items() if why}
    text = f"{len(results) - len(silent)} of {len(results)} answer"
    if not silent:
        return Finding("first peers", "ok", text)
    told = "\n".join(f"{address}: {why}" for address, why in list(silent.items())[:4])
    if len(silent) == len(results):
        help_line = "Look at its log: logs/first-peer.log" if is_host else "Ask the host whether the run is up."
        return Finding("first peers", "problem", text, f"{told}\n{help_line}")
    return Finding("first peers", "warning", text, told)


def reach(
    client_mode: bool,
    why: str,
    answers: Mapping[str, str],
    situation: str = "",
    why_not_asked: str = "there is no peer to ask",
    is_host: bool = False,
) -> Finding:
    """Can others call this machine?

    :param client_mode, why: what a peer of this machine finds out when it joins
    :param answers: "IPv4", "IPv6" -> what peers said that tried: "reached", "not reached", or why none could try
    :param situation: what kind of line or machine this is
    """
    port = "--host-maddrs /ip4/0.0.0.0/tcp/31337 --announce-maddrs /ip4/YOUR.PUBLIC.IP/tcp/31337"
    open_it = f"Open TCP port 31337 in the firewall, forward it in the router, and start with: {port}"
    kind = f"{situation}: " if situation else ""
    reached = [family for family, said in answers.items() if said == "reached"]
    vainly = [family for family, said in answers.items() if said == "not reached"]
    if reached:
        text = f"{kind}a peer of the run reached this machine by {' and '.join(reached)}"
        text += f", none by {' or '.join(vainly)}" if vainly else ""
        if client_mode:
            return Finding("reachable", "ok", f"{text}, though {why}", f"It could reduce for others: {port}")
        return Finding("reachable", "ok", text)
    if vainly:
        by = " or ".join(vainly)
        if is_host:
            text = f"{kind}a peer of the run could not reach this machine by {by}"
            return Finding("reachable", "problem", text, open_it)
        text = f"{kind}others cannot call this machine by {by}; it trains in client mode: it calls them"
        return Finding("reachable", "ok" if client_mode else "warning", text, "" if client_mode else open_it)
    from_outside = "From another network: nc -vz YOUR.PUBLIC.IP 31337"
    why_not = "; ".join(f"{family}: {said}" for family, said in answers.items()) or why_not_asked
    text = f"{kind}{why}; from outside it could not be checked ({why_not})"
    return Finding("reachable", "warning" if is_host else "ok", text, from_outside if is_host else "")


def authority(url: str, error: str | None, certificate_days: float | None, status: int = 0) -> Finding:
    """:param error: what it does instead of answering well ("does not answer: ..."); None: it answers well
    :param certificate_days: until its certificate ends; None: not https, or not known
    :param status: of HTTP, that it has answered with; 0: it has not answered"""
    if error is not None:
        ask = f"{WAIT} Then ask" if status == 0 or passes_by_itself(status) else "Ask"
        way_out = f"{ask} the host, who can look on its machine: volunteer-kit doctor RUN"
        return Finding("authority", "problem", f"{url} {error}", way_out)
    if certificate_days is None:
        return Finding("authority", "ok", f"{url} answers, on this machine, in clear text")
    text = f"{url} answers; its certificate is good for {certificate_days:.0f} days"
    if certificate_days < CERTIFICATE_SOON:
        return Finding("authority", "warning", text, "The host renews it: certbot renew (Caddy does it by itself)")
    return Finding("authority", "ok", text)


def not_started(run: str) -> Finding:
    """Of the run's host, on its own machine."""
    return Finding("host", "ok", f"not started yet: volunteer-kit host {run}")


def ports(taken: Mapping[str, int], is_running: bool) -> Finding:
    """:param taken: what for -> port that somebody has
    :param is_running: this run's host has them"""
    if is_running:
        return Finding("ports", "ok", "this run's host is running")
    if taken:
        told = ", ".join(f"{port} ({what})" for what, port in taken.items())
        way_out = f"ss -ltnp 'sport = :{next(iter(taken.values()))}'   shows by whom"
        return Finding("ports", "problem", f"taken by other programs: {told}", way_out)
    return Finding("ports", "ok", "free")


def late(name: str, seconds: float) -> Finding:
    """A check that has not come to an end."""
    return Finding(name, "warning", f"no result within {seconds:.0f} s, so it could not be checked", "Run it again.")


def current_python() -> Finding:
    return python(sys.version_info)
