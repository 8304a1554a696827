"""How much of our code takes part in one fault-free round of two peers?

    python benchmarks/round_trace.py

Two peers train on loopback: the kit's Peer, optimizer and Trainer over the demo's model, with gradients that are made
up. From its first backward pass behind a step until the next step is applied, all Python functions of a peer are
written down, in all its processes and threads (sys.setprofile, see round_trace_parts/tracer.py). A round is what both
peers ran for the same epoch. The first rounds, and rounds that were not whole, do not count; of the others the one in
the middle, by functions.

files_of_ours, functions_of_ours: distinct, under volunteer_kit/, without the process of the DHT, which is counted by
itself; lambdas of one function are one. Comprehensions, and the bodies of modules and classes, are no functions.
private_overrides_of_hivemind: methods with a leading underscore of hivemind's classes that classes of
volunteer_kit.swarm override. own_classes_in_longest_chain: of the classes in swarm and training. These two, and
swarm_lines, are of the package.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.home_parts.material import DEMO
from benchmarks.netlab_parts.telling import as_told, end_with
from benchmarks.round_trace_parts import tracer
from benchmarks.round_trace_parts.classes import classes_of, lines_of, longest_chain, private_overrides
from volunteer_kit.process_group import kill_all
from volunteer_kit.runs import load_run

ROOT = Path(__file__).parents[1]
SWARM = ROOT / "volunteer_kit" / "swarm"
LINES_BEFORE = 14518  # of volunteer_kit/swarm, before there was a node
PEERS = 2
MICROBATCHES = 6  # of each peer in an epoch
PATIENCE = 120.0  # s for a step
DHT = ("DHT", "LeanDHT")  # processes that are counted by themselves
NO_FUNCTIONS = ("<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Function(NamedTuple):
    """One that ran."""

    package: str  # volunteer_kit or hivemind
    file: str  # within it
    name: str  # qualified


class Ran(NamedTuple):
    """A function in one process of one peer."""

    window: int
    process: str
    function: Function


Round = list[tuple[int, Ran]]  # what ran for one epoch: (number of the peer, what)


# --- what the tracers wrote ---


def read_line(line: str) -> Ran | None:
    """A line of a trace; None: it is of no function."""
    window, process, path, name = line.rstrip("\n").split("\t")
    root = next(root for root in tracer.ROOTS if root in path)
    if name.rpartition(".")[2] in NO_FUNCTIONS:
        return None
    return Ran(int(window), process, Function(root.strip("/"), path.rpartition(root)[2], name))


def read_traces(folder: Path) -> list[Ran]:
    """The traces that a peer's processes wrote."""
    lines = (line for path in sorted(folder.glob("*.trace")) for line in path.read_text().splitlines())
    return [ran for ran in map(read_line, lines) if ran is not None]


def rounds_of(steps: Sequence[Sequence[dict]], ran: Sequence[Iterable[Ran]], skipped: int) -> list[Round]:
    """Return the functions that ran in each epoch that all peers shared.

    :param steps: "step" events of each peer
    :param ran: of each peer
    :param skipped: rounds at the beginning that do not count
    """
    whole = [
        {step["epoch"]: step["window"] for step in some if step["group_size"] == len(steps) and step["received"] == 1.0}
        for some in steps
    ]
    epochs = sorted(set.intersection(*(set(each) for each in whole)))[skipped:]
    return [
        [(peer, each) for peer, of_peer in enumerate(ran) for each in of_peer if each.window == whole[peer][epoch]]
        for epoch in epochs
    ]


def functions(round: Round, package: str = "volunteer_kit", processes: Iterable[str] | None = None) -> set[Function]:
    """The functions of a package that ran in some processes; None: in all but the DHT's."""
    return {
        each.function for _, each in round
        if each.function.package == package
        and (each.process not in DHT if processes is None else each.process in processes)
    }  # fmt: skip


def files(some: Iterable[Function]) -> set[str]:
    """The files that they are in."""
    return {each.file for each in some}


# --- the two peers ---


