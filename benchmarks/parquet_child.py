"""Parquet by pyarrow alone in a process of its own, beside the kit's guarded reader: speed, memory, requests, damage.

    python benchmarks/parquet_child.py

The child has no network: it asks its parent for ranges of bytes, and sends record batches back. Both sides read the
same files from memory; CPU seconds are of parent and child together.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import random
import resource
import time
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from volunteer_kit.data.parquet import Table
from volunteer_kit.data.source import ShardError
from volunteer_kit.data.table_columns import values_of

SPAWN = multiprocessing.get_context("spawn")
MEMORY = 3 * 2**30  # bytes of addresses that a child may take
ROUNDS = 3
DAMAGED = 300


def files() -> dict[str, bytes]:
    """As LAION's codes (2 kB a row) and as pictures (30 kB a row), with columns that nobody reads."""
    rng = np.random.default_rng(0)
    found = {}
    for name, rows, size in (("codes", 20_000, 2048), ("pictures", 3000, 30_000)):
        table = pa.table({
            "caption": [f"picture number {n} of all" for n in range(rows)],
            "pixels": [rng.bytes(size) for _ in range(rows)],
            "NSFW": ["UNLIKELY"] * rows,
            "unread": [rng.bytes(500) for _ in range(rows)],
        })  # fmt: skip
        data = io.BytesIO()
        pq.write_table(table, data, row_group_size=1000)
        found[name] = data.getvalue()
    return found


COLUMNS = ["caption", "pixels", "NSFW"]


class Served:
    """A file of which ranges are asked for."""

    def __init__(self, data: bytes) -> None:
        self.data, self.requests, self.bytes = data, 0, 0

    def open(self, start: int, stop: int) -> BinaryIO:
        self.requests, self.bytes = self.requests + 1, self.bytes + stop - start
        return io.BytesIO(self.data[start:stop])


def by_kit(served: Served) -> int:
    table = Table(len(served.data), served.open)
    rows = 0
    for _, batch in table.batches([name for name in COLUMNS if name in table.columns], 0, table.num_rows, served.open):
        rows += len([values_of(column) for column in batch.columns][0])
    return rows


class _Asking(io.RawIOBase):
    """In the child: a file whose bytes the parent has."""

    def __init__(self, parent: Connection, size: int) -> None:
        self._parent, self._size, self._at = parent, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._at + size, self._size)
        self._parent.send((self._at, stop))
        self._at = stop
        return self._parent.recv_bytes()


def _child(parent: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (size := parent.recv()) is not None:
        try:
            file = pq.ParquetFile(_Asking(parent, size), pre_buffer=False, buffer_size=2**20)
            columns = [name for name in COLUMNS if name in file.schema_arrow.names]
            for batch in file.iter_batches(64, columns=columns, use_threads=False):
                sink = io.BytesIO()
                with pa.ipc.new_stream(sink, batch.schema) as writer:
                    writer.write_batch(batch)
                parent.send(sink.getbuffer().nbytes)
                parent.send_bytes(sink.getbuffer())
            parent.send(None)
        except Exception as error:
            parent.send(type(error).__name__)


class Child:
    def __init__(self) -> None:
        self._end, other = SPAWN.Pipe()
        started = time.monotonic()
        self.process = SPAWN.Process(target=_child, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.read(Served(SMALLEST))
        self.start_seconds = time.monotonic() - started

    def read(self, served: Served) -> int:
        """Rows. Raises ValueError for what pyarrow raises, EOFError if the child died."""
        rows = 0
        self._end.send(len(served.data))
        while (message := self._end.recv()) is not None:
            if isinstance(message, str):
                raise ValueError(message)
            if isinstance(message, tuple):
                self._end.send_bytes(served.open(*message).read())
                continue
            with pa.ipc.open_stream(self._end.recv_bytes()) as stream:
                rows += sum(len([values_of(column) for column in batch.columns][0]) for batch in stream)
        return rows

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def _smallest() -> bytes:
    data = io.BytesIO()
    pq.write_table(pa.table({"caption": ["a"]}), data)
    return data.getvalue()


SMALLEST = _smallest()


def damaged(times: int) -> list[bytes]:
    dice, found = random.Random(5), []
    rows = pa.table({"caption": [f"c {n % 7}" for n in range(60)], "pixels": [dice.randbytes(32) for _ in range(60)]})
    sink = io.BytesIO()
    pq.write_table(rows, sink, row_group_size=20)
    for _ in range(times):
        data = bytearray(sink.getvalue())
        footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        for _ in range(dice.choice((1, 1, 2, 4))):
            data[dice.randrange(footer, len(data))] = dice.choice((0, 127, 255, dice.randrange(256)))
        found.append(bytes(data))
    return found


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def child_cpu(process: Any) -> float:
    fields = open(f"/proc/{process.pid}/stat").read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def memory(process: Any) -> float:
    text = open(f"/proc/{process.pid}/status").read()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1000


def main() -> None:
    report: dict[str, Any] = {}
    child = Child()
    report["child_start_s"] = round(child.start_seconds, 2)
    for name, data in files().items():
        for side in ("kit", "child"):
            best = {"cpu_s": 9e9, "wall_s": 9e9}
            for _ in range(ROUNDS):
                served, wall, used, theirs = Served(data), time.monotonic(), cpu(), child_cpu(child.process)
                rows = by_kit(served) if side == "kit" else child.read(served)
                spent = cpu() - used + child_cpu(child.process) - theirs
                best = {"cpu_s": min(best["cpu_s"], spent), "wall_s": min(best["wall_s"], time.monotonic() - wall)}
            report[f"{name}, {side}"] = {
                "rows": rows, "rows_per_cpu_s": round(rows / best["cpu_s"]),
                "rows_per_s": round(rows / best["wall_s"]), "requests": served.requests,
                "MB_fetched": round(served.bytes / 1e6, 1), "MB_of_file": round(len(data) / 1e6, 1),
            }  # fmt: skip
    report["child_peak_MB"] = round(memory(child.process))
    for side in ("kit", "child"):
        outcomes, wall = Counter[str](), time.monotonic()
        for data in damaged(DAMAGED):
            try:
                rows = by_kit(Served(data)) if side == "kit" else child.read(Served(data))
                outcomes["read" if rows == 60 else "other_rows"] += 1
            except (ShardError, ValueError):
                outcomes["refused"] += 1
            except (EOFError, ConnectionError):
                outcomes["died"] += 1
                child.close()
                child = Child()
        report[f"damaged footers, {side}"] = {**outcomes, "s": round(time.monotonic() - wall, 1)}
    long = pa.array(["x" * (8 * 2**20 + 10)])
    sink = io.BytesIO()
    rows_of_one = pa.table({"caption": pa.DictionaryArray.from_arrays(pa.array([0] * 5000, pa.int32()), long)})
    pq.write_table(rows_of_one, sink, compression="zstd", dictionary_pagesize_limit=2**25, store_schema=False)
    for side in ("kit", "child"):
        try:
            found = str(by_kit(Served(sink.getvalue())) if side == "kit" else child.read(Served(sink.getvalue())))
        except (ShardError, ValueError, EOFError, ConnectionError) as error:
            found = f"{type(error).__name__}: {error}"
        report[f"a value of 8 MB in 5,000 rows, {side}"] = found
        if side == "child" and child.process.is_alive():
            report["child_peak_MB_then"] = round(memory(child.process))
    child.close()
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
