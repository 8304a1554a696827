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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parent.parent
VERSIONS = ["2.4.6", "2.2.6"]

CHECK = """
import json, numpy
from volunteer_kit.swarm.codecs.registry import check_codecs
check_codecs()
print(json.dumps({"numpy": numpy.__version__}))
"""

# two members' parts of gradients of 5,000 (8 bits) and 10 (fp16) values, around 1 and around 3, become one answer
AVERAGE = """
import json
import torch
from volunteer_kit.swarm.codecs.registry import make_codec
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.reducer import SliceReducer, decode_answer
from volunteer_kit.swarm.sync.contributions import Accounts, Share

layout = Layout([torch.Size([5000]), torch.Size([10])], 1, make_codec("float16", "uniform8", 1000))
reducer = SliceReducer(layout, 1, "a", epoch=3, max_staleness=2, limits={"a": 64.0, "b": 64.0}, spent=Accounts(),
                       feedback=None, rule="mean")
noise, sent = torch.cat([torch.linspace(-0.1, 0.1, 5000), torch.zeros(10)]), 0
for peer, value in (("a", 1.0), ("b", 3.0)):
    data = layout.encode_cell(0, value + noise)
    part = reducer.begin(peer, (Share(peer, 0, 3, 8, 1),))
    reducer.read(part, 0, data)
    reducer.take(part)
    sent += len(data)
_, answer = reducer.reduce()
mean = decode_answer(layout, 1, answer)[0]
print(json.dumps({"means": [mean[:5000].mean().item(), mean[5000:].mean().item()],
                  "finite": bool(mean.isfinite().all()), "sent": sent}))
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


def test_two_parts_are_averaged_to_one_value_that_neither_had(environment):
    done = subprocess.run([sys.executable, "-c", AVERAGE], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["finite"] and found["means"] == pytest.approx([2.0, 2.0], abs=2e-3)
    assert 2 * 5000 < found["sent"] < 2 * 8000, "about a byte a value"
