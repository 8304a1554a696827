"""webdataset and bitsandbytes beside the kit's own code, in each use they could have; docs/libraries.md decides.

    python benchmarks/libraries.py [--quick]

Both sides of a row run in turn in one process, on one thread, and are timed by the processor time that they take, so
that a busy machine does not matter; a ratio is the median of neighbouring runs, above 1 where the kit is faster. The
8-bit optimizer's step beside bitsandbytes has a benchmark of its own, benchmarks/optimizer.py, and reading over HTTP is
in benchmarks/stream.py. Needs the extra `dev`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import webdataset
from bitsandbytes.functional import create_linear_map, dequantize_blockwise, quantize_blockwise
from hivemind.compression import CompressionInfo
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from volunteer_kit.data.code_shards import END, pack_record
from volunteer_kit.data.source import Limits, ShardError
from volunteer_kit.data.tar_reader import read_members
from volunteer_kit.swarm.codecs.registry import CODECS

CODES = 1024  # of a record
PICTURE = 20_000  # bytes, of a 256-pixel JPEG
LARGE = 200 * 2**20  # bytes of one member: a hostile shard's, or a film that strayed into one


class Row(NamedTuple):
    """One use: seconds or samples a second of both sides."""

    name: str
    unit: str
    ours: float
    theirs: float
    ratio: float  # how many times faster ours is


def in_turn(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> tuple[float, float, float]:
    """Processor seconds of both, medians, and the median of their quotients."""
    times: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        pair = {}
        for name, side in (("ours", ours), ("theirs", theirs))[:: 1 if number % 2 else -1]:
            started = time.process_time()
            side()
            pair[name] = time.process_time() - started
        times.append((pair["ours"], pair["theirs"]))
    times = times[1:]  # the first loads and compiles
    return median(a for a, _ in times), median(b for _, b in times), median(b / a for a, b in times)


# --- webdataset ---


def writing(folder: Path, count: int, rounds: int) -> Row:
    """A shard of codes, record by record, to a file."""
    rng = np.random.default_rng(0)
    records = [
        (f"{n:09d}", rng.integers(8192, size=CODES), {"key": f"{n:09d}", "caption": "a red circle", "index": n})
        for n in range(count)
    ]

    def ours() -> None:
        with (folder / "ours.tar").open("wb") as file:
            for record in records:
                file.write(pack_record(*record))
            file.write(END)

    def theirs() -> None:
        tar = str(folder / "theirs.tar")
        with webdataset.TarWriter(tar, encoder=False, user="", group="", mode=0o644, mtime=0) as writer:
            for key, codes, meta in records:
                text = json.dumps(meta, ensure_ascii=False, separators=(",", ":")).encode()
                writer.write({"__key__": key, "codes": np.asarray(codes, "<u2").tobytes(), "json": text})

    found = in_turn(ours, theirs, rounds)
    made = (folder / "ours.tar").read_bytes(), (folder / "theirs.tar").read_bytes()
    if made[0].rstrip(b"\0") != made[1].rstrip(b"\0"):
        raise SystemExit("The two shards differ in more than their end.")
    return Row("write a shard of codes", "records/s", count / found[0], count / found[1], found[2])


def reading(folder: Path, count: int, rounds: int) -> Row:
    """All members of a local shard of pictures, nothing decoded."""
    shard, rng = folder / "pictures.tar", np.random.default_rng(0)
    with webdataset.TarWriter(str(shard), encoder=False) as writer:
        for n in range(count):
            writer.write({"__key__": f"{n:09d}", "jpg": rng.bytes(PICTURE), "txt": b"a red circle", "json": b"{}"})

    def ours() -> None:
        with shard.open("rb") as file:
            if (
                sum(member.read() is not None for member in read_members(file, Limits(), lambda name: True))
                != 3 * count
            ):
                raise SystemExit("members are missing")

    def theirs() -> None:
        data = webdataset.WebDataset(str(shard), shardshuffle=False, empty_check=False)
        if sum(len(sample["jpg"]) > 0 for sample in data) != count:
            raise SystemExit("samples are missing")

    found = in_turn(ours, theirs, rounds)
    return Row("read a local shard", "records/s", count / found[0], count / found[1], found[2])


def cut_is_noticed(folder: Path) -> dict[str, bool]:
    """Tell whether a reader reports a shard that ends early at a block's boundary."""
    whole = (folder / "ours.tar").read_bytes()
    at = len(pack_record("0" * 9, [0] * CODES, {"key": "0" * 9, "caption": "a red circle", "index": 0}))
    (folder / "cut.tar").write_bytes(whole[:at])
    try:
        with (folder / "cut.tar").open("rb") as file:
            for member in read_members(file, Limits(), lambda name: True):
                member.read()
        ours = False
    except ShardError:
        ours = True
    try:
        list(webdataset.WebDataset(str(folder / "cut.tar"), shardshuffle=False, empty_check=False))
        theirs = False
    except Exception:
        theirs = True
    return {"cut_noticed": ours, "cut_noticed_webdataset": theirs}


