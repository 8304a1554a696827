"""Machines with IPv6 only, each a network namespace without any IPv4 address, its loopback's included."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.netlab import NoNetlab, enter
from benchmarks.reachability_parts.cells import CELLS, machines
from tests.bounded_server import make_certificate
from tests.hub import Hub
from tests.local_swarm import ROOT
from tests.waiting import wait_until
from volunteer_kit.process_group import kill_all
from volunteer_kit.run_reader import find_run_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CELL = next(cell for cell in CELLS if cell.name == "ipv6_only")
FIRST = CELL.houses[0].addresses[0].partition("/")[0]
CLI = (sys.executable, "-m", "volunteer_kit.cli")
UP = 240.0  # s, on two busy cores
TAKEN = """
import sys
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net.peer import PeerConfig, start_peer

first = start_peer(PeerConfig(identity_path=sys.argv[1], startup_timeout=200))
try:
    twin = PeerConfig(first.visible_maddrs(), identity_path=sys.argv[1], client_mode=True, startup_timeout=200)
    start_peer(twin).shutdown()
    print("free")
except SwarmError as error:
    print(error.kind)
first.shutdown()
"""
SERVED = """
import json, subprocess, sys, urllib.request

server = subprocess.Popen([sys.executable, "-m", *sys.argv[1:]], stdout=subprocess.PIPE, text=True)
url = json.loads(server.stdout.readline())["ready"]["url"]
print(urllib.request.urlopen(url, timeout=60).status, url)
server.terminate()
server.wait()
"""


class Hub6(Hub):
    """A Hub of the first machine."""

    address_family = socket.AF_INET6

    @property
    def url(self) -> str:
        return f"http://[{FIRST}]:{self.server_address[1]}"


@pytest.fixture
def names() -> Iterator[list[str]]:
    """The namespaces."""
    try:
        with machines(CELL) as made:
            yield made
    except NoNetlab as e:
        pytest.skip(str(e))


@pytest.fixture
def hub(names) -> Iterator[Hub]:
    def make() -> Hub:
        enter(names[0])
        return Hub6()

    with ThreadPoolExecutor(1) as there, there.submit(make).result() as hub:
        for name in ("ada", "mona"):
            hub.tokens[token_of(name)], hub.rights[token_of(name)] = name, {"role": "read"}
        yield hub


def token_of(name: str) -> str:
    return f"hf_onlyReads{name.capitalize()}123456"


def at(name: str, *command: str, environment: dict[str, str] | None = None) -> str:
    """The lines that a program says on this machine."""
    done = subprocess.run(
        ["ip", "netns", "exec", name, *command],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=2 * UP,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_identity_that_another_peer_uses_is_found(names, tmp_path):
    said = at(names[0], sys.executable, "-c", TAKEN, str(tmp_path / "identity.key"))
    assert said.splitlines()[-1] == "identity_taken"


def test_the_dashboard_listens_and_its_link_has_brackets(names, tmp_path):
    command = ["volunteer_kit.cli", "dashboard", "demo", "--folder", str(tmp_path), "--port", "0"]
    assert at(names[0], sys.executable, "-c", SERVED, *command).startswith("200 http://[::1]:")


def test_a_host_with_a_certificate_is_joined_by_a_volunteer(names, hub, tmp_path):
    cert, private = make_certificate(tmp_path, address=FIRST)
    text = find_run_file("demo").read_text().replace("run_id: demo", "run_id: six")
    who = "url: 'http://127.0.0.1', open: true, moderators: [mona], public_key: ''"
    (tmp_path / "six.yaml").write_text(f"{text}\nauthority: {{{who}}}\n")
    url = f"https://[{FIRST}]:8443"
    trust = {"REQUESTS_CA_BUNDLE": str(cert), "SSL_CERT_FILE": str(cert), "OMP_NUM_THREADS": "1"}
    environment = {**hub.environment(tmp_path / "hf"), **trust, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    host = subprocess.Popen(
        ["ip", "netns", "exec", names[0], *CLI, "host", str(tmp_path / "six.yaml"), "--folder", str(tmp_path / "host"),
         "--public-url", url, "--port", "8443", "--tls-cert", str(cert), "--tls-key", str(private)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        alarm = threading.Timer(UP, host.kill)
        alarm.start()
        said = ""
        for line in host.stdout:
            said += line
            if "Ctrl-C stops it" in line:
                break
        alarm.cancel()
        assert f"volunteer-kit join {url}" in said and f"/ip6/{FIRST}/tcp/" in said and "Without" not in said, said
        environment |= {"HF_TOKEN": token_of("ada")}
        join = ("join", f"{url}/run.yaml", "--accept-terms", "--batch-size", "8", "--home", str(tmp_path / "ada"))
        file, output = tmp_path / "ada" / "totals.json", tmp_path / "ada.txt"
        with output.open("w") as told:
            ada = subprocess.Popen(
                ["ip", "netns", "exec", names[2], *CLI, *join], stdout=told, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, env={**os.environ, **environment}, start_new_session=True,
            )  # fmt: skip
        try:
            wait_until(lambda: file.exists() and json.loads(file.read_text())["samples"] > 0, 2 * UP)
            ada.send_signal(signal.SIGINT)
            assert ada.wait(timeout=UP) == 0, output.read_text()
        finally:
            kill_all(ada.pid)
            ada.wait()
        text = output.read_text()
        assert "Training, 1 volunteer here" in text and "as ada" in text, text
    finally:
        kill_all(host.pid)
        host.wait()
