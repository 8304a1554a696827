"""The original's model, 125.9 M parameters, in two real peers that may have 12 GB of memory each.

    python benchmarks/full_size.py [--data 'PATH/{00000..00003}.tar']

Each peer is what a volunteer runs: a supervisor, its worker, DHT and averagers, in a control group of its own where the
system allows one. They take the original's run file, with the target batch lowered, read image shards, make codes of
them, and go on until each has taken two epochs together with the other; then their checkpoints are compared. The
published VQGAN cannot be had offline: the same network with random weights makes the codes, at the same cost. Where
there is a GPU both peers train on it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from volunteer_kit.checkpoint import load_checkpoint
from volunteer_kit.model.image_tokenizer import save_vqgan
from volunteer_kit.model.vqgan import Vqgan, VqganConfig
from volunteer_kit.runs import RunConfig, load_run, with_data
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.training.protocol import WorkerSpec

EMOJI = os.environ.get("VOLUNTEER_KIT_EMOJI", str(Path(__file__).parents[2] / "shared" / "data" / "emoji"))
PEER_MEMORY = 12e9  # bytes that a peer may have
EPOCHS = 2  # that the peers take together; the first one to come is alone before that
ORDER_S = 5.0  # seconds until a peer has surely been told where to end
BOUNDS = {"peak_rss_gb": 12, "disk_gb": 4, "param_gap": 1e-5, "gpu_gb": 8}


def lowered(data: str, target_batch_size: int) -> RunConfig:
    """The original's run with a target batch that two CPUs reach in minutes, and a tokenizer that needs no network."""
    run = with_data(load_run("dalle-laion"), data)
    # a CPU takes minutes for a sample, and whoever comes first to a round has to wait for the other's to end
    patience = {"matchmaking_time": 400.0, "allreduce_timeout": 900.0, "averaging_timeout": 1400.0}
    swarm = run.swarm.model_copy(update={**patience, "progress_expiration": 1400.0})
    # pictures are encoded on their way into the shuffle buffer: thousands would take hours
    stream = run.data.model_copy(update={"kind": "shards", "range_length": 8, "encode_batch": 2})
    changes = {"target_batch_size": target_batch_size, "text_tokenizer": "words", "swarm": swarm, "data": stream}
    return run.model_copy(update={**changes, "run_id": "full-size"})


# --- one peer: a supervisor in a process of its own, as in a notebook's kernel ---


def be_peer() -> None:
    """Spec on the first line of stdin, then orders; the worker's events on stdout."""
    spec = json.loads(sys.stdin.readline())
    supervisor = Supervisor(WorkerSpec(**spec["worker"]), log_path=spec["log"], restart=False)
    supervisor.start()
    threading.Thread(target=follow_orders, args=(supervisor,), daemon=True).start()
    while supervisor.running or supervisor.pid:
        if (event := supervisor.next_event(timeout=1.0)) is not None:
            print(json.dumps(event), flush=True)
    supervisor.close()


def follow_orders(supervisor: Supervisor) -> None:
    for line in sys.stdin:
        supervisor.finish_at(int(line))
    supervisor.begin_leave()


