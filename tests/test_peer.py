"""Starting a peer: who may be dialled, and one clear message, in time, for each thing that can be wrong."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import hivemind.dht.protocol as dht_protocol
import psutil
import pytest
from hivemind.dht.crypto import RSASignatureValidator

from tests.free_ports import free_port
from volunteer_kit.addressing import LISTEN
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net.dial_back import whom_to_ask
from volunteer_kit.swarm.net.peer import (
    PeerConfig,
    decide_client_mode,
    explain_startup_failure,
    once_more,
    raise_file_limit,
    start_peer,
)
from volunteer_kit.swarm.net.reachability import by_addresses, by_answers, find_places, look_at_machine, resolve

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
SOME_ID = "QmXoypizjW3WknFiJnKLwHCnL72vedxjQkDDP1mXWo6uco"
LOCAL_PEER = f"/ip4/127.0.0.1/tcp/4001/p2p/{SOME_ID}"
LAN_PEER = f"/ip4/192.168.1.7/tcp/4001/p2p/{SOME_ID}"
PUBLIC_PEER = f"/ip4/8.8.8.8/tcp/4001/p2p/{SOME_ID}"
NAMED_PEER = f"/dns4/run.example.org/tcp/4001/p2p/{SOME_ID}"
PUBLIC_PEER_6 = f"/ip6/2a01:4f8::1/tcp/4001/p2p/{SOME_ID}"
OTHER_ID = "QmcHTBbhc2W3zm6nRCXdLbubuy8mDeXgorNjBAbTu7yeq5"
OTHER_PUBLIC_PEER = f"/ip4/8.8.4.4/tcp/4001/p2p/{OTHER_ID}"
IP4, IP6 = ["/ip4/0.0.0.0/tcp/0"], ["/ip6/::/tcp/0"]
HOME, GLOBAL_6, OWN_6 = "192.168.1.20", "2a02:8109:9c80::20", "fd12::20"


# --- can others reach us? ---


@pytest.mark.parametrize(
    "config, own_address, client_mode, words",
    [
        (PeerConfig(client_mode=True), "8.8.4.4", True, "as asked"),
        (PeerConfig(client_mode=False, initial_peers=[PUBLIC_PEER]), "10.0.0.2", False, "as asked"),
        (
            PeerConfig(initial_peers=[PUBLIC_PEER], announce_maddrs=["/ip4/8.8.4.4/tcp/4001"]),
            "10.0.0.2",
            False,
            "told to dial /ip4/8.8.4.4/tcp/4001",
        ),
        (PeerConfig(), "10.0.0.2", False, "first peer"),
        (PeerConfig(initial_peers=[LOCAL_PEER]), "10.0.0.2", False, "this machine or its local network"),
        (PeerConfig(initial_peers=[LAN_PEER, LOCAL_PEER]), "10.0.0.2", False, "local network"),
        (PeerConfig(initial_peers=[PUBLIC_PEER]), "8.8.4.4", False, "public address"),
        (PeerConfig(initial_peers=[PUBLIC_PEER]), "10.0.0.2", True, "behind a router"),
        (PeerConfig(initial_peers=[PUBLIC_PEER]), "172.28.0.12", True, "behind a router"),  # Colab's
        (PeerConfig(initial_peers=[PUBLIC_PEER]), "fe80::1%eth0", True, "behind a router"),
        (PeerConfig(initial_peers=[NAMED_PEER]), "10.0.0.2", True, "behind a router"),
        (PeerConfig(initial_peers=[LAN_PEER, PUBLIC_PEER]), "10.0.0.2", True, "behind a router"),
    ],
)
def test_decide_client_mode(monkeypatch, config, own_address, client_mode, words):
    live_at(monkeypatch, own_address)
    knows(monkeypatch, {})
    decided, why = decide_client_mode(config)
    assert decided is client_mode and words in why


def live_at(monkeypatch, *addresses: str, without_loopback: bool = False) -> None:
    """A machine with these addresses on its cards."""
    card = psutil._common.snicaddr if hasattr(psutil._common, "snicaddr") else psutil._ntuples.snicaddr
    cards = [card(socket.AF_INET6 if ":" in one else socket.AF_INET, one, None, None, None) for one in addresses]
    found = {
        "lo": [] if without_loopback else [card(socket.AF_INET, "127.0.0.1", None, None, None)],
        "eth0": [*cards, card(psutil.AF_LINK, "02:42:ac:11:00:02", None, None, None)],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


def knows(monkeypatch, names: dict[str, list[str]]) -> None:
    """A resolver that knows these names."""

    def look_up(host, port, *_, **__):
        if host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in names[host]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def peer_called(name: str, kind: str = "dns4") -> list[str]:
    return [f"/{kind}/{name}/tcp/4001/p2p/{SOME_ID}"]


@pytest.mark.parametrize(
    "name, addresses, is_local",
    [
        *[(name, [], True) for name in ("nas.lan", "server.local", "fritz.box", "head.cluster.internal")],
        *[(name, [], True) for name in ("nas", "localhost", "server.fritz.box", "NAS.Local.", "pi.home.arpa")],
        ("nas.lan", ["192.168.1.5"], True),
        ("server.local", ["192.168.1.5", GLOBAL_6], True),  # mDNS tells all addresses of a machine
        ("fritz.box", ["192.168.178.1"], True),
        ("fritz.box", ["45.76.93.104"], False),  # .box is an ending of the internet's, and has had buyers
        ("x.internal", ["45.76.93.104"], False),
        ("run.example.org", ["10.8.0.1"], True),  # a company's own, or a VPN's
        ("run.example.org", ["100.100.7.2"], True),  # an overlay network's
        ("run.example.org", ["127.0.1.1"], True),
        ("run.example.org", ["8.8.8.8"], False),
        ("run.example.org", ["10.8.0.1", "8.8.8.8"], False),
        ("run.example.org", [], False),
    ],
)
@pytest.mark.parametrize("kind", ["dns4", "dns"])
def test_names_are_looked_up_before_they_are_judged(monkeypatch, name, addresses, is_local, kind):
    live_at(monkeypatch, HOME)
    knows(monkeypatch, {name: addresses} if addresses else {})
    assert decide_client_mode(PeerConfig(initial_peers=peer_called(name, kind))).client_mode is not is_local


def test_a_resolver_that_is_away_holds_nobody_up(monkeypatch):
    live_at(monkeypatch, HOME)
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [] if released.wait(600) else [])
    try:
        assert resolve({"run.example.org", "nas.lan"}, within=0.1) == {}
    finally:
        released.set()


@pytest.mark.parametrize(
    "own, peers, listens, client_mode",
    [
        ((HOME, GLOBAL_6), [PUBLIC_PEER], IP4, True),  # most home lines today
        ((HOME, GLOBAL_6), [PUBLIC_PEER], IP4 + IP6, True),
        ((HOME, GLOBAL_6), [PUBLIC_PEER, PUBLIC_PEER_6], IP4 + IP6, True),
        ((HOME, GLOBAL_6), [PUBLIC_PEER_6], IP4 + IP6, False),  # all that join this run have IPv6
        ((HOME, GLOBAL_6), [PUBLIC_PEER_6], IP4, True),
        ((GLOBAL_6,), [PUBLIC_PEER, PUBLIC_PEER_6], IP4 + IP6, False),
        (("8.8.4.4",), [PUBLIC_PEER, PUBLIC_PEER_6], IP4 + IP6, False),
        (("8.8.4.4",), [PUBLIC_PEER], IP6, True),
        (("8.8.4.4", "10.0.0.2"), [PUBLIC_PEER], ["/ip4/10.0.0.2/tcp/0"], True),
        (("8.8.4.4", "10.0.0.2"), [PUBLIC_PEER], ["/ip4/8.8.4.4/tcp/0"], False),
        (("100.72.3.4",), [PUBLIC_PEER], IP4 + IP6, True),  # a carrier-grade NAT
        ((HOME,), [LAN_PEER, PUBLIC_PEER_6], IP4 + IP6, False),  # another's IPv6 says nothing to a machine without
        ((HOME, OWN_6), [LAN_PEER, PUBLIC_PEER_6], IP4 + IP6, False),
        ((HOME, OWN_6), [f"/ip6/fd12::7/tcp/4001/p2p/{SOME_ID}"], IP4 + IP6, False),
        ((HOME,), [LAN_PEER], LOOPBACK, True),
        ((HOME,), [LOCAL_PEER, LAN_PEER], LOOPBACK, False),
        ((HOME,), [f"/ip6zone/eth0/ip6/fe80::7/tcp/4001/p2p/{SOME_ID}"], IP4 + IP6, False),
    ],
)
def test_each_address_family_is_judged_by_itself(monkeypatch, own, peers, listens, client_mode):
    live_at(monkeypatch, *own)
    config = PeerConfig(initial_peers=peers, host_maddrs=listens)
    assert decide_client_mode(config).client_mode is client_mode


YES, NO, REFUSED = "reached", "not reached", "the peer calls public addresses only, or was asked too often"


@pytest.mark.parametrize(
    "own, peers, answers, client_mode, words",
    [
        ((HOME,), [PUBLIC_PEER], {"ip4": [YES]}, False, "reached this machine by IPv4"),  # a port is forwarded
        ((HOME,), [PUBLIC_PEER], {"ip4": [NO]}, True, "behind a router"),
        (("8.8.4.4",), [PUBLIC_PEER], {"ip4": [NO]}, True, "did not reach it"),  # a firewall
        (("8.8.4.4",), [PUBLIC_PEER], {}, False, "public address"),  # peers of an earlier time
        (("8.8.4.4",), [PUBLIC_PEER], {"ip4": [REFUSED] * 3}, False, "public address"),
        (("100.72.3.4",), [PUBLIC_PEER], {"ip4": [REFUSED]}, True, "carrier-grade NAT"),
        # a lie is outvoted; where it is word against word, the addresses decide
        (("8.8.4.4",), [PUBLIC_PEER], {"ip4": [NO, YES, YES]}, False, "reached"),
        (("8.8.4.4",), [PUBLIC_PEER], {"ip4": [YES, NO, NO, REFUSED]}, True, "did not reach"),
        (("8.8.4.4",), [PUBLIC_PEER], {"ip4": [YES, NO]}, False, "public address"),
        ((HOME,), [PUBLIC_PEER], {"ip4": [YES, NO]}, True, "behind a router"),
        # IPv6 alone counts where all first peers have it
        ((HOME, GLOBAL_6), [PUBLIC_PEER, PUBLIC_PEER_6], {"ip4": [NO], "ip6": [YES]}, False, "by IPv6"),
        ((HOME, GLOBAL_6), [PUBLIC_PEER, PUBLIC_PEER_6], {"ip4": [REFUSED], "ip6": [NO]}, True, "behind a router"),
        ((HOME, GLOBAL_6), [PUBLIC_PEER_6, OTHER_PUBLIC_PEER], {"ip6": [YES]}, True, "by IPv6 only"),
        ((GLOBAL_6,), [PUBLIC_PEER_6], {"ip6": [NO]}, True, "(IPv6) and did not reach it"),
    ],
)
def test_what_peers_answer_that_have_tried_goes_before_what_addresses_say(
    monkeypatch, own, peers, answers, client_mode, words
):
    live_at(monkeypatch, *own)
    machine, places = look_at_machine(PeerConfig().host_maddrs), find_places(peers)
    verdict = by_answers(by_addresses(machine, places), machine, places, answers)
    assert verdict.client_mode is client_mode and words in verdict.why


@pytest.mark.parametrize(
    "own, peers, listens, asked",
    [
        ((HOME, GLOBAL_6), [PUBLIC_PEER, OTHER_PUBLIC_PEER, PUBLIC_PEER_6], IP4 + IP6, {"ip4": 2, "ip6": 1}),
        ((HOME, GLOBAL_6), [PUBLIC_PEER, PUBLIC_PEER_6], IP4, {"ip4": 1}),
        ((HOME, OWN_6), [PUBLIC_PEER, PUBLIC_PEER_6], IP4 + IP6, {"ip4": 1}),
        ((HOME, GLOBAL_6), [LAN_PEER, LOCAL_PEER], IP4 + IP6, {}),  # a local swarm is joined at once
    ],
)
def test_who_is_asked_to_call_back(monkeypatch, own, peers, listens, asked):
    live_at(monkeypatch, *own)
    machine, places = look_at_machine(listens), find_places(peers)
    found = {family: len(whom_to_ask(family, machine, places)) for family in ("ip4", "ip6")}
    assert {family: number for family, number in found.items() if number} == asked
    many = find_places([f"/ip4/8.8.8.{n}/tcp/4001/p2p/{SOME_ID[:-2]}{n:02}" for n in range(1, 30)])
    assert len(whom_to_ask("ip4", look_at_machine(IP4), many)) == 5


@pytest.mark.parametrize(
    "own, words",
    [
        ((HOME,), "a private IPv4 address, behind a router"),
        ((HOME, GLOBAL_6), "a private IPv4 address, behind a router, and a public IPv6 one"),
        (("100.72.3.4",), "a carrier-grade NAT"),
        ((GLOBAL_6,), "IPv6 only, public"),
        (("8.8.4.4",), "a public IPv4 address"),
        ((), "without a network"),
    ],
)
def test_the_situation_has_a_name(monkeypatch, own, words):
    live_at(monkeypatch, *own)
    assert words in look_at_machine(PeerConfig().host_maddrs).in_words


# --- addresses ---


@pytest.mark.parametrize(
    "field, address, words",
    [
        ("initial_peers", "203.0.113.5:31337", "is no address"),
        ("initial_peers", "", "is no address"),
        ("initial_peers", "/ip4/999.0.0.1/tcp/1/p2p/" + SOME_ID, "is no address"),
        ("initial_peers", "/ip4/203.0.113.5/tcp/31337", "lacks the peer's id"),
        ("host_maddrs", "0.0.0.0:31337", "is no address"),
        ("host_maddrs", "/ip4/0.0.0.0/tcp/99999", "is no address"),
        ("announce_maddrs", "/ip4/here/tcp/1", "is no address"),
        ("announce_maddrs", "/dns4/a b/tcp/1", "is no address"),
        ("announce_maddrs", "/ip4/203.0.113.5/tcp/99999", "is no address"),
        ("announce_maddrs", "/ip4/203.0.113.5/tcp/0", "nobody could dial"),
        ("announce_maddrs", "/ip4/0.0.0.0/tcp/31337", "nobody could dial"),
        ("announce_maddrs", "/ip6/::/tcp/31337", "nobody could dial"),
        ("announce_maddrs", "/ip4/203.0.113.5", "nobody could dial"),
    ],
)
def test_a_malformed_address_is_told_before_anything_starts(field, address, words):
    started = time.monotonic()
    with pytest.raises(SwarmError, match=words) as told:
        start_peer(PeerConfig(**{field: [address]}))
    assert told.value.kind == "bad_address" and field in str(told.value) and repr(address) in str(told.value)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    "own, listens, words", [((GLOBAL_6,), IP4, "--host-maddrs /ip6/::/tcp/0"), ((HOME,), IP6, "/ip4/0.0.0.0/tcp/0")]
)
def test_a_family_that_the_machine_lacks_is_told_before_anything_starts(monkeypatch, own, listens, words):
    live_at(monkeypatch, *own, without_loopback=True)
    with pytest.raises(SwarmError, match="This machine has no IPv") as told:
        start_peer(PeerConfig(host_maddrs=listens))
    assert told.value.kind == "bad_address" and words in str(told.value)


@pytest.mark.parametrize(
    "cause, kind, words",
    [
        ("ValidationError('local time must be within 3 seconds  of others')", "clock", "timedatectl"),
        (
            "P2PDaemonError('Identity from `a.key` is already taken by another peer')",
            "identity_taken",
            "--identity-path",
        ),
        (
            "failed to listen on any addresses: [listen tcp4 ...: bind: address already in use]",
            "port_taken",
            "ss -ltnp",
        ),
        (
            "failed to listen on any addresses: [listen tcp4 ...: bind: cannot assign requested address]",
            "bad_address",
            "--announce-maddrs",
        ),
        ("failed to listen on any addresses: [listen tcp4 0.0.0.0:80: bind: permission denied]", "bad_address", "1023"),
        ("Daemon failed to start: failed to connect to bootstrap peers", "dead_peers", PUBLIC_PEER),
        (
            "RuntimeError('DHTNode bootstrap failed: none of the initial_peers responded to a ping.",
            "dead_peers",
            "host",
        ),
        ("TimeoutError()", "dead_peers", "None of the run's first peers"),
        ("P2PDaemonError('p2pd binary not found')", "startup", "p2pd binary not found"),
    ],
)
def test_hivemind_s_words_become_ours(cause, kind, words):
    told = explain_startup_failure(cause, PeerConfig(initial_peers=[PUBLIC_PEER]))
    assert told.kind == kind and words in str(told) and "1. " in str(told)


def test_a_slow_start_without_peers_to_blame_is_no_dead_peer():
    assert explain_startup_failure("TimeoutError()", PeerConfig()).kind == "startup"


# --- real p2pd ---


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    identity = tmp_path_factory.mktemp("first") / "identity.key"
    peer = start_peer(PeerConfig(host_maddrs=LOOPBACK, identity_path=str(identity), startup_timeout=120))
    peer.identity_path = str(identity)
    yield peer
    peer.shutdown()


@pytest.fixture
def config(first, tmp_path):
    return PeerConfig(
        initial_peers=first.visible_maddrs(),
        host_maddrs=LOOPBACK,
        identity_path=str(tmp_path / "identity.key"),
        startup_timeout=90.0,
    )


def daemons(identity_path: str) -> list[int]:
    """p2pd processes that run with this identity."""
    found = []
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "p2pd" and any(identity_path in word for word in process.info["cmdline"] or []):
            found.append(process.pid)
    return found


def fails_with(kind: str, config: PeerConfig, seconds: float = 90.0) -> str:
    started = time.monotonic()
    with pytest.raises(SwarmError) as told:
        start_peer(config)
    assert told.value.kind == kind, f"{told.value}\n{told.value.__cause__!r}"
    assert time.monotonic() - started < config.startup_timeout + seconds
    if config.identity_path is not None:
        _, left = psutil.wait_procs([psutil.Process(pid) for pid in daemons(config.identity_path)], timeout=60)
        assert not left, "a p2pd is left behind"
    return str(told.value)


def test_a_path_for_temporary_files_that_is_too_long_for_a_socket(tmp_path):
    """As on clusters; torch's processes meet there. In a process of its own: where they meet is settled once."""
    folder = tmp_path / ("scratch" * 12)
    folder.mkdir()
    script = (
        "from volunteer_kit.swarm.errors import SwarmError\n"
        "from volunteer_kit.swarm.net.peer import PeerConfig, start_peer\n"
        f"try: start_peer(PeerConfig(host_maddrs={LOOPBACK}))\n"
        "except SwarmError as e: print(e.kind, e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True
    )
    assert done.stdout.startswith("shared_memory ") and str(folder) in done.stdout, done.stderr
    assert "export TMPDIR=/tmp" in done.stdout