class TracedPeer:
    """A process of round_trace_parts/worker.py, with all that it starts."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self.folder, self.log = folder, folder / "log"
        traces = folder / "traces"
        traces.mkdir(parents=True)
        (traces / tracer.WINDOW).write_bytes(bytes(8))
        begins_with = folder / "site"
        begins_with.mkdir()
        shutil.copy(tracer.__file__, begins_with / "sitecustomize.py")
        path = os.pathsep.join([str(begins_with), str(ROOT)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.round_trace_parts.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", tracer.FOLDER: str(traces)},
            start_new_session=True,
        )  # fmt: skip
        self.say(json.dumps(settings))
        self.events: list[dict] = []
        self._queue: queue.Queue[dict | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def say(self, line: str) -> None:
        """A line to its stdin."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                self._queue.put(json.loads(line))
        self._queue.put(None)

    def wait_for(self, name: str) -> dict:
        """The next event of this name. Raises SystemExit."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                event = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                event = None
            if event is None:
                raise SystemExit(f"A peer came to no {name!r}.\n{self.log.read_text()[-3000:]}")
            self.events.append(event)
            if event["event"] == name:
                return event

    @property
    def steps(self) -> list[dict]:
        return [event for event in self.events if event["event"] == "step"]

    def kill(self) -> None:
        kill_all(self.process.pid)
        self.process.wait(10)


@contextlib.contextmanager
def traced_peers(folder: Path, run: dict[str, Any]) -> Iterator[list[TracedPeer]]:
    """Two of them, ready."""
    peers: list[TracedPeer] = []
    try:
        invited: list[str] = []
        for number in range(PEERS):
            own = folder / f"peer-{number}"
            settings = {
                "run": run, "address": "127.0.0.1", "initial_peers": invited, "client_mode": False,
                "identity_path": str(own / "identity.key"), "folder": str(own / "state"),
                "batch": max(1, run["target_batch_size"] // (PEERS * MICROBATCHES)), "seconds": 0.1,
            }  # fmt: skip
            peers.append(TracedPeer(own, settings))
            invited = invited or peers[0].wait_for("connected")["maddrs"]
            peers[-1].wait_for("ready")
        for peer in peers:
            peer.say("go")
        yield peers
    finally:
        for peer in peers:
            peer.kill()


def trace(run: dict[str, Any], skipped: int, wanted: int) -> list[Round]:
    """`wanted` rounds behind the first ones. Raises SystemExit."""
    with tempfile.TemporaryDirectory(prefix="round-trace-") as name:
        folder = Path(name)
        with traced_peers(folder, run) as peers:
            for _ in range(4 * (skipped + wanted)):
                for peer in peers:
                    peer.wait_for("step")
                steps = [peer.steps for peer in peers]
                if len(rounds_of(steps, [()] * PEERS, skipped)) >= wanted:
                    break
        found = rounds_of(steps, [read_traces(peer.folder / "traces") for peer in peers], skipped)
        if not found:
            logs = "\n".join(peer.log.read_text()[-2000:] for peer in peers)
            raise SystemExit(f"The peers made no round together: {steps}\n{logs}")
        return found[:wanted]


# --- what it comes to ---


def print_round(round: Round) -> None:
    """Tables: by process, and by room."""
    processes = sorted({each.process for _, each in round}, key=lambda process: (process in DHT, process))
    print(f"\n{'process':<44}{'functions':>10}{'files':>7}{'of hivemind':>13}{'files':>7}")
    for process in processes:
        numbers = sorted({peer for peer, each in round if each.process == process})
        ours, theirs = (functions(round, package, [process]) for package in ("volunteer_kit", "hivemind"))
        who = f"{process}{' (not in the sum)' if process in DHT else ''}, peer {' and '.join(map(str, numbers))}"
        print(f"{who:<44}{len(ours):>10}{len(files(ours)):>7}{len(theirs):>13}{len(files(theirs)):>7}")
    ours, theirs = functions(round), functions(round, "hivemind")
    print(f"{'together':<44}{len(ours):>10}{len(files(ours)):>7}{len(theirs):>13}{len(files(theirs)):>7}")
    print(f"\n{'room':<44}{'functions':>10}{'files':>7}")
    rooms: dict[str, set[Function]] = {}
    for each in ours:
        parts = each.file.split("/")
        rooms.setdefault("/".join(parts[: 2 if len(parts) > 2 else 1]), set()).add(each)
    for room, some in sorted(rooms.items(), key=lambda item: -len(item[1])):
        print(f"{room:<44}{len(some):>10}{len(files(some)):>7}")


def print_functions(round: Round) -> None:
    """All of ours, by file."""
    for file in sorted(files(functions(round))):
        names = sorted(each.name for each in functions(round) if each.file == file)
        print(f"{file}: {', '.join(names)}")


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Print the figures of the median round and of the package."""
    middle = median_low(len(functions(round)) for round in rounds)
    round = next(each for each in rounds if len(functions(each)) == middle)
    print_round(round)
    ours, theirs = functions(round), functions(round, "hivemind")
    swarm = classes_of(["volunteer_kit.swarm"])
    overrides = private_overrides(swarm)
    chain = longest_chain(classes_of(["volunteer_kit.swarm", "volunteer_kit.training"]))
    here = {f"volunteer_kit.{file.removesuffix('.py').replace('/', '.')}" for file in files(ours)}
    of_round = sum(each.own.__module__ in here for each in overrides)
    counts = ", ".join(str(len(functions(each))) for each in rounds)
    print(f"\nfunctions of ours, round by round: {counts}")
    print(f"private overrides of hivemind: {len(overrides)}, {of_round} of them in files of this round")
    print(f"longest chain: {' < '.join(each.__name__ for each in chain)}")
    return {
        "files_of_ours": len(files(ours)),
        "functions_of_ours": len(ours),
        "functions_of_hivemind": len(theirs),
        "files_of_hivemind": len(files(theirs)),
        "functions_of_dht_process": len(functions(round, processes=DHT)),
        "private_overrides_of_hivemind": len(overrides),
        "private_overrides_in_round": of_round,
        "own_classes_in_longest_chain": len(chain),
        "swarm_lines": lines_of(SWARM),
        "swarm_lines_before": LINES_BEFORE,
        "rounds": len(rounds),
    }


def main() -> int:
    """Print tables, and as the last line the figures as flat JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=DEMO, help="a run file; the demo's")
    parser.add_argument("--skipped", type=int, default=3, help="rounds at the beginning that do not count")
    parser.add_argument("--rounds", type=int, default=5, help="that count")
    parser.add_argument("--list", action="store_true", help="name all functions")
    options = parser.parse_args()
    run = yaml.safe_load(options.run.read_text())
    load_run(run)  # raises RunError
    rounds = trace(run, options.skipped, options.rounds)
    told = figures(rounds)
    if options.list:
        print_functions(rounds[0])
    print(as_told(told))
    return 0


if __name__ == "__main__":
    end_with(main)
