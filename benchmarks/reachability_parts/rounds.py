"""A cell that trains: a peer in each house, until rounds of all of them have succeeded."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.reachability_parts.cells import PORT, Cell, machines
from tests.local_swarm import LocalPeer, is_whole
from volunteer_kit.addressing import LISTEN

WHOLE = 10  # rounds of all members, in each peer's eyes; one takes a second
PATIENCE = 180.0  # s; some 20, but on a busy machine


class Trained(NamedTuple):
    """Report what each peer of one cell found out.

    Until its first round of all members a peer is joining: the others step each second, and what it has downloaded is
    a step old by then, or a round that has begun without it is not its own. `joining`, `failed`: of failures.CAUSES ->
    rounds that lacked something before and after that, as all saw them; `whole`: rounds of all members, as the peer saw
    them that saw fewest; `seconds` until then; `why_not`: "" if all went well.
    """

    client_modes: tuple[bool, ...]
    whole: int
    joining: Mapping[str, int]
    failed: Mapping[str, int]
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
    joining, failed = Counter(), Counter()
    for events in rounds:
        met_at = next((place for place, e in enumerate(events) if is_whole(e, len(peers))), len(events))
        joining.update(_causes(events[:met_at]))
        failed.update(_causes(events[met_at:]))
    return Trained(tuple(modes), whole, joining, failed, time.monotonic() - began, why_not)


def _causes(events: Sequence[Mapping[str, Any]]) -> list[str]:
    return [event["cause"] for event in events if event["cause"] is not None]


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
