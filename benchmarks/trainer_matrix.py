"""Trainers of transformers, PEFT and TRL over a swarm: alone beside the plain one, and in twos.

    python benchmarks/trainer_matrix.py                   all of it, some 25 minutes on two cores; no network
    python benchmarks/trainer_matrix.py --alone --only DPO    one part, and the cases whose names hold a pattern
    python benchmarks/trainer_matrix.py --store               all of it, stored under benchmarks/results/

Alone a peer must be a plain Trainer: parameters and logged losses are equal to the bit, unless the case says why not.
In twos both must end with equal parameters, and have taken more than half of their steps together. What a step holds
is compared with target_batch_size, and the examples that are reported with those that losses were computed of.

A table for people, and a last line of JSON: the exit status is 0 if all of it is as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import load_file

from benchmarks.trainer_matrix_parts.cases import Case, all_cases
from volunteer_kit.process_group import kill_all

ROOT = Path(__file__).parents[1]
STORED = ROOT / "benchmarks/results/trainer_matrix.json"
PATIENCE = 240.0  # s for a case
KINDS = ("lm", "packing", "padding_free", "flattening", "dpo", "reward", "kto", "grpo")
WORST = 1.25  # target batches that a step of two may hold


class Worker:
    """A process that trains cases one after another; a new one after a case that did not end."""

    def __init__(self, folder: Path, name: str):
        self.log = folder / f"{name}.log"
        self.process: subprocess.Popen | None = None

    def begin(self, **order: Any) -> None:
        self.start()
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def start(self) -> None:
        """It imports for a minute, while others may do the same."""
        if self.process is None:
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.trainer_matrix_parts.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("a"), text=True,
                env={**os.environ, **quiet, "PYTHONPATH": path}, start_new_session=True, cwd=ROOT,
            )  # fmt: skip
            self._said: queue.Queue[dict | None] = queue.Queue()
            threading.Thread(target=self._read, args=(self.process, self._said), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen, said: queue.Queue) -> None:
        for line in process.stdout:
            if line.startswith('{"event"'):
                said.put(json.loads(line))
        said.put(None)

    def wait_for(self, name: str, deadline: float) -> dict[str, Any]:
        """The next event of this name; of one that failed, {"failed": why}, and so what does not come in time."""
        while True:
            try:
                event = self._said.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                event = {"event": "done", "failed": f"it had not ended after {PATIENCE:g} s"}
                self.end()
            if event is None:
                event = {"event": "done", "failed": f"its process ended, see {self.log}"}
                self.end()
            if event["event"] == name or event["event"] == "done":
                return event

    def end(self) -> None:
        if self.process is not None:
            kill_all(self.process.pid)
            self.process.wait(10)
            self.process = None


@contextlib.contextmanager
def workers(folder: Path, *names: str) -> Iterator[list[Worker]]:
    made = [Worker(folder, name) for name in names]
    try:
        for worker in made:
            worker.start()
        yield made
    finally:
        for worker in made:
            worker.end()


# --- alone ---


def judge_alone(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    as_it_should = found.get("equal") or (bool(case.why_not) and found.get("close", False))
    return {**found, "case": case.name, "ok": bool(as_it_should), "why_not": case.why_not}


def words_alone(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"failed: {row['failed'][:90]}"
    if row["equal"]:
        how = "equal to the bit"
    else:
        how = f"{row['differing']} of {row['of']} parameters differ, by {row['distance']:.2g}"
        how += "" if row["log_equal"] else "; the log as well"
        how += f" ({row['why_not']})" if row["why_not"] else ""
    counted = "" if row["counted_right"] else f"; counted {row['counted']} examples of {row['held']}"
    steps = "" if len(set(row["steps"])) == 1 else f"; {row['steps'][1]} steps in place of {row['steps'][0]}"
    return f"{how}{steps}{counted}"


def try_alone(cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    rows = []
    with workers(folder, "alone") as (worker,):
        for number, case in enumerate(cases):
            worker.begin(case=case.name, mode="alone", folder=str(folder / f"alone-{number}"))
            found = worker.wait_for("done", time.monotonic() + PATIENCE)
            rows.append(judge_alone(case, found))
            tell(rows[-1], words_alone(rows[-1]))
    return rows


# --- in twos ---


def judge_pair(case: Case, found: list[dict[str, Any]], folders: list[Path]) -> dict[str, Any]:
    failed = [one["failed"] for one in found if "failed" in one]
    if failed:
        return {"case": case.name, "ok": False, "failed": failed[0]}
    one, other = (load_file(folder / "trained.safetensors") for folder in folders)
    equal = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    groups = [report["group"] for peer in found for report in peer["reports"]]
    held: dict[int, int] = defaultdict(int)
    for peer in found:
        for report in peer["reports"]:
            if report["group"] == 2 and report["received"] == 1.0:
                held[report["epoch"]] += report["samples"]
    together = bool(groups) and groups.count(2) > len(groups) / 2
    overshoot = max(held.values(), default=0) / case.pair_target
    return {
        "case": case.name, "ok": equal and together, "equal": equal, "together": groups.count(2),
        "reports": len(groups), "held": sorted(held.values()), "target": case.pair_target, "overshoot": overshoot,
    }  # fmt: skip


def words_pair(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"failed: {row['failed'][:90]}"
    same = "equal" if row["equal"] else "DIFFERENT"
    held = ", ".join(map(str, row["held"]))
    return f"{same} at the end; steps of {row['target']} held {held}; {row['together']} of {row['reports']} together"


def try_pairs(cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    rows = []
    with workers(folder, "one", "other") as both:
        for number, case in enumerate(cases):
            folders = [folder / f"{mode}-{number}" for mode in ("one", "other")]
            deadline = time.monotonic() + PATIENCE
            both[0].begin(case=case.name, mode="one", folder=str(folders[0]), initial_peers=[])
            begun = both[0].wait_for("invitation", deadline)
            found = [begun]
            if "failed" not in begun:
                joining = {"folder": str(folders[1]), "initial_peers": begun["maddrs"]}
                both[1].begin(case=case.name, mode="other", **joining)
                found = [worker.wait_for("done", deadline) for worker in both]
            row = judge_pair(case, found, folders)
            if "failed" in row:
                for worker in both:
                    worker.end()
            rows.append(row)
            tell(row, words_pair(row))
    return rows


def tell(row: dict[str, Any], words: str) -> None:
    print(f"{'ok ' if row['ok'] else 'NOT'}  {row['case']:46} {words}", flush=True)


# --- all of it ---


def summary(alone: list[dict[str, Any]], pairs: list[dict[str, Any]], cases: dict[str, Case]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if alone:
        counted = {kind: [] for kind in KINDS}
        for row in alone:
            kind = cases[row["case"]].kind
            if kind in counted:
                counted[kind].append(bool(row.get("counted_right")))
        found |= {
            "cases": len(alone),
            "equal": sum(bool(row.get("equal")) for row in alone),
            "explained": sum(row["ok"] and not row.get("equal") for row in alone),
            "not_equal": ", ".join(row["case"] for row in alone if not row["ok"]),
        }
        found |= {f"counted_right_{kind}": all(rights) for kind, rights in counted.items() if rights}
        found["examples_counted_right"] = all(all(rights) for rights in counted.values())
        found["kinds_counted"] = sum(bool(rights) for rights in counted.values())
    if pairs:
        found |= {
            "pairs": len(pairs),
            "in_sync": sum(row["ok"] for row in pairs),
            "not_in_sync": ", ".join(row["case"] for row in pairs if not row["ok"]),
            "worst_overshoot": round(max((row.get("overshoot", 0.0) for row in pairs), default=0.0), 3),
            "over": ", ".join(row["case"] for row in pairs if row.get("overshoot", 0.0) > WORST),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a pattern that names of cases hold")
    parser.add_argument("--alone", action="store_true", help="not in twos")
    parser.add_argument("--pairs", action="store_true", help="in twos only")
    parser.add_argument("--store", action="store_true", help=f"in {STORED.relative_to(ROOT)}")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or workers would stay
    cases = all_cases()
    chosen = [case for case in cases.values() if re.search(asked.only, case.name)]
    began = time.monotonic()
    alone: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        if not asked.pairs:
            print(f"Alone beside the plain Trainer, {len(chosen)} cases")
            alone = try_alone(chosen, Path(folder))
        if not asked.alone:
            of_two = [case for case in chosen if case.pair_target]
            print(f"In twos, {len(of_two)} cases")
            pairs = try_pairs(of_two, Path(folder))
    found = {**summary(alone, pairs, cases), "minutes": round((time.monotonic() - began) / 60, 1)}
    if asked.store:
        STORED.write_text(json.dumps({"figures": found, "alone": alone, "pairs": pairs}, indent=1) + "\n")
    print(json.dumps(found))
    good = all(row["ok"] for row in [*alone, *pairs]) and found.get("worst_overshoot", 0.0) <= WORST
    sys.exit(0 if good and found.get("examples_counted_right", True) else 1)


if __name__ == "__main__":
    main()
