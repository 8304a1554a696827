"""What goes wrong, as somebody sees it below his cell: the cause and the way out in plain words, and never a stack.

Each row is run in a real kernel whose Hub is the stand-in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager

from tests.hub import Hub
from volunteer_kit.run_reader import RUN_FILES

DEMO = (RUN_FILES / "demo.yaml").read_text()
PUBLIC_KEY = "ed25519:zCxnPDqEWnO5E2QIRyTsT3RpR-IUYM1P65zsY1VYt44"
ABOUT = f"url: 'http://127.0.0.1:9', public_key: '{PUBLIC_KEY}', organization: train-together"
AUTHORITY = f"authority: {{{ABOUT}}}\n"
ROOT = str(Path(__file__).parents[1])
PATIENCE = 120  # s for one cell


class Kernel:
    """Runs cells; gives all that is seen below them."""

    def __init__(self, environment: dict[str, str]):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=environment)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code: str, until: Sequence[str] = ()) -> str:
        """:param until: words after all of which somebody presses the stop button"""
        seen: list[str] = []
        pressed = not until

        def look(message: dict) -> None:
            nonlocal pressed
            content = message["content"]
            seen.extend(content.get("traceback", ()))
            seen.append(str(content.get("text", "")))
            seen.extend(str(value) for value in content.get("data", {}).values())
            if not pressed and all(word in "\n".join(seen) for word in until):
                pressed = True
                self.manager.interrupt_kernel()

        self.client.execute_interactive(code, allow_stdin=False, timeout=PATIENCE, output_hook=look)
        return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(seen))

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        hub.tokens |= {"hf_reader": "ann", "hf_stranger": "bob", "hf_writer": "cem", "hf_fine": "dan"}
        hub.orgs = {name: ["train-together"] for name in ("ann", "cem", "dan")}
        hub.tokens |= {"hf_old": "ann"}
        hub.expired.add("hf_old")
        hub.rights |= {
            "hf_reader": {"role": "read"},
            "hf_stranger": {"role": "read"},
            "hf_writer": {"role": "write"},
            "hf_fine": {"role": "fineGrained", "fineGrained": {"scoped": [{"permissions": ["repo.write"]}]}},
        }
        yield hub


@pytest.fixture(scope="module")
def kernel(hub, tmp_path_factory) -> Iterator[Kernel]:
    home = tmp_path_factory.mktemp("kernel")
    kernel = Kernel({**hub.environment(home), "PYTHONPATH": ROOT, "VOLUNTEER_KIT_HOME": str(home / "kit")})
    try:
        kernel.run("from volunteer_kit import join_swarm")
        yield kernel
    finally:
        kernel.close()


def run_file(tmp_path: Path, text: str) -> str:
    (tmp_path / "run.yaml").write_text(text)
    return str(tmp_path / "run.yaml")


def of_demo(old: str, new: str) -> str:
    assert old in DEMO
    return DEMO.replace(old, new)


OK = "accept_terms=True"
LOGIN = DEMO + AUTHORITY
FAILURES = {
    # a run that is none
    "no such run": ("join_swarm('dmo')", "", ["no run 'dmo'", "'demo'", "1."]),
    "no such file": ("join_swarm('/nowhere/run.yaml')", "", ["no run '/nowhere/run.yaml'", "path of its YAML"]),
    "unknown key": (
        "join_swarm({run})",
        of_demo("  allreduce_timeout:", "  allreduce_timout:"),
        ["line", "'allreduce_timout'", "Fix:", "'allreduce_timeout'"],
    ),
    "too narrow a cap": ("join_swarm('demo', max_mbps=0.1)", "", ["max_mbps is 0.1", "needs 0.23", "1 or more"]),
    "impossible times": ("join_swarm({run})", of_demo("timeout: 6\n", "timeout: 0\n"), ["greater than 0", "Fix:"]),
    "no run file": ("join_swarm({run})", "hello", ["no run file", "Fix:", "demo.yaml"]),
    "not on the Hub": ("join_swarm('org/none')", "", ["'org/none'", "no such repository", "check the name"]),
    "link is gone": ("join_swarm('{hub}/gone.yaml')", "", ["HTTP 404", "1. Open the link", "Ask the host"]),
    "link is dead": ("join_swarm('http://127.0.0.1:9/run.yaml')", "", ["does not answer", "1. Open the link"]),
    # data
    "no shards": ("join_swarm('emoji')", "", ["does not say where they are", "--data"]),
    "shards are not there": ("join_swarm('emoji', data='/nope/*.tar')", "", ["No shard matches '/nope/*.tar'", "1."]),
    "shards for a run without": ("join_swarm('demo', data='x.tar')", "", ["makes its own data", "Leave --data out"]),
    "no codes": ("join_swarm('dalle-laion')", "", ["code shards", "volunteer-kit encode", "--data"]),
    # addresses and choices
    "no peer": ("join_swarm({run})", of_demo("run_id: demo", "run_id: mine"), ["nobody to join", "kit host /"]),
    "peer without id": ("join_swarm('demo', initial_peers=['/ip4/1.2.3.4/tcp/5'])", "", ["no address", "/p2p/PEER_ID"]),
    "host and port": ("join_swarm('demo', host_maddrs=['0.0.0.0:4'])", "", ["'0.0.0.0:4'", "/ip4/0.0.0.0/tcp/PORT"]),
    "negative cap": ("join_swarm('demo', max_hours=-1)", "", ["max_hours is -1", "above 0"]),
    "no number": ("join_swarm('demo', max_gb='all')", "", ["max_gb is 'all'", "above 0"]),
    "client mode": ("join_swarm('demo', client_mode='maybe')", "", ["client_mode is 'maybe'", "Leave it out"]),
    "peers as one string": ("join_swarm('demo', initial_peers='/ip4/1.2.3.4/tcp/5')", "", ["'/ip4/1.2.3.4/tcp/5' is"]),
    "half a batch": ("join_swarm('demo', batch_size=2.5)", "", ["batch_size is 2.5", "whole number"]),
    "help without address": ("join_swarm({run})", DEMO + "help_url: 'https://[x'", ["[x (no address)", "accepted"]),
    "no authority": ("join_swarm({run})", LOGIN.replace("http://127.0.0.1:9", "https://[x"), ["is no address", "Fix:"]),
    "home": (f"join_swarm('demo', {OK}, home='/proc/none')", "", ["/proc/none", "cannot be written", "--home"]),
    "terms": ("join_swarm('demo')", "", ["IP address", "have to be accepted", "accept_terms=True"]),
    # login
    "wrong token": (f"join_swarm({{run}}, {OK}, token='hf_wrong')", LOGIN, ["token", "tokens"]),
    "old token": (f"join_swarm({{run}}, {OK}, token='hf_old')", LOGIN, ["expired", "tokens"]),
    "token can write": (f"join_swarm({{run}}, {OK}, token='hf_writer')", LOGIN, ["write", "read"]),
    "fine-grained token can write": (f"join_swarm({{run}}, {OK}, token='hf_fine')", LOGIN, ["write", "read"]),
    "not a member": (f"join_swarm({{run}}, {OK}, token='hf_stranger')", LOGIN, ["train-together", "bob"]),
    "no login": (f"join_swarm({{run}}, {OK})", LOGIN, ["needs a login", "HF_TOKEN", "1."]),
    "Hub is down": (f"join_swarm({{run}}, {OK}, token='hf_reader')  # 503", LOGIN, ["Hub", "sked again in"]),
    "asked too often": (f"join_swarm({{run}}, {OK}, token='hf_reader')  # 429", LOGIN, ["Hub", "sked again in"]),
}


@pytest.mark.parametrize("what", FAILURES)
def test_the_cell_tells_cause_and_way_out(what, kernel, hub, tmp_path):
    code, text, words = FAILURES[what]
    code = code.replace("{run}", repr(run_file(tmp_path, text))).replace("{hub}", hub.url)
    hub.forget()
    if fault := re.search(r"# (\d{3})$", code):
        hub.fail("whoami", times=100, status=int(fault[1]))
    seen = kernel.run(code, until=words if fault else ())  # what passes by itself is waited for
    for word in words:
        assert word in seen, seen
    assert "Traceback" not in seen and 'File "' not in seen and "volunteer.py" not in seen, seen
    for token in ("hf_wrong", "hf_writer", "hf_fine", "hf_stranger", "hf_reader", "hf_old"):
        assert token not in seen


def test_there_are_enough_kinds():
    assert len(FAILURES) >= 20