def large_member(side: str, shard: str) -> None:
    """Read past a member of LARGE bytes; prints the MB by which this process has grown."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if side == "ours":
        with open(shard, "rb") as file:
            for member in read_members(file, Limits(), lambda name: True):
                member.read()
    else:
        for _ in webdataset.WebDataset(shard, shardshuffle=False, empty_check=False):
            pass
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3)


def memory_of_large(folder: Path) -> dict[str, float]:
    shard = folder / "large.tar"
    with webdataset.TarWriter(str(shard), encoder=False) as writer:
        writer.write({"__key__": "a", "jpg": bytes(LARGE)})
    found = {}
    for side, key in (("ours", "large_member_mb"), ("theirs", "large_member_mb_webdataset")):
        command = [sys.executable, __file__, "--large", side, str(shard)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[key] = float(done.stdout.splitlines()[-1])
    return found


# --- bitsandbytes ---


def quantizing(values: int, rounds: int) -> tuple[list[Row], dict[str, float]]:
    """8-bit gradients to bytes, and back. The kit's codec is for messages: its time has the protobuf's in it."""
    gradient = torch.randn(values, generator=torch.Generator().manual_seed(0)) * 1e-3
    codec, info = CODECS["blockwise8"], CompressionInfo.from_tensor(gradient)
    block, linear = codec.block_size, create_linear_map(signed=True)
    message = codec.compress(gradient, info)
    codes, scale = quantize_blockwise(gradient, code=linear, blocksize=block)

    def theirs() -> Any:
        return quantize_blockwise(gradient, code=linear, blocksize=block)

    there = in_turn(lambda: codec.compress(gradient, info), theirs, rounds)
    back = in_turn(lambda: codec.extract(message), lambda: dequantize_blockwise(codes, scale), rounds)
    size = values / 1e6
    rows = [
        Row("8-bit gradients to bytes", "M values/s", size / there[0], size / there[1], there[2]),
        Row("8-bit gradients from bytes", "M values/s", size / back[0], size / back[1], back[2]),
    ]
    errors = {
        "codec_error": relative(codec.extract(message), gradient),
        "codec_error_bitsandbytes": relative(dequantize_blockwise(codes, scale), gradient),
        "codec_error_bitsandbytes_dynamic": relative(
            dequantize_blockwise(*quantize_blockwise(gradient, blocksize=block)), gradient
        ),
    }
    return rows, errors


def relative(found: torch.Tensor, values: torch.Tensor) -> float:
    return ((found - values).norm() / values.norm()).item()


# --- both ---


def import_cost(name: str) -> dict[str, float]:
    """Processor seconds and MB that an import adds to a process that has torch and numpy."""
    program = (
        "import resource, time, numpy, torch\n"
        "mb = lambda: int(open('/proc/self/status').read().split('VmRSS:')[1].split()[0]) / 1e3\n"
        f"before, started = mb(), time.process_time()\nimport {name}\n"
        "print(time.process_time() - started, mb() - before)"
    )
    runs = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
        runs.append([float(word) for word in done.stdout.split()[-2:]])
    return {f"import_{name}_s": min(s for s, _ in runs), f"import_{name}_mb": median(mb for _, mb in runs)}


def main(quick: bool) -> int:
    rounds, console = 3 if quick else 9, Console(width=110)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = [writing(folder, 500 if quick else 4000, rounds), reading(folder, 500 if quick else 4000, rounds)]
        figures: dict[str, Any] = {**cut_is_noticed(folder), **memory_of_large(folder)}
    found, errors = quantizing(2**20 if quick else 2**23, rounds)
    rows += found
    figures |= errors
    for name in ("webdataset", "bitsandbytes"):
        figures |= import_cost(name)
    table = Table("use", "the kit", "library", "the kit is faster by", title="webdataset and bitsandbytes")
    for row in rows:
        table.add_row(f"{row.name}, {row.unit}", f"{row.ours:,.1f}", f"{row.theirs:,.1f}", f"{row.ratio:.2f}")
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value), "", "")
    console.print(table)
    keys = {row.name: row.name.replace(" ", "_").replace("8-bit", "8_bit") for row in rows}
    last = {f"ratio_{keys[row.name]}": row.ratio for row in rows}
    last |= {f"{keys[row.name]}": row.ours for row in rows} | figures
    print(json.dumps({name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in last.items()}))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a look; figures worth less")
    parser.add_argument("--large", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.large:
        large_member(*options.large)
    else:
        sys.exit(main(options.quick))
