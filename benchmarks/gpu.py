"""All that takes a GPU to know, in one command of eight minutes at most, on one card (H100, H200, or any other).

    python benchmarks/gpu.py                         everything; without a GPU the same with tiny sizes, on the CPU
    python benchmarks/gpu.py --only qlora vqgan      some parts; --skip leaves some out
    python benchmarks/gpu.py --out FOLDER            results: gpu.jsonl grows a line a part, gpu.json is written last

Each part is a process of its own with a time limit. One that fails or overruns is ended with all that it has started,
costs the others nothing, and what it had found until then is kept, with its traceback. How to take this to a machine
without a network, and where its results go: benchmarks/gpu_parts/README.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_parts.part import Setting, Tell
from volunteer_kit.process_group import kill_all

ROOT = Path(__file__).resolve().parents[1]
MARK = "VOLUNTEER_KIT_GPU_PART"  # in the environment of all that a part has started
MINUTES = 8.0  # of everything together, on a GPU
TINY_MINUTES, TINY_SCALE = 60.0, 6.0  # on a CPU that others use too: there it is no measurement, and need only end
LEAST = 10.0  # s; with less left a part is not begun
TAIL = 6000  # characters of a part's output that are kept where it failed


class Part(NamedTuple):
    """One measurement. `module` has measure(setting, tell, **options), which tells figures as it finds them."""

    name: str
    module: str
    seconds: float  # that it may take on a GPU
    what: str
    options: dict[str, Any] = {}


PARTS = (
    Part("machine", "machine", 45, "device, versions, kernels, codecs"),
    Part("model_bf16", "model", 75, "a step of dalle-pytorch's DALLE and of the kit's, bf16", {"precision": "bf16"}),
    Part("model_fp16", "model", 75, "the same in fp16", {"precision": "fp16"}),
    Part("peers", "peers", 150, "two peers of the original's run on one card, two epochs"),
    Part("qlora", "qlora", 90, "two peers with adapters over a base of 4 bits"),
    Part("vqgan", "vqgan", 70, "images to codes by the published VQGAN's layers"),
    Part("tuner_6", "tuner", 65, "the tuner with 6 GB of GPU memory", {"limit_gb": 6.0}),
    Part("tuner_16", "tuner", 65, "with 16 GB", {"limit_gb": 16.0}),
    Part("tuner_15", "tuner", 65, "with 15 GB", {"limit_gb": 15.0}),
    Part("quantize", "quantize", 30, "8-bit gradients: the kit's codecs, and bitsandbytes"),
)
STATUSES = ("ok", "failed", "overran", "no time left")


# --- one part, in a process of its own ---


def run_here(part: Part, setting: Setting, results: Path) -> int:
    """Measure; figures go to `results`, a JSON object a line, as they are found."""

    def tell(**figures: Any) -> None:
        with results.open("a") as file:
            file.write(json.dumps(plain(figures)) + "\n")

    try:
        module = importlib.import_module(f"benchmarks.gpu_parts.{part.module}")
        module.measure(setting, Tell(tell), **part.options)
    except BaseException as error:  # SystemExit too: parts made of other benchmarks raise it with a reason
        tell(error=f"{type(error).__name__}: {error}"[-TAIL:], traceback=traceback.format_exc()[-TAIL:])
        traceback.print_exc()
        return 1
    return 0


def plain(value: Any) -> Any:
    """As JSON can hold it: four digits, and null for what is no number."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value if isinstance(value, (int, str, bool, type(None))) else str(value)


# --- all of them ---