def test_dead_initial_peers_are_told_in_time(config):
    dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{SOME_ID}"
    message = fails_with("dead_peers", replace(config, initial_peers=[dead], startup_timeout=5.0))
    assert dead in message


def test_peers_that_never_answer_are_told_in_time(config):
    """A host that accepts and says nothing: a firewall, or another program at its port."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"/ip4/127.0.0.1/tcp/{mute.getsockname()[1]}/p2p/{SOME_ID}"
        fails_with("dead_peers", replace(config, initial_peers=[address], startup_timeout=5.0))


@pytest.mark.parametrize("joining", [False, True], ids=["first peer", "joining"])
def test_a_port_that_is_taken(config, joining):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"
        initial_peers = config.initial_peers if joining else []
        message = fails_with("port_taken", replace(config, initial_peers=initial_peers, host_maddrs=[address]))
    assert address in message


def test_an_address_that_is_not_ours(config):
    public = "/ip4/203.0.113.7/tcp/4001"
    message = fails_with("bad_address", replace(config, initial_peers=[], host_maddrs=[public]))
    assert "--announce-maddrs" in message


def test_a_clock_that_is_ten_seconds_off(config, monkeypatch):
    honest = dht_protocol.get_dht_time
    monkeypatch.setattr(dht_protocol, "get_dht_time", lambda: honest() + 10.0)  # the DHT's process is forked from here
    message = fails_with("clock", config)
    assert "clock" in message and "timedatectl" in message


def test_an_identity_that_another_peer_uses(config, first):
    taken = replace(config, identity_path=first.identity_path)
    before = daemons(first.identity_path)
    with pytest.raises(SwarmError, match="in use by another running peer") as told:
        start_peer(taken)
    assert told.value.kind == "identity_taken" and first.identity_path in str(told.value)
    assert daemons(first.identity_path) == before and first.dht.is_alive(), "the other peer goes on"


def test_plain_hivemind_nodes_and_ours_understand_each_other_in_an_open_run(first):
    assert first.dht.store("from us", 1, expiration_time=time.time() + 60)
    script = (
        "import hivemind, time\n"
        f"dht = hivemind.DHT({first.visible_maddrs()}, host_maddrs={LOOPBACK}, start=True, startup_timeout=120, "
        "wait_timeout=60)\n"
        "print(dht.get('from us', latest=True).value, dht.store('from them', 2, expiration_time=time.time() + 60))\n"
        "dht.shutdown()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["1", "True"], done.stderr
    assert first.dht.get("from them", latest=True).value == 2


def test_an_identity_file_that_is_no_key(config, tmp_path):
    path = tmp_path / "identity.key"
    path.write_bytes(b"no key")
    with pytest.raises(SwarmError, match="cannot be read") as told:
        start_peer(config)
    assert told.value.kind == "identity" and str(path) in str(told.value)
    assert path.read_bytes() == b"no key", "it may be somebody's key, damaged"


def test_a_failure_does_not_spoil_the_next_attempt_and_an_identity_stays(config):
    """hivemind's processes share a lock; one killed at the wrong moment stops all later ones."""
    dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{SOME_ID}"
    for _ in range(2):
        fails_with("dead_peers", replace(config, initial_peers=[dead], startup_timeout=15.0))
    peer = start_peer(config)
    first_id = peer.peer_id
    peer.shutdown()
    assert daemons(config.identity_path) == []
    peer = start_peer(config)
    try:
        assert peer.peer_id == first_id
        assert peer.visible_maddrs()[0].endswith(f"/p2p/{first_id}")
    finally:
        peer.shutdown()


