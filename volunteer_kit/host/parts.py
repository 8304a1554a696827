"""The processes of a run on its host's machine, and their command lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

from volunteer_kit.addressing import EVERYWHERE, loopback
from volunteer_kit.host.folder import HostFolder
from volunteer_kit.host.settings import HostSettings
from volunteer_kit.host.watch import Part

PEER, AUTHORITY, MONITOR, DASHBOARD = "first peer", "authority", "monitor", "dashboard"
STOP_ORDER = ((DASHBOARD, MONITOR), (AUTHORITY,), (PEER,))  # who needs others goes before them
TRACKERS = ("trackio", "wandb")
CLI = "volunteer_kit.cli"
PEER_MODULE = "volunteer_kit.host_peer"
DATABASE = "VOLUNTEER_KIT_DATABASE"  # in the environment, for its password: `ps` shows command lines to everybody


def first_peer(
    folder: HostFolder, settings: HostSettings, initial_peers: Sequence[str], given_out: Sequence[str] = ()
) -> Part:
    """The address that volunteers know.

    :param initial_peers: other first peers of the run
    :param given_out: by which volunteers know it since an earlier start
    """
    command = [PEER_MODULE, str(folder.run_file), "--identity-path", str(folder.identity), "--keys", str(folder.keys)]
    for option, addresses in (
        ("--host-maddrs", settings.host_maddrs),
        ("--announce-maddrs", settings.announce_maddrs),
        ("--initial-peers", initial_peers),
        ("--given-out", given_out),
    ):
        if addresses:
            command += [option, ",".join(addresses)]
    return Part(PEER, tuple(command))


def other_parts(folder: HostFolder, settings: HostSettings, addresses: Sequence[str]) -> list[Part]:
    """What starts when the first peer's addresses are known."""
    run = str(folder.run_file)
    authority = [CLI, "authority", run, "--folder", str(folder.path), "--port", str(settings.port)]
    if settings.tls_cert and settings.tls_key:
        authority += ["--host", EVERYWHERE, "--tls-cert", settings.tls_cert, "--tls-key", settings.tls_key]
    else:
        authority += ["--host", loopback()]
    if settings.behind_proxy:
        authority += ["--behind-proxy"]
    monitor = [CLI, "monitor", run, "--folder", str(folder.monitor), "--keys", str(folder.keys)]
    monitor += ["--initial-peers", ",".join([*addresses_here(settings.host_maddrs, addresses), *addresses])]
    if settings.host_maddrs:  # the same interfaces, any port
        monitor += ["--host-maddrs", ",".join(any_port(maddr) for maddr in settings.host_maddrs)]
    if settings.push_to:
        monitor += ["--push-to", settings.push_to]
    if settings.checkpoint_every:
        monitor += ["--checkpoint-every", str(settings.checkpoint_every)]
    if settings.tracker in TRACKERS:
        monitor += [f"--{settings.tracker}"]
    dashboard = [CLI, "dashboard", run, "--folder", str(folder.monitor), "--port", str(settings.dashboard_port)]
    dashboard += ["--host", loopback()]
    return [
        Part(AUTHORITY, tuple(authority), environment=((DATABASE, settings.database),) if settings.database else ()),
        # it may load a checkpoint; and what the Hub does not get from it needs no token
        Part(MONITOR, tuple(monitor), ready_within=300.0, needs_token=bool(settings.push_to)),
        Part(DASHBOARD, tuple(dashboard)),
    ]


def addresses_here(host_maddrs: Sequence[str], addresses: Sequence[str]) -> list[str]:
    """The first peer's addresses as its own machine reaches it. Many routers do not lead a machine back to itself by
    its public address, and a container may have no way there either.

    :param host_maddrs: where it listens
    :param addresses: which it gives to others, with its peer id
    """
    peer_id = next((address.rpartition("/p2p/")[2] for address in addresses if "/p2p/" in address), None)
    if peer_id is None:
        return []
    here = [re.sub(r"^/ip4/0\.0\.0\.0/", "/ip4/127.0.0.1/", re.sub(r"^/ip6/::/", "/ip6/::1/", m)) for m in host_maddrs]
    known = [f"{maddr}/p2p/{peer_id}" for maddr in here if re.search(r"/tcp/[1-9]\d*$", maddr)]
    return [address for address in known if address not in addresses]


def any_port(maddr: str) -> str:
    """The same address with a free port of its own."""
    return re.sub(r"/(tcp|udp)/[0-9]+", r"/\1/0", maddr, count=1)