class Peer:
    """A peer's process, what it said, and what it took."""

    def __init__(
        self, number: int, run: RunConfig, initial_peers: list[str], folder: Path, threads: int, sharing: int = 1
    ) -> None:
        """:param sharing: peers that share this machine, as the worker is told"""
        self.name, self.folder = f"peer {number}", folder / f"peer-{number}"
        self.folder.mkdir()
        self.events: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        self.epochs: list[dict] = []
        self.device: dict = {}
        self.checkpoint = self.warning = ""
        self.rss = self.pss = 0
        self.group = MemoryGroup(f"full-size-{os.getpid()}-{number}")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--peer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True, env={**os.environ, "VOLUNTEER_KIT_HOME": str(folder)},
        )  # fmt: skip
        self.group.add(self.process.pid)  # before it begets anything
        worker = WorkerSpec(
            run=run.model_dump(mode="json"), name=self.name, initial_peers=initial_peers,
            host_maddrs=["/ip4/127.0.0.1/tcp/0"], identity_path=str(self.folder / "identity.key"), client_mode=False,
            checkpoint_dir=str(self.folder / "checkpoints"), threads=threads, peer_seed=number,
            peers_on_machine=sharing,
        )  # fmt: skip
        self.say({"worker": worker.model_dump(), "log": str(self.folder / "log")})
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def together(self) -> list[dict]:
        """The epochs that this peer took with another."""
        return [epoch for epoch in self.epochs if epoch["group_size"] > 1]

    def say(self, order: object) -> None:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def _listen(self) -> None:
        for line in self.process.stdout:
            self.events.put(json.loads(line))
        self.events.put(None)

    def measure(self) -> None:
        """Memory of the whole tree now: resident sets added up, and with shared pages counted once."""
        with contextlib.suppress(psutil.Error):  # one of them has just ended
            tree = [found := psutil.Process(self.process.pid), *found.children(recursive=True)]
            rss = sum(process.memory_info().rss for process in tree)
            if rss > 1.01 * self.rss:  # the second looks at every page: only at new heights
                self.pss = max(self.pss, sum(process.memory_full_info().pss for process in tree))
            self.rss = max(self.rss, rss)

    def take_events(self, console: Console) -> bool:
        """:returns: whether it has finished. Raises SystemExit with its log if it ended before."""
        while not self.events.empty():
            event = self.events.get()
            if event is None or event["event"] in ("error", "gave_up", "restarting"):
                raise SystemExit(f"{self.name} ended: {event}\n{(self.folder / 'log').read_text()[-3000:]}")
            if event["event"] == "device":
                self.device = event
                console.print(f"{self.name}: batch {event['batch_size']}, {event['precision']}: {event['why']}")
            elif event["event"] == "epoch":
                self.epochs.append(event | {"seen": time.monotonic()})
                console.print(
                    f"{self.name}: epoch {event['epoch']}, {event['samples']} samples of its own, group of "
                    f"{event['group_size']}, received {event['received']:.0%}, loss {event['loss'] or float('nan'):.3f}"
                )
            elif event["event"] == "warning":
                console.print(f"{self.name}: {event['message']}")
            elif event["event"] == "finished":
                self.checkpoint = event["path"]
        return bool(self.checkpoint)

    def disk(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=60)
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [found := psutil.Process(self.process.pid), *found.children(recursive=True)]:
                process.kill()
        self.process.wait()
        self.group.close()


