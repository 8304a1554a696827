"""A run's first peer, in a process of its own: `python -m volunteer_kit.host_peer RUN.yaml --identity-path FILE`.

It does not train; it is the address that volunteers know. Prints {"ready": {"peer_id", "maddrs"}} when it is up, or
{"error": ...}, and stays until SIGTERM, or until one of its processes dies, when it prints {"error": ...} as well. With
the run's keys it lets itself in, whether the authority is up or not.

The later one of two first peers under one key ends, with {"over": ...}: volunteers know the run by its peer id, so it
cannot take another key, and a new start would change nothing. The one that was here before goes on, with
{"warning": ...}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from volunteer_kit import output
from volunteer_kit.addressing import LISTEN
from volunteer_kit.auth.access_token import KeysError
from volunteer_kit.run_reader import RunError
from volunteer_kit.runs import RunConfig, load_run, run_key_of
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net.access.control import Admission
from volunteer_kit.swarm.net.children import end_program
from volunteer_kit.swarm.net.peer import Peer, PeerConfig, start_peer
from volunteer_kit.swarm.net.same_key import OF_FIRST_PEERS, KeyWatch, Sharing, TwinWatch
from volunteer_kit.swarm.net.taken_identity import is_at
from volunteer_kit.swarm.records.host_credentials import HostMembership
from volunteer_kit.swarm.records.peer_record import PeerBoard
from volunteer_kit.swarm.state.manifest import validators


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 if the peer cannot start."""
    output.keep_up()
    options = _options(words)
    try:
        config = load_run(options.run)
        if options.given_out and _is_up_elsewhere(options):
            _tell_of_twin(Sharing.LATER)
            return 2
        membership = _membership(config, options)
        peer = _start(options, membership.admission if membership else None)
    except (SwarmError, RunError, KeysError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 2
    peer.processes.when_broken(_end_broken)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())  # only now: the peer's processes would inherit it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    twins: TwinWatch | None = None
    try:
        if membership is not None:
            membership.keep(peer)
            peer.dht.add_validators(validators(membership.admission.trust, run_key_of(config)))
        PeerBoard(peer.dht, config.run_id)  # a node that cannot check signed records keeps none for others
        twins = TwinWatch(KeyWatch(peer.dht, config.run_id, peer.peer_id), _tell_of_twin)
        print(json.dumps({"ready": {"peer_id": str(peer.peer_id), "maddrs": peer.visible_maddrs()}}), flush=True)
        while not stop.is_set():
            time.sleep(0.2)  # not stop.wait(): the signal's handler could find its lock taken by this very thread
        return 0
    finally:
        if twins is not None:
            twins.close()
        if membership is not None:
            membership.close()
        peer.shutdown()


def _is_up_elsewhere(options: argparse.Namespace) -> bool:
    """Does a peer under our key answer where this one was found before it was started? It is not of this machine: the
    host has ended what it left behind."""
    try:
        return Path(options.identity_path).is_file() and asyncio.run(is_at(options.identity_path, options.given_out))
    except Exception:  # a daemon that does not start, a damaged key, an address by hand: the peer itself will say why
        return False


def _tell_of_twin(sharing: Sharing) -> None:
    """The host ends this process, and itself, when it hears that it is over."""
    print(json.dumps({"over" if sharing is Sharing.LATER else "warning": OF_FIRST_PEERS[sharing]}), flush=True)


def _end_broken(why: str) -> None:
    """A new start mends it, and the host makes one."""
    end_program(lambda: print(json.dumps({"error": f"{why}."}), flush=True), 1)


def _membership(config: RunConfig, options: argparse.Namespace) -> HostMembership | None:
    if config.authority is None:
        return None
    url, public_key = config.authority.url, config.authority.public_key
    return HostMembership(config.run_id, url, public_key, options.keys, options.identity_path, "host")


def _start(options: argparse.Namespace, admission: Admission | None) -> Peer:
    config = PeerConfig(
        host_maddrs=options.host_maddrs,
        announce_maddrs=options.announce_maddrs,
        initial_peers=options.initial_peers,
        identity_path=options.identity_path,
        client_mode=False,
        check_identity=False,  # a lock keeps the folder to one host
    )
    try:
        return start_peer(config, admission)
    except SwarmError as error:
        if error.kind != "dead_peers":
            raise
        print(f"The run's other first peers do not answer: {', '.join(config.initial_peers)}", file=sys.stderr)
        return start_peer(replace(config, initial_peers=[]), admission)


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="volunteer_kit.host_peer", description=__doc__)
    several: dict[str, Any] = {"type": lambda text: text.split(","), "default": []}
    parser.add_argument("run")
    parser.add_argument("--identity-path", required=True)
    parser.add_argument("--keys", default="keys", help="folder of the run's keys, for a run with an authority")
    parser.add_argument("--given-out", help="addresses by which volunteers know this peer", **several)
    for name in ("--host-maddrs", "--announce-maddrs", "--initial-peers"):
        parser.add_argument(name, **several)
    options = parser.parse_args(words)
    options.host_maddrs = options.host_maddrs or [*LISTEN]
    return options


if __name__ == "__main__":
    sys.exit(main())
