"""A training step of the kit's model beside dalle-pytorch 1.6.6's own DALLE with the same weights.

    python benchmarks/model.py

On a CPU: dim 512, depth 8, batch 2, fp32. Where there is an NVIDIA GPU also dim 1024, depth 64, in fp16 and bf16. Each
side is a process of its own; they step in turn, so that both meet the same noise, and a ratio is the median of the
ratios of neighbouring steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from rich.console import Console
from rich.table import Table

from volunteer_kit.convert.dalle_layout import hparams_of
from volunteer_kit.model import upstream
from volunteer_kit.model.dalle import Dalle, DalleConfig
from volunteer_kit.model.matmul import mm

CYCLE = dict(
    attn_types=("axial_row", "axial_col", "axial_row", "axial_row"), shared_attn_ids=(0, 1, 2, 3),
    shared_ff_ids=(0, 1, 2, 3), last_layer_conv_like=True, padding="dalle-pytorch",
)  # fmt: skip
SIZES = {
    "cpu": dict(dim=512, depth=8, heads=8),
    "cuda": dict(dim=1024, depth=64, heads=16),
    "tiny": dict(
        dim=64, depth=5, heads=2, dim_head=32, text_seq_len=16, num_text_tokens=500, image_fmap_size=8,
        num_image_tokens=100,
    ),
}  # fmt: skip
SMALLEST_GRADIENT = 1e-7  # of a tensor's norm; LayerScale starts at 1e-6 in deep models, below it all is rounding


def config(size: str, reversible: bool) -> DalleConfig:
    """:param size: one of SIZES"""
    return DalleConfig(**CYCLE, **SIZES[size], reversible=reversible)


def reference(model: Dalle) -> torch.nn.Module:
    """dalle-pytorch's DALLE, unmodified, with the weights of `model`."""
    c, theirs = model.config, upstream.dalle_reference()
    vae = theirs.DiscreteVAE(
        image_size=2 * c.image_fmap_size, num_tokens=c.num_image_tokens, num_layers=1, codebook_dim=4, hidden_dim=4
    )  # the smallest there is: codes are given, so it does nothing
    dalle = theirs.DALLE(vae=vae, **hparams_of(c))
    dalle.load_state_dict(model.state_dict(), strict=False)
    return dalle


# --- one side, in a process of its own: a line in, a line of JSON out ---


