"""A run with a login, its host and two volunteers, all on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from volunteer_kit.process_group import kill_all
from volunteer_kit.runs import load_run
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.training.protocol import WorkerSpec

PATIENCE = 120.0  # s for the swarm's first steps
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@contextlib.contextmanager
def busy_swarm(scratch: Path, organization: str, say: Callable[[str], object] = print) -> Iterator[Path]:
    """While two volunteers train, the path of the run's file."""
    authority = {"url": "http://127.0.0.1:9/", "public_key": "none is asked yet", "organization": organization}
    values = load_run("demo").model_dump(mode="json") | {"run_id": "busy", "captions": [], "authority": authority}
    values["optimizer"] |= {"total_epochs": 100_000}
    run = scratch / "run.yaml"
    run.write_text(json.dumps(values))
    volunteers: list[Supervisor] = []
    with host(run, scratch) as address:
        run.write_text(json.dumps(values | {"initial_peers": [address]}))
        try:
            for number in (1, 2):
                spec = WorkerSpec(
                    run=load_run(str(run)).model_dump(mode="json"),
                    name=f"busy {number}",
                    initial_peers=[address],
                    host_maddrs=[LOOPBACK],
                    home=str(scratch / f"busy-{number}"),
                    peers_on_machine=2,
                    peer_seed=number,
                )
                volunteers.append(Supervisor(spec, log_path=scratch / f"busy-{number}.log"))
                volunteers[-1].start()
            for volunteer in volunteers:
                wait_for_epoch(volunteer)
                threading.Thread(target=drain, args=(volunteer,), daemon=True).start()
            say("Two volunteers are training.")
            yield run
        finally:
            for volunteer in volunteers:
                volunteer.begin_leave(10)
            for volunteer in volunteers:
                volunteer.leave(10)
                volunteer.close()


@contextlib.contextmanager
def host(run: Path, scratch: Path) -> Iterator[str]:
    """The address of `volunteer-kit host RUN`."""
    mark = ("VOLUNTEER_KIT_BENCHMARK", os.urandom(8).hex())
    command = [sys.executable, "-u", "-m", "volunteer_kit.cli", "host", str(run), "--no-authority"]
    command += ["--folder", str(scratch / "host"), "--host-maddrs", LOOPBACK]
    with (scratch / "host.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, mark[0]: mark[1]},
            start_new_session=True,
        )  # fmt: skip
        try:
            for line in process.stdout:
                if found := re.search(r"--initial-peers (\S+)", line):
                    yield found[1]
                    break
            else:
                sys.exit(f"The host did not start; see {scratch / 'host.log'}")
        finally:
            process.terminate()
            process.wait(20)
            kill_all(process.pid, "=".join(mark))


def wait_for_epoch(volunteer: Supervisor) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        event = volunteer.next_event(timeout=1.0)
        if event is not None and event["event"] == "epoch" and event["group_size"] > 1:
            return
        if event is not None and event["event"] == "gave_up":
            break
    sys.exit(f"A volunteer of the swarm does not train; see {volunteer.log_path}")


def drain(volunteer: Supervisor) -> None:
    while volunteer.next_event() is not None:
        pass
