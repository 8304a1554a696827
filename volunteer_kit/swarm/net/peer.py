"""Start this machine as a peer: libp2p daemon, DHT node, identity. Retry, and report failures in plain words."""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from hivemind.dht import DHT
from hivemind.dht.node import DHTNode
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.multiaddr import Multiaddr

from volunteer_kit.addressing import LISTEN
from volunteer_kit.swarm.codecs.registry import check_codecs
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net import reachability, shared_futures
from volunteer_kit.swarm.net.access.control import Admission
from volunteer_kit.swarm.net.children import BROKEN, PeerProcesses
from volunteer_kit.swarm.net.dial_back import ask_first_peers
from volunteer_kit.swarm.net.fork_safety import LeanDHT
from volunteer_kit.swarm.net.identity import ensure_identity, load_private_key
from volunteer_kit.swarm.net.pending_calls import outlive_late_answers
from volunteer_kit.swarm.net.reachability import FAMILIES, Verdict, find_places, host_of, kind_of, look_at_machine
from volunteer_kit.swarm.net.sockets import lock_folder_of_multiprocessing

OPEN_FILES = 65_536  # every tensor that crosses processes holds a file; 1,024 end a run after minutes


@dataclass(frozen=True)
class PeerConfig:
    """How this machine meets the others.

    :param initial_peers: multiaddrs of peers that are up; empty starts a new swarm
    :param host_maddrs: where to listen; port 0 is any free one. The default listens on every interface, TCP, by IPv4
        and IPv6; on a machine without one of them, by the other
    :param announce_maddrs: addresses that others should dial, when the machine's own are not reachable (NAT with a
        forwarded port): they are announced while host_maddrs listens
    :param identity_path: file with this peer's key, made if missing; the same file gives the same peer id
    :param client_mode: True: only dial out. None: found out, see `find_client_mode`
    :param startup_timeout: s; p2pd alone needs more than 15 s on a busy Colab VM
    :param check_identity: ask the swarm whether another peer runs under this identity; seconds that can be spared
        where a lock keeps it to one
    :param dht_options: further arguments of hivemind.DHT
    """

    initial_peers: list[str] = field(default_factory=list)
    host_maddrs: list[str] = field(default_factory=lambda: [*LISTEN])
    announce_maddrs: list[str] = field(default_factory=list)
    identity_path: str | None = None
    client_mode: bool | None = None
    startup_timeout: float = 90.0
    check_identity: bool = True
    dht_options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Peer:
    """A running peer. `why_client_mode` says in words why others can or cannot call us."""

    dht: LeanDHT
    client_mode: bool
    why_client_mode: str
    admission: Admission = field(default_factory=Admission)
    _scratch: tempfile.TemporaryDirectory | None = None

    @property
    def peer_id(self) -> PeerID:
        return self.dht.peer_id

    @property
    def processes(self) -> PeerProcesses:
        """This peer's, with that of its node: whether they live."""
        return self.dht.processes

    def visible_maddrs(self) -> list[str]:
        """Addresses to give to others as initial_peers; empty in client mode."""
        return [] if self.client_mode else [str(maddr) for maddr in self.dht.get_visible_maddrs(latest=True)]

    def daemon_address(self) -> str:
        """Return the address where p2pd takes calls of this machine's processes."""
        return self.dht.run_coroutine(_daemon_address)

    def shutdown(self) -> None:
        """Leave the DHT and end its processes."""
        self.dht.shutdown()
        if self._scratch is not None:
            self._scratch.cleanup()


def start_peer(config: PeerConfig, admission: Admission | None = None) -> Peer:
    """Start p2pd and a DHT node, from any thread. Raises SwarmError (dead_peers, port_taken, clock,
    identity_taken, bad_address, shared_memory, startup, broken) within startup_timeout plus a few seconds.

    :param admission: who may take part, with this peer's own token in it already; None: everybody
    """
    admission = admission or Admission()
    check_addresses(config)
    check_families(config.host_maddrs)
    raise_file_limit()
    check_shared_memory()
    lock_folder_of_multiprocessing()
    check_codecs()
    outlive_late_answers()
    client_mode, why = find_client_mode(config)
    scratch = None
    identity_path = config.identity_path
    if identity_path is None:
        scratch = tempfile.TemporaryDirectory(prefix="volunteer-kit-")
        identity_path = os.path.join(scratch.name, "identity.key")
    try:
        _use_identity(identity_path)
        dht = _start_dht(config, identity_path, client_mode, admission)
    except BaseException:
        if scratch is not None:
            scratch.cleanup()
        raise
    return Peer(dht, client_mode, why, admission, scratch)


