"""Joining with trust: does a newcomer end with the right state, whatever donors do, and what does it cost?

    python benchmarks/join_state.py [--quick]

Real peers on loopback, each a process with a node; donors' lines are capped so that a transfer can be cut in the
middle. The founder brings the state of epoch 25 along, and two honest members have taken it. In each case a newcomer
joins, and its parameters and statistics are compared with the honest members' to the last bit:

    plain      nobody does anything
    killed     two of the donors are killed (SIGKILL) when a third of the state is here
    cut off    the newcomer is killed in the middle, and begins again with what is on its disk
    corrupt    a donor gives chunks with a wrong byte
    flipped    a donor's state has flipped bits
    outside    a donor's state is larger than any steps can have made it
    inside     a donor's state is as harmful as the bound allows
    league     two such donors confirm each other; more than half of the members do not

`refetched_pct`: bytes that came beyond the state's, of all, in the worst case: chunks that came twice, what a refused
donor gave, and all that nodes say besides. `joiners_8_ratio`: eight at once against one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path[:0] = [str(Path(__file__).parent.parent)]

WIDTH = 1024  # of a model of 4.2 M parameters: 50 MB with its statistics, 49 chunks
MBPS = 200.0  # Mbit/s of each donor
RUNS = 3
CASES = ("plain", "killed", "cut off", "corrupt", "flipped", "outside", "inside", "league")
FALSE = {"corrupt": 1, "flipped": 1, "outside": 1, "inside": 1, "league": 2}  # how many donors are false
CHUNK = 2**20  # bytes
BOUNDS = {"refetched_pct": 5.0}


class Swarm:
    """The honest donors, and whoever is added for a case."""

    def __init__(self, folder: Path):
        self.folder, self.peers = folder, []
        self.honest = [self.add("monitor")]
        self.honest[0].wait_event("ready")
        self.honest += [self.add("honest") for _ in range(2)]
        self.right = {donor.wait_event("ready")["digest"] for donor in self.honest}
        if len(self.right) != 1:
            raise SystemExit("The honest donors differ: nothing can be compared with them.")

    def add(self, kind: str, folder: Path | None = None):
        from tests.local_swarm import LocalPeer

        settings = {
            "kind": kind,
            "width": WIDTH,
            "folder": str(folder or self.folder / f"peer-{len(self.peers)}"),
            "max_mbps": MBPS,
        }
        if self.peers:
            settings["initial_peers"] = self.peers[0].wait_event("connected")["maddrs"]
        log = self.folder / f"peer-{len(self.peers)}.log"
        peer = LocalPeer(log, "benchmarks.join_state_parts.peer", **settings)
        self.peers.append(peer)
        return peer

    def remove(self, peer) -> None:
        """As a lost machine."""
        peer.kill()
        shutil.rmtree(Path(self.folder / f"peer-{self.peers.index(peer)}"), ignore_errors=True)

    def close(self) -> None:
        for peer in self.peers:
            peer.kill()


def is_downloading(share: float):
    return lambda event: event["event"] == "downloading" and event["share"] >= share


def started(swarm: Swarm, folder: Path | None = None):
    joiner = swarm.add("joiner", folder)
    joiner.wait_event("built")
    return joiner


def one_case(swarm: Swarm, case: str) -> dict:
    """One newcomer. :returns: its "joined" event, and whether its state is the right one."""
    others = []
    if case in FALSE:
        others = [swarm.add(case) for _ in range(FALSE[case])]
    elif case == "killed":
        others = [swarm.add("honest") for _ in range(2)]
    for other in others:
        other.wait_event("ready")
        if case in FALSE and case != "corrupt":
            other.order("spoil")
            other.wait_event("spoilt")
    folder = swarm.folder / f"joiner-{len(swarm.peers)}"
    joiner = started(swarm, folder)
    joiner.order("go")
    already = 0
    if case == "corrupt":  # it has told its hashes
        joiner.wait_for(is_downloading(0.0))
        others[0].order("spoil")
    if case == "killed":
        joiner.wait_for(is_downloading(0.33))
        for other in others:
            other.kill()
    elif case == "cut off":
        joiner.wait_for(is_downloading(0.5))
        joiner.kill()
        [have] = folder.glob("node/states/*.parts/state-*/have")
        already = CHUNK * sum(have.read_bytes())
        joiner = started(swarm, folder)
        joiner.order("go")
    joined = joiner.wait_event("joined", timeout=300.0)
    refused = [event["why"] for event in joiner.events if event["event"] == "refused"]
    for peer in (joiner, *others):
        swarm.remove(peer)
    shutil.rmtree(folder, ignore_errors=True)
    again = max(0, joined["received"] + already - joined["size"])
    return {**joined, "right": {joined["digest"]} == swarm.right, "again": again, "refused": refused}


def at_once(swarm: Swarm, count: int) -> list[dict]:
    joiners = [started(swarm) for _ in range(count)]
    for joiner in joiners:
        joiner.order("go")
    found = [joiner.wait_event("joined", timeout=300.0) for joiner in joiners]
    for joiner in joiners:
        swarm.remove(joiner)
    return [{**one, "right": {one["digest"]} == swarm.right} for one in found]


def measure(console: Console, folder: Path, quick: bool, cases: list[str]) -> dict:
    runs = 1 if quick else RUNS
    table = Table("case", "right state", "s", "download, s", "came again", "first refusal")
    shares, right, plain = {}, [], []
    swarm = Swarm(folder)
    try:
        for case in cases:
            found = [one_case(swarm, case) for _ in range(runs)]
            shares[case] = statistics.median(100 * one["again"] / one["size"] for one in found)
            right += [one["right"] for one in found]
            seconds = [one["seconds"] for one in found]
            plain = seconds if case == "plain" else plain
            why = next((one["refused"][0] for one in found if one["refused"]), "")
            fetch = statistics.median(one["fetch_s"] for one in found)
            cells = (
                f"{sum(one['right'] for one in found)}/{runs}",
                f"{statistics.median(seconds):.1f}",
                f"{fetch:.1f}",
            )
            table.add_row(case, *cells, f"{shares[case]:.1f} %", why)
            console.print(f"{case}: {found}", style="dim")
        eight = at_once(swarm, 2 if quick else 8)
        console.print(f"at once: {eight}", style="dim")
    finally:
        swarm.close()
    right += [one["right"] for one in eight]
    slowest = max(one["seconds"] for one in eight)
    table.add_row(f"{len(eight)} at once", f"{sum(one['right'] for one in eight)}/{len(eight)}", f"{slowest:.1f}")
    console.print(table)
    return {
        "right_state_all": all(right),
        "joins": len(right),
        "refetched_pct": round(max(shares.values()), 2),
        "join_s": round(statistics.median(plain), 2),
        f"joiners_{len(eight)}_s": round(slowest, 2),
        f"joiners_{len(eight)}_ratio": round(slowest / statistics.median(plain), 2),
    }


def main(quick: bool, cases: list[str]) -> int:
    console = Console(stderr=False)
    with tempfile.TemporaryDirectory(prefix="volunteer-kit-join-state-") as folder:
        figures = measure(console, Path(folder), quick, cases)
    failed = not figures["right_state_all"] or figures["refetched_pct"] > BOUNDS["refetched_pct"]
    print(json.dumps(figures))
    return int(failed)


if __name__ == "__main__":
    from benchmarks.netlab_parts.descendants import end_descendants_with_us

    end_descendants_with_us()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each case once, and two at once instead of eight")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, help="these cases, and plain")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves nothing behind
    options = parser.parse_args()
    sys.exit(main(options.quick, ["plain", *(case for case in options.only if case != "plain")]))
