"""A worker's token: its libraries find it, its children do not."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.hub import Hub

PROGRAM = """
import json, os, subprocess, sys
from volunteer_kit.auth.process_token import keep_token
keep_token(sys.stdin.readline().strip())
from huggingface_hub import HfApi, get_token
child = subprocess.run([sys.executable, "-c", "from huggingface_hub import get_token; print(get_token())"],
                       capture_output=True, text=True)
inside = json.dumps(dict(os.environ)) + " ".join(sys.argv)
if os.fork() == 0:  # hivemind's processes
    os._exit(0 if get_token() == "hf_secret" else 1)
print(json.dumps({"found": get_token() == "hf_secret", "name": HfApi().whoami()["name"],
                  "child": child.stdout.strip(), "shown": "hf_secret" in inside, "fork": os.wait()[1]}))
"""


def test_the_real_client_logs_in_and_nobody_else_sees_the_token(tmp_path):
    with Hub() as hub:
        hub.tokens["hf_secret"] = "ann"
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], input="hf_secret\n", text=True, capture_output=True, timeout=120,
            env=hub.environment(tmp_path),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {"found": True, "name": "ann", "child": "None", "shown": False, "fork": 0}
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"hf_secret" in path.read_bytes()]
