"""A cell that trains: a peer in each house, until rounds of all of them have succeeded."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.reachability_parts.cells import PORT, Cell, machines
from tests.local_swarm import LocalPeer, is_whole
from volunteer_kit.addressing import LISTEN

WHOLE = 3  # rounds of all members, in each peer's eyes
PATIENCE = 180.0  # s; some 20, but on a busy machine


class Trained(NamedTuple):
    """Report what each peer of one cell found out; `whole`: rounds of all members, as the peer saw them that saw
    fewest; `causes`: of failures.CAUSES -> rounds that lacked something, as all saw them; `seconds` until then;
    `why_not`: "" if all went well."""

    client_modes: tuple[bool, ...]
    whole: int
    causes: Mapping[str, int]
    seconds: float
    why_not: str = ""


def train(cell: Cell, folder: Path) -> Trained:
    """Raises NoNetlab."""
    began = time.monotonic()
    with machines(cell) as names, _peers(cell, names, folder) as peers:
        why_not = ""
        try:
            for peer in peers:
                peer.wait_whole(len(peers), WHOLE, PATIENCE)
        except AssertionError as error:
            why_not = str(error).partition(";")[0]
        said = [peer.said() for peer in peers]
    modes = [next((e["client_mode"] for e in events if e["event"] == "connected"), None) for events in said]
    rounds = [[e for e in events if e["event"] in ("epoch", "postponed")] for events in said]
    whole = min(sum(is_whole(e, len(peers)) for e in events) for events in rounds)
    causes = Counter(e["cause"] for events in rounds for e in events if e["cause"] is not None)
    return Trained(tuple(modes), whole, causes, time.monotonic() - began, why_not)


@contextlib.contextmanager
def _peers(cell: Cell, names: list[str], folder: Path) -> Iterator[list[LocalPeer]]:
    peers: list[LocalPeer] = []
    told: list[str] = []
    try:
        for index, name in enumerate(names):
            maddrs = [maddr if index else maddr.replace("/tcp/0", f"/tcp/{PORT}") for maddr in LISTEN]
            settings = {"network": name, "host_maddrs": maddrs, "initial_peers": told, "seed": index + 1}
            peers.append(LocalPeer(folder / f"{cell.name}-{index}.log", **settings, client_mode=None))
            if not index:
                peer_id = peers[0].wait_event("connected", PATIENCE)["peer_id"]
                told = [f"{start}/tcp/{PORT}/p2p/{peer_id}" for start in cell.first]
        yield peers
    finally:
        for peer in peers:
            peer.kill()
