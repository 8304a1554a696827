"""What every test may rely on."""

import os
import signal
import subprocess
from unittest import mock

import pytest

from benchmarks.netlab_parts.descendants import end_descendants_with_us

end_descendants_with_us()  # peers, hosts and servers, however this process ends


@pytest.fixture(autouse=True)
def interrupts_arrive():
    """hivemind sets SIGINT to "ignore" in the process that builds a DHT; the next test must not inherit that."""
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
    from volunteer_kit.swarm.net.peer import PeerConfig, start_peer  # hivemind: takes seconds

    peer = start_peer(PeerConfig(host_maddrs=["/ip4/127.0.0.1/tcp/0"], startup_timeout=120))
    yield peer
    peer.shutdown()


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """The keys of a run "run"."""
    from volunteer_kit.auth.keys import KeyFolder

    folder = KeyFolder(tmp_path_factory.mktemp("keys"))
    folder.create("run")
    return folder


@pytest.fixture(scope="module")
def the_hub():
    """A stand-in Hub, which is also the one of this process's client."""
    from tests.hub import Hub
    from tests.local_authority import this_hub

    with Hub() as hub, this_hub(hub):
        yield hub


@pytest.fixture
def hub(the_hub):
    """`the_hub`, without the requests, faults and expired tokens of the test before."""
    the_hub.forget()
    the_hub.expired.clear()
    the_hub.hides_orgs = False
    return the_hub


@pytest.fixture
def anna(hub) -> str:
    """The token of somebody who is in the organization "cats"."""
    from tests.local_authority import add_person

    return add_person(hub, "anna", "cats")


@pytest.fixture
def mona(hub) -> str:
    """A moderator's token."""
    from tests.local_authority import add_person

    return add_person(hub, "Mona")


@pytest.fixture(scope="module")
def new_postgres():
    """Makes a PostgreSQL database, and gives its URL."""
    from tests.postgres import NoPostgres, postgres

    try:
        with postgres() as new_database:
            yield new_database
    except NoPostgres as why:
        pytest.skip(str(why))


@pytest.fixture
def story():
    """The DemoState of two volunteers; the second is killed and returns, a third comes late."""
    from tests.demo_story import tell_story

    return tell_story()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request, tmp_path) -> str:
    """A test with it runs on both."""
    if request.param == "sqlite":
        return str(tmp_path / "authority.sqlite")
    return request.getfixturevalue("new_postgres")()


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
    subprocess.run(["umount", "--lazy", folder], check=True)  # who has just ended may hold a file still
