"""The pipe to a node process, and how the process ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from tests.waiting import wait_until
from volunteer_kit.swarm.net.identity import ensure_identity
from volunteer_kit.swarm.node.link import Link, launch_node, start_node
from volunteer_kit.swarm.node.talk import (
    Broken,
    Found,
    Founded,
    Granted,
    Leave,
    Left,
    NodeSpec,
    Progress,
    Told,
    Up,
)

PATIENCE = 120.0  # s
NODE = """
import sys, time
from multiprocessing.connection import Connection
from volunteer_kit.swarm.node.talk import Progress, Told
pipe = Connection(int(sys.argv[1]))
pipe.send(Told("warning", "here"))
{}
"""


@pytest.fixture
def start():
    """A process that does `what` when it has said that it is there."""
    links = []

    def start(what: str) -> Link:
        ours, its = socket.socketpair()
        sentinel, held = os.pipe()
        with its:
            process = subprocess.Popen(
                [sys.executable, "-c", NODE.format(what), str(its.fileno())], pass_fds=(its.fileno(), held)
            )
        os.close(held)
        links.append(Link(process, ours, sentinel))
        assert links[-1].receive(PATIENCE) == Told("warning", "here")
        return links[-1]

    yield start
    for link in links:
        link.close()


def is_alive(pid: int) -> bool:
    """Also where nobody has waited for it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def spec(folder, **changes) -> NodeSpec:
    identity = folder / "key"
    ensure_identity(str(identity), print)
    settings = {
        "daemon": f"/unix{folder}/no-p2pd", "identity_path": str(identity), "client_mode": False, "initial_peers": (),
        "folder": folder / "node", "run_key": "run", "sync": {"target_batch_size": 8}, "shapes": ((4,),),
        "codec": ("none", "none", 0, 1.0), **changes,
    }  # fmt: skip
    return NodeSpec(**settings)


# --- any process ---


def test_messages_come_in_their_order_both_ways(start):
    link = start("while True: pipe.send(pipe.recv())")
    told = [Told("x", str(number)) for number in range(100)]
    for each in told:
        link.send(each)
    assert [link.receive(PATIENCE) for _ in told] == told
    assert link.receive(0) is None and link.receive(0.01) is None


def test_the_newest_progress_is_at_hand(start):
    link = start("while True: pipe.send(pipe.recv())")
    for epoch in range(3):
        link.send(Progress("collecting", epoch, 0, 0, 1, False, 0.0, 0, 0))
    wait_until(lambda: link.progress is not None and link.progress.epoch == 2)
    assert [link.receive(PATIENCE).epoch for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("raise RuntimeError('a fault of the test')", "exit code 1"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
        ("import os; os.write(int(sys.argv[1]), b'\\0\\0\\0\\x40half a message'); sys.exit(0)", "exit code 0"),
    ],
)
def test_a_process_that_ends_is_told(start, what, words):
    link = start(what)
    found = link.receive(PATIENCE)
    assert isinstance(found, Broken) and words in found.why
    link.send(Leave())  # nobody is there, and nobody minds
    assert link.receive(0) is None


def test_a_process_that_is_killed_is_told(start):
    link = start("time.sleep(1000)")
    os.kill(link.pid, signal.SIGKILL)
    assert "signal 9" in link.receive(PATIENCE).why


def test_a_process_that_only_closes_its_pipe_is_told_as_well(start, monkeypatch):
    monkeypatch.setattr("volunteer_kit.swarm.node.link.ENDS_WITHIN", 0.2)
    link = start("pipe.close(); time.sleep(1000)")
    assert "The pipe to the process" in link.receive(PATIENCE).why
    link.close()
    assert not is_alive(link.pid)


def test_what_was_said_before_the_end_is_heard(start):
    link = start("[pipe.send(Told('x', str(n))) for n in range(50)]; sys.exit(0)")
    assert [link.receive(PATIENCE).about for _ in range(50)] == [str(number) for number in range(50)]
    assert isinstance(link.receive(PATIENCE), Broken)


def test_a_garbled_message_ends_the_link(start):
    link = start("pipe.send_bytes(b'no pickle'); time.sleep(1000)")
    assert isinstance(link.receive(PATIENCE), Broken)


