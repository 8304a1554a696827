"""The kit on the numpy that a notebook happens to have: hivemind's own 8-bit codecs fail quietly from 2.4 on.

Each version is installed into a folder of its own and put first on PYTHONPATH; torch and hivemind stay what they are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from volunteer_kit.process_group import kill_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parent.parent
VERSIONS = ["2.4.6", "2.2.6"]

CHECK = """
import json, numpy
from volunteer_kit.swarm.codec import check_codecs, install_codecs
install_codecs()
check_codecs()
print(json.dumps({"numpy": numpy.__version__}))
"""

# argv: own value, the other's address or "". One round over gradients of 5,000 (8 bits) and 10 (fp16) values.
PEER = """
import json, sys, time
import torch
from volunteer_kit.swarm.grad_averager import SwarmGradientAverager
from volunteer_kit.swarm.codec import make_codec
from volunteer_kit.swarm.peer import PeerConfig, start_peer

value, address = float(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
peer = start_peer(PeerConfig([address] if address else [], host_maddrs=["/ip4/127.0.0.1/tcp/0"], client_mode=False))
print(json.dumps({"maddr": peer.visible_maddrs()[0]}), flush=True)
params = [torch.nn.Parameter(torch.zeros(5000)), torch.nn.Parameter(torch.zeros(10))]
averager = SwarmGradientAverager(
    params, dht=peer.dht, prefix="numpy", start=True, client_mode=False, min_matchmaking_time=3.0, target_group_size=2,
    next_chunk_timeout=10.0, compression=make_codec("float16", "uniform8", 1000), max_weight=64.0,
)
noise = torch.linspace(-0.1, 0.1, 5000)
params[0].grad, params[1].grad = value + noise, torch.full((10,), value)
averager.accumulate_grads_(8)
deadline, outcome = time.monotonic() + 240, None
while outcome is None:
    try:
        outcome = averager.step(timeout=30, reset_accumulators=False)
    except Exception as e:
        if time.monotonic() > deadline:
            raise
        print(repr(e), file=sys.stderr, flush=True)
with averager.get_tensors() as tensors:
    means = [tensor.mean().item() for tensor in tensors]
    finite = all(torch.isfinite(tensor).all().item() for tensor in tensors)
    bits = [tensor.numpy().tobytes().hex()[:4000] for tensor in tensors]
print(json.dumps({"means": means, "finite": finite, "group": len(outcome), "received": outcome.received, "bits": bits,
                  "refused": outcome.refused, "sent": outcome.bytes_sent}), flush=True)
sys.stdin.readline()  # stay until the other one is through
averager.shutdown()
peer.shutdown()
"""


@pytest.fixture(scope="module", params=VERSIONS)
def environment(request, tmp_path_factory) -> dict[str, str]:
    target = tmp_path_factory.mktemp(f"numpy-{request.param}")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    done = subprocess.run(
        [*pip, "--target", str(target), f"numpy=={request.param}"], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        pytest.skip(f"numpy {request.param} cannot be installed here: {done.stderr.strip().splitlines()[-1:]}")
    return {
        **os.environ,
        "PYTHONPATH": f"{target}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "NUMPY_WANTED": request.param,
    }


def test_the_codecs_pass_their_check(environment):
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"numpy": environment["NUMPY_WANTED"]}


def start(environment, log: Path, value: float, address: str = "") -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PEER, str(value), address],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
        start_new_session=True,
    )


def next_line(process: subprocess.Popen, log: Path) -> dict:
    line = process.stdout.readline()
    assert line, f"the peer ended: {log.read_text()[-3000:]}"
    return json.loads(line)


def test_two_peers_average_to_one_value_that_neither_had(environment, tmp_path):
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    peers = [start(environment, logs[0], 1.0)]
    try:
        address = next_line(peers[0], logs[0])["maddr"]
        peers.append(start(environment, logs[1], 3.0, address))
        next_line(peers[1], logs[1])
        results = [next_line(peer, log) for peer, log in zip(peers, logs, strict=True)]
        for result in results:
            assert result["group"] == 2 and result["received"] == 1.0 and result["finite"] and not result["refused"]
            assert result["means"] == pytest.approx([2.0, 2.0], abs=2e-3)
            assert 2500 < result["sent"] < 10_000, "about a byte a value, and a kilobyte of bucket means a part"
        assert results[0]["bits"] == results[1]["bits"]
        for peer in peers:
            peer.stdin.write("\n")
            peer.stdin.flush()
        assert [peer.wait(120) for peer in peers] == [0, 0]
    finally:
        for peer in peers:
            kill_group(peer)


def kill_group(process: subprocess.Popen) -> None:
    kill_all(process.pid)
    process.wait(120)