class MemoryGroup:
    """A control group with PEER_MEMORY of memory, where this process may make one (root, cgroup v1 or v2)."""

    def __init__(self, name: str) -> None:
        self.path: Path | None = None
        own_groups = Path("/proc/self/cgroup")  # not there in every sandbox
        for line in own_groups.read_text().splitlines() if own_groups.exists() else ():
            _, controllers, own = line.split(":", 2)
            base = {"memory": "/sys/fs/cgroup/memory", "": "/sys/fs/cgroup"}.get(controllers)
            limit = "memory.limit_in_bytes" if controllers else "memory.max"
            with contextlib.suppress(OSError):
                if base is None or self.path is not None:
                    continue
                path = Path(base + own) / name
                path.mkdir()
                if (path / limit).exists():
                    (path / limit).write_text(str(int(PEER_MEMORY)))
                    self.path = path
                else:
                    path.rmdir()

    def add(self, pid: int) -> None:
        if self.path is not None:
            (self.path / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self.path is not None:
                self.path.rmdir()


# --- the swarm ---


def start_bootstrap() -> tuple[subprocess.Popen, list[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "volunteer_kit.demo.bootstrap"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, json.loads(process.stdout.readline())["maddrs"]


def train(peers: list[Peer], console: Console, patience: float) -> float | None:
    """Train until each peer has taken EPOCHS epochs with another, and measure the peers' memory meanwhile.

    :returns: the most bytes of a GPU that a peer took, or None without a GPU
    """
    deadline, gpu_before, gpu, is_told = time.monotonic() + patience, gpu_used(), 0, False
    while not all([peer.take_events(console) for peer in peers]):
        if not is_told and all(len(peer.together) >= EPOCHS for peer in peers):
            is_told, last = True, epoch_to_end_at(peers)
            for peer in peers:
                peer.say(last)
        for peer in peers:
            peer.measure()
        gpu = max(gpu, gpu_used() - gpu_before)
        if time.monotonic() > deadline:
            raise SystemExit(f"not finished after {patience / 60:.0f} minutes")
        time.sleep(0.5)
    return gpu / len(peers) if torch.cuda.is_available() else None


def epoch_to_end_at(peers: list[Peer]) -> int:
    """-> an epoch that no peer has passed when the order reaches it: as many ahead as a peer takes in ORDER_S."""
    now = time.monotonic()
    recent = max(sum(now - epoch["seen"] < ORDER_S for epoch in peer.epochs) for peer in peers)
    return max(epoch["epoch"] for peer in peers for epoch in peer.epochs) + recent


def gpu_used() -> int:
    """Bytes of the first GPU that are taken, by whomever: processes in containers are not told apart."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def compare(one: Path, other: Path) -> dict[str, float]:
    """What two checkpoints hold, and how far they are apart: the largest relative difference of a parameter tensor."""
    first, second = load_checkpoint(one), load_checkpoint(other)
    gaps = [
        ((tensor.double() - second.model[name].double()).norm() / tensor.double().norm().clamp(min=1e-12)).item()
        for name, tensor in first.model.items()
    ]
    size = sum(tensor.numel() * tensor.element_size() for tensor in first.optimizer.values())
    same = all(torch.equal(tensor, second.optimizer[name]) for name, tensor in first.optimizer.items())
    parameters = sum(tensor.numel() for tensor in first.model.values())
    return {
        "parameters": parameters,
        "param_gap": max(gaps),
        "statistics_equal": same,
        "statistics_bytes_per_param": size / parameters,
    }


def main(data: str, target_batch_size: int, patience: float) -> int:
    console, run = Console(), lowered(data, target_batch_size)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        torch.manual_seed(0)
        save_vqgan(folder / f"{run.image_tokenizer}.safetensors", Vqgan(VqganConfig()))
        peers, figures = measure(run, folder, console, patience)
    return report(console, peers, figures)


def measure(
    run: RunConfig, folder: Path, console: Console, patience: float, sharing: int = 1
) -> tuple[list[Peer], dict[str, Any]]:
    """Let two peers take EPOCHS epochs of `run` together. -> the peers, as they ended, and figures. Raises SystemExit.

    :param folder: their home, with the run's image tokenizer in it
    :param sharing: as of Peer
    """
    peers: list[Peer] = []
    tokenizer_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    bootstrap, maddrs = start_bootstrap()
    started = time.monotonic()
    try:
        for number in (1, 2):
            threads = max(1, (os.cpu_count() or 2) // 2)
            peers.append(Peer(number, run, maddrs, folder, threads, sharing))
        limited = all(peer.group.path for peer in peers)
        console.print(
            f"Each peer may have {PEER_MEMORY / 1e9:.0f} GB: a control group sees to it."
            if limited
            else "No control group could be made (it takes root): the peers may have all memory there is."
        )
        gpu_bytes = train(peers, console, patience)
        seconds = time.monotonic() - started
        held = compare(*(Path(peer.checkpoint) for peer in peers))
        disk = max(peer.disk() for peer in peers) + tokenizer_bytes
    finally:
        for peer in peers:
            peer.close()
        bootstrap.stdin.close()
        bootstrap.wait()
    return peers, {
        **held,
        "peak_rss_gb": max(peer.rss for peer in peers) / 1e9,
        "peak_pss_gb": max(peer.pss for peer in peers) / 1e9,
        "memory_limit_gb": PEER_MEMORY / 1e9 if limited else None,
        "disk_gb": disk / 1e9,
        "gpu_gb": gpu_bytes and gpu_bytes / 1e9,
        "epochs": min(len(peer.together) for peer in peers),
        "samples": sum(event["samples"] for peer in peers for event in peer.epochs),
        "loss_first": peers[0].epochs[0]["loss"],
        "loss_last": peers[0].epochs[-1]["loss"],
        "received": min(event["received"] for peer in peers for event in peer.together),
        "minutes": seconds / 60,
    }


def report(console: Console, peers: list[Peer], figures: dict) -> int:
    table = Table("", *(peer.name for peer in peers), title="The original's model in two peers")
    table.add_row("batch, precision", *(f"{p.device['batch_size']}, {p.device['precision']}" for p in peers))
    table.add_row("resident sets, added up, peak", *(f"{peer.rss / 1e9:.2f} GB" for peer in peers))
    table.add_row("the same, shared pages once", *(f"{peer.pss / 1e9:.2f} GB" for peer in peers))
    table.add_row("epochs applied together", *(str(len(peer.together)) for peer in peers))
    table.add_row("samples of its own in them", *(str(sum(e["samples"] for e in peer.together)) for peer in peers))
    table.add_row("sent in the last round", *(f"{p.epochs[-1]['sent_bytes'] / 1e6:,.0f} MB" for p in peers))
    console.print(table)
    missed = [key for key, bound in BOUNDS.items() if figures.get(key) is not None and figures[key] > bound]
    told = [f"{key} is {figures[key]:.4g}; wanted at most {BOUNDS[key]}" for key in missed]
    for line in told:
        console.print(f"[red]{line}")
    print(json.dumps({key: float(f"{v:.4g}") if isinstance(v, float) else v for key, v in figures.items()}))
    return 1 if told else 0


if __name__ == "__main__":
    from netlab_parts.descendants import end_descendants_with_us

    end_descendants_with_us()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=f"{EMOJI}/{{00000..00003}}.tar", help="image shards")
    parser.add_argument("--target-batch-size", type=int, default=4, help="samples of both peers that make an epoch")
    parser.add_argument("--minutes", type=float, default=60, help="give up after so long")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        be_peer()
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves nothing behind
        sys.exit(main(options.data, options.target_batch_size, options.minutes * 60))
