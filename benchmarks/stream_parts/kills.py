"""A reader that is killed again and again: is a sample lost or repeated, and how soon does it go on?"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from statistics import median

from .material import shards, stream

BATCH = 16


def _read(kind: str, where: list[str], journal: Path) -> None:
    """Read on from the journal's last line; a line a batch: its samples' names, the stream's state after it."""
    started = time.perf_counter()
    with journal.open("ab+") as file:
        file.seek(0)
        whole = file.read()
        file.truncate(whole.rfind(b"\n") + 1)  # a line that was not finished was never read, as far as we know
        reader = stream(kind, where)
        if lines := whole[: whole.rfind(b"\n") + 1].splitlines():
            reader.load_state_dict(json.loads(lines[-1])["state"])
        reader.read_ahead()
        seconds = None
        while True:
            batch = reader.next_batch(BATCH)
            seconds = seconds or time.perf_counter() - started
            line = {"names": batch.names, "state": reader.state_dict(), "seconds": seconds}
            os.write(file.fileno(), json.dumps(line).encode() + b"\n")


def kill_at_random(kind: str, url: str, folder: Path, kills: int, seed: int = 0) -> dict[str, float]:
    """Fork a reader, kill it with SIGKILL after a random number of batches and then a random moment, `kills` times."""
    where, journal = shards(url, folder, kind), folder.parent / f"journal-{kind}"
    rng, resumed = random.Random(seed), []
    for _ in range(kills):
        size = journal.stat().st_size if journal.exists() else 0
        child = os.fork()
        if child == 0:
            try:
                _read(kind, where, journal)
            finally:
                os._exit(1)
        wanted = size + rng.randrange(1, 40_000)
        deadline = time.monotonic() + 60
        while not journal.exists() or journal.stat().st_size < wanted:  # the reader's own lines are the event
            time.sleep(0.0005)
            if time.monotonic() > deadline or os.waitpid(child, os.WNOHANG)[0]:
                raise RuntimeError("the reader died by itself, or reads nothing")
        time.sleep(rng.random() * 0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    found, seconds = [], {}
    for line in journal.read_bytes().split(b"\n")[:-1]:
        entry = json.loads(line)
        found += [tuple(name) for name in entry["names"]]
        seconds[entry["seconds"]] = None
    resumed = list(seconds)[1:]
    undisturbed, expected = stream(kind, where), []
    while len(expected) < len(found):
        expected += [tuple(name) for name in undisturbed.next_batch(BATCH).names]
    return {
        "samples": len(found),
        "lost": len(set(expected[: len(found)]) - set(found)),
        "repeated": len(found) - len(set(found)),
        "same_order": found == expected[: len(found)],
        "seconds_median": median(resumed),
        "seconds_slowest": max(resumed),
    }