def test_an_announced_address_is_told_while_another_is_listened_on(config):
    """A public host_maddr on a machine behind NAT dies with "cannot assign requested address" (FACTS, trap 21)."""
    port = free_port()
    public = f"/ip4/203.0.113.7/tcp/{port}"
    peer = start_peer(replace(config, host_maddrs=[f"/ip4/0.0.0.0/tcp/{port}"], announce_maddrs=[public]))
    try:
        assert peer.visible_maddrs() == [f"{public}/p2p/{peer.peer_id}"]
        assert peer.client_mode is False and "203.0.113.7" in peer.why_client_mode
        with socket.create_connection(("127.0.0.1", port), timeout=60):
            pass  # it listens here, whatever it is called outside
    finally:
        peer.shutdown()


def test_a_client_sees_the_swarm_and_has_no_address(config, first):
    peer = start_peer(replace(config, client_mode=True, identity_path=None))
    try:
        assert peer.client_mode and peer.visible_maddrs() == [] and peer.dht.client_mode
        assert first.dht.store("greeting", "hello", expiration_time=time.time() + 60)
        assert peer.dht.get("greeting", latest=True).value == "hello"
        signing = RSASignatureValidator()  # as records of volunteers are; a host that trains nothing keeps them, too
        peer.dht.add_validators([signing])
        subkey, until = signing.local_public_key, time.time() + 60
        assert peer.dht.store("signed", {"epoch": 3}, subkey=subkey, expiration_time=until)
        assert first.dht.get("signed", latest=True).value[subkey].value == {"epoch": 3}
        scratch = peer._scratch.name
    finally:
        peer.shutdown()
    assert daemons(scratch) == []