def serve(
    side: str, size: str, device: str, precision: str, reversible: bool, checkpointing: bool, batch: int
) -> None:  # fmt: skip
    """Step whenever a line arrives: "step", or "save PATH" for one whose gradients are written there."""
    torch.manual_seed(0)
    model = Dalle(config(size, reversible), checkpointing=checkpointing)
    c = model.config
    model = (reference(model) if side == "theirs" else model).to(device)
    seed = torch.Generator().manual_seed(1)
    text = torch.randint(1, c.num_text_tokens, (batch, c.text_seq_len), generator=seed).to(device)  # no padding
    codes = torch.randint(c.num_image_tokens, (batch, c.image_seq_len), generator=seed).to(device)
    scaler = 2.0**15 if precision == "fp16" else 1.0
    before = reset_peak(device)
    print(json.dumps({"ready": side}), flush=True)
    for line in sys.stdin:
        model.zero_grad(set_to_none=True)
        started = time.perf_counter()
        with torch.autocast(device, dtype=getattr(torch, DTYPES[precision]), enabled=precision != "fp32"):
            loss = model(text.clone(), codes, return_loss=True) if side == "theirs" else model(text, codes).loss
        (loss * scaler).backward()
        loss = loss.item()
        seconds = time.perf_counter() - started
        if line.startswith("save"):
            torch.save({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, line.split()[1])
        print(json.dumps({"seconds": seconds, "loss": loss, "peak_mb": (peak(device) - before) / 1e6}), flush=True)


DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def reset_peak(device: str) -> int:
    """Forget the peak; bytes in use now, weights included."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return 0  # the peak on a GPU is told with the weights: it has to fit into a card
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return status("VmRSS")


def peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else status("VmHWM")


def status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


# --- both sides in turn ---


class Side:
    """The process of one side."""

    def __init__(self, **options: object) -> None:
        self.options = options
        argv = [f"--{key}={value}" for key, value in options.items()]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.steps: list[dict[str, float]] = []
        self._is_ready = False

    def step(self, order: str = "step") -> dict[str, float]:
        if not self._is_ready:  # all sides load at once, and each is waited for when it is needed
            self._is_ready = bool(self._read())
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        self.steps.append(self._read())
        return self.steps[-1]

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.options} ended with code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def compare(
    rounds: int, device: str, precision: str, reversible: bool, batch: int, size: str | None = None
) -> list[dict]:  # fmt: skip
    """dalle-pytorch, the kit, and the kit with checkpointing, in turn; one row of figures each.

    :param size: one of SIZES; None: the device's
    """
    common = dict(size=size or device, device=device, precision=precision, reversible=int(reversible), batch=batch)
    sides = [Side(side="theirs", checkpointing=0, **common)]
    sides += [Side(side="ours", checkpointing=choice, **common) for choice in (0, 1)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            paths = [f"{folder}/{number}" for number in range(len(sides))]
            for side, path in zip(sides, paths, strict=True):
                side.step(f"save {path}")
            gaps = [gradient_gap(paths[0], path) for path in paths]
        for side in sides:
            side.steps.clear()  # the first step also takes memory from the system
        for _ in range(rounds):
            for side in sides:
                side.step()
    finally:
        for side in sides:
            side.close()
    return [figures(sides[0], side, gap) for side, gap in zip(sides, gaps, strict=True)]


def gradient_gap(theirs: str, ours: str) -> float:
    """The largest relative difference of a tensor's gradient."""
    expected, found = (torch.load(path, map_location="cpu", weights_only=True) for path in (theirs, ours))
    assert expected.keys() >= found.keys() and found
    names = [name for name in found if expected[name].norm() > SMALLEST_GRADIENT]
    return max((((found[name] - expected[name]).norm() / expected[name].norm()).item() for name in names), default=0.0)


def figures(theirs: Side, side: Side, grad_gap: float) -> dict:
    pairs = zip(theirs.steps, side.steps, strict=True)
    speedup = statistics.median(a["seconds"] / b["seconds"] for a, b in pairs)
    loss, peak_mb = side.steps[0]["loss"], max(step["peak_mb"] for step in side.steps)
    name = "dalle-pytorch" if side is theirs else "the kit" + ", checkpointing" * side.options["checkpointing"]
    return {
        "name": name,
        "precision": side.options["precision"],
        "reversible": bool(side.options["reversible"]),
        "seconds": statistics.median(step["seconds"] for step in side.steps),
        "speedup": speedup,
        "peak_mb": peak_mb,
        "memory_ratio": peak_mb / max(step["peak_mb"] for step in theirs.steps),
        "loss_gap": abs(loss - theirs.steps[0]["loss"]) / theirs.steps[0]["loss"],
        "grad_gap": grad_gap,
    }


def ceiling(batch: int) -> tuple[float, float]:
    """(GFLOP/s of this machine's fastest product, GFLOP of all products of one step: what the kit cannot avoid)."""
    c, tokens = config("cpu", False), batch * (256 + 1024)
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    rates = []
    for multiply in (torch.mm, mm):
        for _ in range(20):
            started = time.perf_counter()
            multiply(a, b)
            rates.append(2 * 2048**3 / (time.perf_counter() - started) / 1e9)
    logits = 256 * (c.num_text_tokens + c.text_seq_len) + 1024 * c.num_image_tokens
    return max(rates), 3 * (32 * c.dim**2 * tokens * c.depth + 2 * c.dim * batch * logits) / 1e9


def main(rounds: int) -> int:
    console, results = Console(width=max(100, Console().width)), {}
    runs = [("cpu", "fp32", reversible, 2) for reversible in (False, True)]
    if torch.cuda.is_available():
        runs = [("cuda", precision, True, 4) for precision in ("fp16", "bf16")] + runs
    for device, precision, reversible, batch in runs:
        rows = compare(rounds, device, precision, reversible, batch)
        console.print(table(rows, f"{device}, {SIZES[device]}, {precision}, batch {batch}, {reversible=}"))
        results[device, precision, reversible] = rows
    peak_rate, work = ceiling(2)
    plain = results["cpu", "fp32", False]
    console.print(
        f"Arithmetic ceiling of this machine: {peak_rate:.0f} GFLOP/s; a step's products are {work:.0f} GFLOP, so no "
        f"step of this model takes less than {work / peak_rate:.2f} s here. The kit's took {plain[1]['seconds']:.2f} s."
    )
    last = {key: plain[1][key] for key in ("speedup", "memory_ratio", "loss_gap", "grad_gap")}
    last |= {"seconds": plain[1]["seconds"], "seconds_dalle_pytorch": plain[0]["seconds"]}
    last |= {"ceiling_gflops": peak_rate, "ceiling_seconds": work / peak_rate, "torch": torch.__version__}
    for (device, precision, reversible), rows in results.items():
        for row in rows[1:]:
            kind = f"{device}_{precision}" + "_reversible" * reversible + "_checkpointing" * ("check" in row["name"])
            last |= {f"{key}_{kind}": row[key] for key in ("speedup", "memory_ratio", "peak_mb", "loss_gap")}
    bounds = {"speedup": (2.3, None), "memory_ratio": (None, 0.5), "loss_gap": (None, 1e-5), "grad_gap": (None, 1e-4)}
    missed = [key for key, (low, high) in bounds.items() if last[key] < (low or 0) or last[key] > (high or 1e9)]
    for key in missed:
        console.print(f"[red]{key} is {last[key]:.4g}; wanted: {bounds[key]}")
    print(json.dumps({key: float(f"{v:.4g}") if isinstance(v, float) else v for key, v in last.items()}))
    return 1 if missed else 0


def table(rows: list[dict], title: str) -> Table:
    found = Table(title=title)
    for head in ("", "s a step", "speedup", "peak MB", "memory ratio", "loss gap", "gradient gap"):
        found.add_column(head, justify="left" if not head else "right")
    for row in rows:
        found.add_row(
            row["name"], f"{row['seconds']:.2f}", f"{row['speedup']:.2f}", f"{row['peak_mb']:,.0f}",
            f"{row['memory_ratio']:.2f}", f"{row['loss_gap']:.1e}", f"{row['grad_gap']:.1e}",
        )  # fmt: skip
    return found


if __name__ == "__main__":
    from netlab_parts.descendants import end_descendants_with_us

    end_descendants_with_us()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="steps of each side")
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cpu", help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=SIZES, default="cpu", help=argparse.SUPPRESS)
    parser.add_argument("--precision", default="fp32", help=argparse.SUPPRESS)
    for name in ("--reversible", "--checkpointing", "--batch"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1 if options.size == "tiny" else 2)
    if options.side is None:
        sys.exit(main(options.rounds))
    serve(
        options.side, options.size, options.device, options.precision, bool(options.reversible),
        bool(options.checkpointing), options.batch,
    )  # fmt: skip
