"""The records of an open run's peers, as a stranger reads them: their kits, the time, and whether another machine
takes part under this one's key. A run with access control tells its members only."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from volunteer_kit.doctor import looks
from volunteer_kit.doctor.finding import Finding

START = 45.0  # s; p2pd alone needs more than 15 s on a busy Colab VM
RENEWED_WITHIN = 25.0  # s; a worker writes its record every 15 s


class Told(NamedTuple):
    """:ivar kits: versions of the others' kits, "" for one that tells none
    :ivar fingerprints: of the others' settings
    :ivar is_key_taken: another machine renews its record under this one's key; None: there is no key, or it was not
        asked
    :ivar wrong_clock: in words; "": the first peers' clocks are as ours
    """

    kits: Sequence[str] = ()
    fingerprints: Sequence[str] = ()
    is_key_taken: bool | None = None
    wrong_clock: str = ""


def read(run_id: str, identity: str, addresses: Sequence[str]) -> dict[str, Any]:
    """In the probe's process, under a key of its own. Raises SwarmError.

    :param identity: file of this machine's key; "": there is none, or a worker of this machine has it
    """
    from volunteer_kit.addressing import loopback_maddr
    from volunteer_kit.swarm.errors import SwarmError
    from volunteer_kit.swarm.net.peer import PeerConfig, start_peer
    from volunteer_kit.swarm.records.peer_record import PeerBoard

    config = PeerConfig(
        [*addresses], [loopback_maddr()], client_mode=True, startup_timeout=START, check_identity=False
    )  # fmt: skip
    try:
        peer = start_peer(config)
    except SwarmError as error:
        if error.kind != "clock":
            raise
        return Told(wrong_clock=str(error).partition("\n")[0])._asdict()
    try:
        records = PeerBoard(peer.dht, run_id).fetch().values()
        taken = _is_taken(peer.dht, run_id, Path(identity)) if identity else None
        kits, fingerprints = ([getattr(one, name) for one in records] for name in ("kit", "fingerprint"))
        return Told(kits, fingerprints, taken)._asdict()
    finally:
        peer.shutdown()


def _is_taken(dht: Any, run_id: str, identity: Path) -> bool:
    """A record that stands may be that of a worker which has just ended here; one that is renewed is another's."""
    from hivemind.dht.crypto import RSASignatureValidator
    from hivemind.p2p import PeerID

    from volunteer_kit.swarm.net.identity import load_private_key
    from volunteer_kit.swarm.net.same_key import find_instance

    key = identity.read_bytes()
    whose = PeerID.from_identity(key), RSASignatureValidator(load_private_key(key)).local_public_key
    first = find_instance(dht, run_id, *whose)
    until = time.monotonic() + RENEWED_WITHIN
    while first is not None and time.monotonic() < until:
        if find_instance(dht, run_id, *whose) not in (first, None):
            return True
        time.sleep(1.0)
    return False


def records(run_id: str, identity: Path | None, addresses: Sequence[str], within: float) -> Told | None:
    """:param identity: of this machine's key, if it is to be looked for
    :returns: None: they could not be read"""
    try:
        found = looks.probe(["records", run_id, str(identity or ""), *addresses], within)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Told(**found)


def kit(others: Sequence[str], own: str, by: str, is_one: bool = False) -> Finding:
    """:param others: versions of the kit that the run's host or peers have
    :param by: whose they are, in words; is_one: of one"""
    from volunteer_kit.swarm.records.kits import kit_words

    told = [version for version in others if version]
    if not told:
        return Finding("kit", "ok", f"volunteer_kit {own}; what {by} {'has' if is_one else 'have'} is not known")
    if words := kit_words(told, own):
        first, _, way_out = words.partition("\n")
        return Finding("kit", "warning", f"{first[0].lower()}{first[1:].rstrip('.')}", way_out)
    return Finding("kit", "ok", f"volunteer_kit {own}, as {by} {'has' if is_one else 'have'}")


def settings(fingerprints: Sequence[str], own: str) -> Finding | None:
    """:param fingerprints: of the others' settings
    :returns: None where some have this run's settings, or nobody is there"""
    if not fingerprints or own in fingerprints:
        return None
    most = Counter(fingerprints).most_common(1)[0][0]
    text = f"the others train with other settings (fingerprint {most[:8]}) than this run file has ({own[:8]})"
    return Finding("settings", "problem", text, "Ask the host for the current run file, or join by the run's link.")


def wrong_clock(text: str) -> Finding | None:
    """:param text: that the first peers' clocks differ; "": they do not"""
    from volunteer_kit.swarm.net.clock_watch import SET_CLOCK

    return Finding("peers' clocks", "problem", text, f"{SET_CLOCK}   (in a notebook: restart it)") if text else None