def test_closing_ends_the_process_and_is_no_news(start):
    link = start("\ntry: pipe.recv()\nexcept EOFError: sys.exit(0)")
    link.close()
    link.close()
    assert not is_alive(link.pid)
    assert link.receive(0.1) is None
    link.send(Leave())


def test_a_process_that_does_not_end_is_killed(start, monkeypatch):
    monkeypatch.setattr("volunteer_kit.swarm.node.link.ENDS_WITHIN", 0.2)
    link = start("time.sleep(1000)")
    link.close()
    assert not is_alive(link.pid)


# --- the node's own process ---


@pytest.mark.slow
def test_a_spec_that_makes_no_sense_breaks_the_node():
    link = launch_node()
    link.send("no spec")
    assert isinstance(link.receive(PATIENCE), Broken)
    link.close()
    assert not is_alive(link.pid)


@pytest.mark.slow
def test_a_node_without_p2pd_says_so(tmp_path):
    link = start_node(spec(tmp_path))
    found = link.receive(PATIENCE)
    assert isinstance(found, Broken)
    link.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A real p2pd, for the nodes of one peer. Each has a run of its own: p2pd keeps what the dead have asked for."""
    from volunteer_kit.swarm.net.peer import PeerConfig, start_peer  # hivemind: takes seconds

    folder = tmp_path_factory.mktemp("peer")
    ensure_identity(str(folder / "key"), print)
    peer = start_peer(
        PeerConfig(host_maddrs=["/ip4/127.0.0.1/tcp/0"], identity_path=str(folder / "key"), startup_timeout=120)
    )
    yield peer, {"daemon": peer.dht.run_coroutine(_daemon_address), "identity_path": str(folder / "key")}
    peer.shutdown()


def next_of(link: Link, kind: type):
    while not isinstance(found := link.receive(PATIENCE), kind):
        assert found is not None and not isinstance(found, Broken), found
    return found


def link_end(link: Link) -> Broken:
    while not isinstance(found := link.receive(PATIENCE), Broken):
        assert found is not None
    return found


@pytest.mark.slow
def test_a_node_dies_comes_back_with_its_files_and_leaves(served, tmp_path):
    peer, settings = served
    lineages = []
    for life in ("first", "second"):
        link = start_node(spec(tmp_path, run_key=life, **settings))
        assert next_of(link, Up).peer == str(peer.peer_id)
        assert {next_of(link, Granted).slot for _ in range(2)} == {0, 1}
        link.send(Found())
        lineages.append(next_of(link, Founded).lineage)
        if life == "first":
            os.kill(link.pid, signal.SIGKILL)
            assert "signal 9" in link_end(link).why
        else:
            link.send(Leave())
            next_of(link, Left)
        link.close()
        assert not is_alive(link.pid)
    assert lineages[0] == lineages[1]


@pytest.mark.slow
def test_a_folder_that_cannot_be_used_is_told_in_words(served, tmp_path):
    (tmp_path / "node").write_text("a file")
    link = start_node(spec(tmp_path, run_key="no folder", **served[1]))
    assert str(tmp_path / "node") in link_end(link).why
    link.close()


@pytest.mark.slow
def test_two_nodes_of_one_folder(served, tmp_path):
    one = start_node(spec(tmp_path, run_key="one", **served[1]))
    next_of(one, Up)
    other = start_node(spec(tmp_path, run_key="other", **served[1]))
    assert "Another process uses" in link_end(other).why
    for link in (one, other):
        link.close()


def test_a_node_whose_p2pd_dies_says_so(served, tmp_path):
    """The last one: it takes the p2pd with it."""
    peer, settings = served
    link = start_node(spec(tmp_path, run_key="alone", **settings))
    next_of(link, Up)
    p2pd = [each for each in psutil.Process().children(recursive=True) if "p2pd" in each.name()]
    max(p2pd, key=psutil.Process.create_time).kill()
    why = link_end(link).why
    assert "exit code" not in why and "signal" not in why
    link.close()


async def _daemon_address(dht, node) -> str:
    return str(node.p2p.daemon_listen_maddr)