def test_a_peer_may_open_many_files():
    """Every tensor that crosses processes holds a file; 1,024 end a run after minutes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        raise_file_limit()
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raised == (65_536 if hard == resource.RLIM_INFINITY else min(65_536, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 70_000) if hard > 0 else 70_000, hard))
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before or before[0] < 65_536, "never lowered"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_peer_that_comes_back_listens_where_others_dial_it():
    config = PeerConfig(host_maddrs=[*LISTEN, "/ip4/0.0.0.0/udp/0/quic-v1", "/ip4/0.0.0.0/tcp/77"], initial_peers=["A"])
    was = ["/ip4/10.0.0.1/tcp/4001/p2p/QmA", "/ip4/10.0.0.1/udp/4002/quic-v1/p2p/QmA", "/ip6/::1/tcp/4003/p2p/QmA"]
    again = once_more(config, was, ["B", "A"])
    assert sorted(again.host_maddrs) == [
        "/ip4/0.0.0.0/tcp/4001", "/ip4/0.0.0.0/tcp/77", "/ip4/0.0.0.0/udp/4002/quic-v1", "/ip6/::/tcp/4003",
    ]  # fmt: skip
    assert again.initial_peers == ["A", "B"]
    assert once_more(config, [], []).host_maddrs == config.host_maddrs, "a client listens nowhere"
    routed = replace(config, announce_maddrs=["/ip4/203.0.113.5/tcp/9"])
    assert once_more(routed, ["/ip4/203.0.113.5/tcp/9/p2p/QmA"], []).host_maddrs == config.host_maddrs