def run_apart(part: Part, seconds: float, tiny: bool, log: Path) -> dict[str, Any]:
    """The part in a process of its own, ended after `seconds`. -> what it told, its status and seconds."""
    mark = f"{part.name}-{secrets.token_hex(8)}"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"gpu-{part.name}-", ignore_cleanup_errors=True) as folder:
        results = Path(folder) / "results.jsonl"
        command = [sys.executable, str(Path(__file__).resolve()), "--part", part.name, "--folder", folder]
        command += ["--seconds", f"{seconds:.1f}", *["--tiny"] * tiny]
        environment = {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path_of_children()}
        with log.open("ab") as output:
            output.write(f"\n=== {part.name} ===\n".encode())
            output.flush()
            begins = output.tell()
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )  # fmt: skip
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:  # also when we are interrupted
                left = kill_all(process.pid, f"{MARK}={mark}")
                process.wait()
        found: dict[str, Any] = {}
        for line in results.read_text().splitlines() if results.exists() else ():
            found |= json.loads(line)
    status = "overran" if code is None else "ok" if code == 0 else "failed"
    if status != "ok":
        found["output"] = log.read_bytes()[begins:].decode(errors="replace")[-TAIL:]
        found.setdefault("error", f"ended after {seconds:.0f} s" if code is None else f"ended with exit code {code}")
    if left:
        found["left_behind"] = len(left)
    return {"part": part.name, "status": status, "seconds": plain(time.monotonic() - began), **found}


def path_of_children() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def run_all(parts: Sequence[Part], out: Path, tiny: bool, minutes: float, scale: float) -> int:
    """:param scale: times the parts' own limits"""
    from rich.console import Console
    from rich.table import Table

    console, deadline = Console(width=120), time.monotonic() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    lines, log, done = out / "gpu.jsonl", out / "gpu.log", []
    lines.write_text("")
    log.write_text("")
    for part in parts:
        left = deadline - time.monotonic()
        if left < LEAST:
            found: dict[str, Any] = {"part": part.name, "status": "no time left", "seconds": 0.0}
        else:
            found = run_apart(part, min(left, scale * part.seconds), tiny, log)
        done.append(found)
        with lines.open("a") as file:
            file.write(json.dumps(found) + "\n")
        figures = {name: value for name, value in found.items() if name not in ("traceback", "output", "part")}
        console.print(f"{part.name}: {json.dumps(figures)}", highlight=False, soft_wrap=True, markup=False)
    table = Table("part", "what", "status", "s", "found", title="On the CPU, tiny sizes" if tiny else "On the GPU")
    for part, found in zip(parts, done, strict=True):
        shown = found.get("error") or found.get("summary", "")
        table.add_row(part.name, part.what, found["status"], f"{found['seconds']:.0f}", str(shown)[-300:])
    console.print(table)
    last = flat(done, tiny)
    (out / "gpu.json").write_text(json.dumps(last, indent=1) + "\n")
    print(json.dumps(last), flush=True)
    return 1 if any(found["status"] in ("failed", "overran") for found in done) else 0


def flat(done: Sequence[dict[str, Any]], tiny: bool) -> dict[str, Any]:
    """PART_KEY of every figure that is one; texts and tables stay in gpu.jsonl."""
    last: dict[str, Any] = {"tiny": tiny}
    for found in done:
        last[f"{found['part']}_status"] = found["status"]
        for name, value in found.items():
            if (
                name in ("part", "status")
                or isinstance(value, (dict, list))
                or name in ("traceback", "output", "summary")
            ):
                continue
            last[f"{found['part']}_{name}"] = value
    return last


def main() -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--skip", nargs="+", choices=names, default=[], metavar="PART")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "gpu-out"), help="$OUT, or gpu-out")
    parser.add_argument("--minutes", type=float, help=f"of all parts together; {MINUTES:g} on a GPU")
    parser.add_argument("--scale", type=float, help="times each part's own limit, for a slower machine")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU, as where there is no GPU")
    for hidden in ("--part", "--folder", "--seconds"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        part = PARTS[names.index(options.part)]
        folder = Path(options.folder)
        setting = Setting("cpu" if options.tiny else "cuda", options.tiny, folder, float(options.seconds))
        return run_here(part, setting, folder / "results.jsonl")
    from benchmarks.netlab_parts.descendants import end_descendants_with_us

    end_descendants_with_us()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what a part has started ends with it
    tiny = options.tiny or not has_gpu()
    chosen = [part for part in PARTS if part.name in options.only and part.name not in options.skip]
    minutes, scale = (TINY_MINUTES, TINY_SCALE) if tiny else (MINUTES, 1.0)
    return run_all(chosen, options.out, tiny, options.minutes or minutes, options.scale or scale)


def has_gpu() -> bool:
    """Asked in another process: this one starts others, and should hold no part of the card."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code]).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
