"""What every test may rely on."""

import os
import signal
import subprocess
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def interrupts_arrive():
    """hivemind sets SIGINT to "ignore" in the process that builds an averager; the next test must not inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def home(tmp_path_factory):
    """Nothing is written into the user's own cache, nor read from it."""
    with mock.patch.dict(os.environ, VOLUNTEER_KIT_HOME=str(tmp_path_factory.mktemp("home"))):
        yield


@pytest.fixture(scope="module")
def peer():
    """A peer of its own, on loopback."""
    from volunteer_kit.swarm.peer import PeerConfig, start_peer  # hivemind: takes seconds

    peer = start_peer(PeerConfig(host_maddrs=["/ip4/127.0.0.1/tcp/0"], startup_timeout=60))
    yield peer
    peer.shutdown()


class Clock:
    """s, set by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def tiny_disk(tmp_path):
    """A real file system of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True)
    except FileNotFoundError:
        pytest.skip("no mount command here")
    if done.returncode:
        pytest.skip("mounting a tmpfs needs root; test_a_write_that_fails_midway covers the rest")
    yield folder
    subprocess.run(["umount", folder], check=True)
