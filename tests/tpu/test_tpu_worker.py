"""Two real workers in one swarm: one computes on PJRT's devices, as on a TPU, the other on the CPU."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from volunteer_kit.checkpoint import latest_checkpoint
from volunteer_kit.runs import load_run
from volunteer_kit.training.protocol import FinishAt, Leave, WorkerSpec, parse_event

ROOT = Path(__file__).parents[2]
TPU = {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "CPU_NUM_DEVICES": "4"}  # PJRT takes the CPU where no chip is
TOGETHER = 3  # epochs that both gave to


class Worker:
    """`python -m volunteer_kit.worker`, its events awaited."""

    def __init__(self, folder: Path, name: str, environment: dict[str, str], **spec):
        self.checkpoints, self.log = folder / name, folder / f"{name}.log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "volunteer_kit.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            start_new_session=True,
        )
        run = load_run("demo").model_dump(mode="json")
        run["swarm"] |= {"load_state_timeout": 30, "progress_expiration": 30}
        self.events: list[dict] = []
        self._queue: queue.Queue[dict | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.tell(
            WorkerSpec(
                run=run, name=name, host_maddrs=["/ip4/127.0.0.1/tcp/0"], client_mode=False, batch_size=16, threads=1,
                checkpoint_dir=str(self.checkpoints), **spec,
            )
        )  # fmt: skip

    def tell(self, message) -> None:
        self.process.stdin.write(message.model_dump_json() + "\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._queue.put(parse_event(line))
        self._queue.put({"event": "end"})

    def wait_for(self, name: str, timeout: float = 120.0, count: int = 1, **at_least) -> dict:
        """The `count`-th event of that name, of those to come, whose fields are at least these."""
        deadline = time.monotonic() + timeout
        while count:
            try:
                event = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {name} within {timeout} s; {self.story()}") from None
            if event is None:
                continue
            self.events.append(event)
            assert event["event"] not in ("end", "error"), self.story()
            count -= event["event"] == name and all(event[key] >= value for key, value in at_least.items())
        return event

    def story(self) -> str:
        return f"events: {self.events[-8:]}\nlog: {self.log.read_text()[-3000:]}"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture
def workers(tmp_path):
    started: list[Worker] = []

    def start(name: str, environment: dict[str, str], **spec) -> Worker:
        started.append(Worker(tmp_path, name, environment, **spec))
        return started[-1]

    yield start
    for worker in started:
        worker.kill()


@pytest.mark.timeout(600)
def test_a_tpu_and_a_cpu_train_one_model(workers):
    cpu = workers("cpu", {"PJRT_DEVICE": "CPU"}, peer_seed=1)
    maddrs = cpu.wait_for("connected")["maddrs"]
    tpu = workers("tpu", TPU, peer_seed=2, initial_peers=maddrs)
    told = tpu.wait_for("device")
    assert "TPU v5e" in told["device"] and told["precision"] == "bf16", told
    together = tpu.wait_for("epoch", timeout=300, count=TOGETHER, group_size=2, samples=16)
    for worker in (cpu, tpu):
        worker.tell(FinishAt(epoch=together["epoch"] + 2))
    finished = [worker.wait_for("finished") for worker in (cpu, tpu)]
    assert finished[1]["total_samples"] >= TOGETHER * 16
    assert finished[0]["epoch"] == finished[1]["epoch"]
    models = [latest_checkpoint(worker.checkpoints).tensors for worker in (cpu, tpu)]
    assert models[0].keys() == models[1].keys()
    for name, tensor in models[0].items():
        assert torch.equal(tensor, models[1][name]), f"{name}: parameters and statistics, the same bytes"
    for worker in (tpu, cpu):
        worker.tell(Leave())
        worker.wait_for("left")
        assert worker.process.wait(60) == 0, worker.story()