def once_more(config: PeerConfig, maddrs: Sequence[str], known: Sequence[str]) -> PeerConfig:
    """For the same peer when it comes back: others dial it where it was.

    :param maddrs: its visible addresses when it was there last; `known`: of others that it met
    """
    ports = {tuple(parts[i] for i in (1, 3)): parts[4] for parts in (m.split("/") for m in maddrs) if len(parts) > 4}
    listen = []
    for maddr in config.host_maddrs:
        parts = maddr.split("/")
        if len(parts) > 4 and parts[4] == "0" and not config.announce_maddrs:  # announced may be a router's ports
            parts[4] = ports.get((parts[1], parts[3]), "0")
        listen.append("/".join(parts))
    first = list(dict.fromkeys([*config.initial_peers, *known]))
    return replace(config, host_maddrs=listen, initial_peers=first, check_identity=False)  # it was ours a moment ago


def _use_identity(identity_path: str) -> None:
    """Sign DHT records with the identity's key: a record's owner is then a peer id."""
    ensure_identity(identity_path)
    RSAPrivateKey._process_wide_key = load_private_key(Path(identity_path).read_bytes())


def _start_dht(config: PeerConfig, identity_path: str, client_mode: bool, admission: Admission) -> LeanDHT:
    dht = LeanDHT(
        initial_peers=config.initial_peers or None,
        host_maddrs=config.host_maddrs,
        announce_maddrs=config.announce_maddrs or None,
        identity_path=identity_path,
        client_mode=client_mode,
        startup_timeout=config.startup_timeout,
        admission=admission,
        check_if_identity_free=config.check_identity,
        start=False,
        # s for one DHT call; home links and two busy cores answer slower than 3 s at times
        **{"wait_timeout": 5.0, **config.dht_options},
    )
    dht.run_in_background(await_ready=False)
    try:
        dht.wait_until_ready(timeout=config.startup_timeout + 15.0)
    except BaseException as e:
        _end(dht)
        if not isinstance(e, Exception) or getattr(e, "kind", None) == BROKEN:
            raise
        raise explain_startup_failure(repr(e), config) from e
    return dht


def _end(dht: LeanDHT) -> None:
    dht.processes.close()
    dht.join(3)  # s; it ends by itself. Killed while it tells us why, it would keep a lock that all later DHTs need
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(dht.pid).children(recursive=True) if dht.is_alive() else []
        dht.terminate()
        dht.join(5)
        for child in children:
            child.kill()
    dht.sockets.remove()
    shared_futures.end_use(dht)


def explain_startup_failure(cause: str, config: PeerConfig) -> SwarmError:
    """hivemind's and p2pd's words -> what happened and what to do."""
    text = cause.lower()
    peers = ", ".join(config.initial_peers) or "none"
    if "local time must be within" in text:
        return SwarmError(
            "This machine's clock differs from the swarm's by more than 3 seconds: its records would be refused.\n"
            "1. Set the clock from the network: sudo timedatectl set-ntp true (Linux), or restart the notebook's VM.\n"
            f"2. Join again.\n(What was measured: {cause[:200]})",
            kind="clock",
        )
    if "already taken by another peer" in text:
        return SwarmError(
            f"The identity in {config.identity_path} is in use by another running peer.\n"
            "1. Stop the other one, or\n2. give this one a file of its own: --identity-path ./other.key",
            kind="identity_taken",
        )
    if "cannot assign requested address" in text:
        return SwarmError(
            f"{', '.join(config.host_maddrs)} is not an address of this machine.\n"
            "1. Listen on all: --host-maddrs /ip4/0.0.0.0/tcp/PORT\n"
            "2. and tell others the public one: --announce-maddrs /ip4/YOUR.PUBLIC.IP/tcp/PORT",
            kind="bad_address",
        )
    if "bind: permission denied" in text:
        return SwarmError(
            f"This user may not listen on {', '.join(config.host_maddrs)}.\n"
            "1. Choose a port above 1023, or 0 for any free one: --host-maddrs /ip4/0.0.0.0/tcp/0",
            kind="bad_address",
        )
    if "address already in use" in text or "failed to listen on any addresses" in text:
        return SwarmError(
            f"The port in {', '.join(config.host_maddrs)} is taken by another program.\n"
            "1. See which one: ss -ltnp\n"
            "2. Choose another port, or 0 for any free one: --host-maddrs /ip4/0.0.0.0/tcp/0",
            kind="port_taken",
        )
    unanswered = ("bootstrap", "failed to connect", "none of the initial_peers", "daemon failed", "timeout")
    if config.initial_peers and any(word in text for word in unanswered):
        return SwarmError(
            f"None of the run's first peers answered: {peers}.\n"
            "1. Check that this machine is online.\n"
            "2. The run may be over or its host down: ask the host for fresh addresses.\n"
            "3. Behind a firewall that blocks outgoing ports, try another network.",
            kind="dead_peers",
        )
    return SwarmError(
        f"The peer did not start: {cause[:300]}\n"
        "1. Try again: a busy machine can need longer (startup_timeout).\n"
        "2. If it happens again, report these lines.",
        kind="startup",
    )


def check_addresses(config: PeerConfig) -> None:
    """Raises SwarmError (bad_address), as start_peer does, for those that are none."""
    for name in ("initial_peers", "host_maddrs", "announce_maddrs"):
        for address in getattr(config, name):
            try:
                parsed = str(Multiaddr(address))
            except Exception as e:
                raise SwarmError(
                    f"{name}: {address!r} is no address. It should look like "
                    "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooW... (initial_peers) or /ip4/0.0.0.0/tcp/31337.",
                    kind="bad_address",
                ) from e
            if name == "announce_maddrs" and not _can_be_dialled(parsed):
                raise SwarmError(
                    f"announce_maddrs: nobody could dial {address!r}. It should have the public address and the port: "
                    "/ip4/203.0.113.5/tcp/31337.",
                    kind="bad_address",
                )
            if name == "initial_peers" and "/p2p/" not in parsed:
                raise SwarmError(
                    f"initial_peers: {address!r} lacks the peer's id. Ask the host for the whole address, ending in "
                    "/p2p/ and the id.",
                    kind="bad_address",
                )


def check_families(host_maddrs: Sequence[str]) -> None:
    """Has this machine any address, be it its own loopback, of a family that is to be listened on? Raises SwarmError
    (bad_address)."""
    wanted = {kind_of(maddr) for maddr in host_maddrs}
    here = reachability.families_here()
    if wanted and here and wanted <= FAMILIES.keys() and not wanted & here:
        missing, there = (" and ".join(FAMILIES[kind] for kind in sorted(kinds)) for kinds in (wanted, here))
        everywhere = " ".join(maddr for maddr in LISTEN if kind_of(maddr) in here)
        raise SwarmError(
            f"This machine has no {missing} address, so it cannot listen on {', '.join(host_maddrs)}; it has {there}.\n"
            f"1. Listen there: --host-maddrs {everywhere}\n2. Or leave --host-maddrs out: it listens on both.",
            kind="bad_address",
        )


def _can_be_dialled(maddr: str) -> bool:
    """Whether it names one machine and a port there."""
    parts = maddr.split("/")
    ports = [port for kind, port in zip(parts, parts[1:], strict=False) if kind in ("tcp", "udp")]
    return host_of(maddr) not in ("0.0.0.0", "::") and bool(ports) and "0" not in ports


def find_client_mode(config: PeerConfig) -> Verdict:
    """Should this peer only dial out? A peer that others cannot reach must not offer to reduce for them: each would
    wait for it in vain.

    First peers on public addresses are asked to call this machine back, which takes some seconds; what they say goes
    before what its addresses say. Those that cannot do so, or lie, stop nobody.
    """
    asked = _as_asked(config)
    if asked is not None:
        return asked
    machine, places = look_at_machine(config.host_maddrs), find_places(config.initial_peers)
    guess = reachability.by_addresses(machine, places)
    answers = ask_first_peers(machine, places, config.host_maddrs)
    return reachability.by_answers(guess, machine, places, answers)


def decide_client_mode(config: PeerConfig) -> Verdict:
    """The same by this machine's addresses alone, and by what the names of first peers resolve to."""
    asked = _as_asked(config)
    return asked or reachability.by_addresses(look_at_machine(config.host_maddrs), find_places(config.initial_peers))


def _as_asked(config: PeerConfig) -> Verdict | None:
    if config.client_mode is not None:
        return Verdict(config.client_mode, "as asked")
    if config.announce_maddrs:
        return Verdict(False, "others are told to dial " + ", ".join(config.announce_maddrs))
    if not config.initial_peers:
        return Verdict(False, "the first peer of a swarm must be reachable")
    return None


def raise_file_limit() -> None:
    """Lift the soft limit of open files as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_shared_memory() -> None:
    """Can this machine's processes share tensors? torch lets them meet at a socket in the folder for temporary files,
    and the system bounds the length of a socket's path: under a batch system's long TMPDIR, hivemind's processes die
    without a word. Raises SwarmError (shared_memory)."""
    try:
        torch.zeros(1, device="cpu").share_memory_()
    except RuntimeError as e:
        folder = tempfile.gettempdir()
        raise SwarmError(
            f"The processes of this machine cannot share memory: {str(e).splitlines()[0][:200]}\n"
            f"1. A folder for temporary files with more than 70 characters in its path is too much (it is {folder}): "
            "export TMPDIR=/tmp\n"
            "2. Shared memory may be full: df -h /dev/shm",
            kind="shared_memory",
        ) from e


async def _daemon_address(dht: DHT, node: DHTNode) -> str:
    """In the DHT's process."""
    return str(node.p2p.daemon_listen_maddr)
