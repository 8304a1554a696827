"""The network between peers."""

from __future__ import annotations

import random

import pytest

from tests.simulation.clock import Clock
from tests.simulation.network import CALM, Line, Network, Trouble
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.messages import Lead, Message, Vote

WORD = Message(None, Lead(Ballot(0, "a"), True))
VOTE = Message(None, Vote(Ballot(0, "a"), b"entry", None))


class Post:
    """A network whose deliveries and crashes are lists."""

    def __init__(self, **public: bool):
        self.clock = Clock()
        self.got: list[tuple[str, str]] = []
        self.dead: list[str] = []
        rng = random.Random("network")
        self.network = Network(
            self.clock, rng, lambda sender, to, message: self.got.append((sender, to)), self.dead.append
        )
        for peer, is_public in public.items():
            self.network.lines[peer] = Line(0.05, 8.0, is_public)

    def send(self, sender: str, to: str, message: Message = WORD, times: int = 1) -> int:
        """Send, wait until everything has come, and count what came."""
        before = len(self.got)
        for _ in range(times):
            self.network.send(sender, to, message)
        self.clock.run(self.clock.now + 100)
        return len(self.got) - before


def test_a_calm_network_delivers_each_message_once():
    post = Post(a=True, b=True)
    assert post.send("a", "b", times=500) == 500 and set(post.got) == {("a", "b")}


def test_messages_take_the_latency_of_both_lines():
    post = Post(a=True, b=True)
    for _ in range(300):
        assert 0.08 <= post.network.latency("a", "b") <= 0.1 * 7 * 1.2


def test_a_client_is_called_over_the_connection_that_it_opened():
    post = Post(host=True, client=False, other=False)
    assert post.send("host", "client") == 0
    assert post.send("client", "host") == 1
    assert post.send("host", "client") == 1
    assert post.send("client", "other") == 0, "two clients never reach each other"
    post.network.disconnect("host")
    assert post.send("host", "client") == 0


def test_a_cut_may_go_one_way_and_cuts_add_up():
    post = Post(a=True, b=True)
    for _ in range(2):
        post.network.cut([("a", "b")])
    assert not post.network.reaches("a", "b") and post.network.reaches("b", "a")
    assert post.send("b", "a", times=20) == 20
    post.network.mend([("a", "b")])
    assert not post.network.reaches("a", "b")
    post.network.mend([("a", "b")])
    assert post.network.reaches("a", "b")


def test_some_messages_wait_until_a_cut_line_is_back():
    post = Post(a=True, b=True)
    post.network.cut([("a", "b")])
    for _ in range(200):
        post.network.send("a", "b", WORD)
    post.clock.run(2.0)
    assert not post.got
    post.network.mend([("a", "b")])
    post.clock.run(60.0)
    assert 50 < len(post.got) < 150


@pytest.mark.parametrize(
    "trouble, least, most",
    [(Trouble(loss=0.4), 700, 900), (Trouble(duplicates=0.2), 1100, 1300), (CALM, 1000, 1000)],
    ids=["loss", "duplicates", "calm"],
)
def test_trouble_loses_half_of_what_it_hits_and_doubles_some(trouble, least, most):
    post = Post(a=True, b=True)
    post.network.trouble = trouble
    assert least <= post.send("a", "b", times=1000) <= most


def test_a_nasty_network_hits_only_what_decides():
    post = Post(a=True, b=True)
    post.network.trouble = Trouble(deciding=0.5)
    assert post.send("a", "b", WORD, times=300) == 300 and not post.dead
    assert post.send("a", "b", VOTE, times=300) < 300
    assert {"a", "b"} == set(post.dead), "the sender dies, or the receiver"


def test_a_transfer_takes_as_long_as_the_uplink_needs():
    post = Post(a=True, b=True)
    assert post.network.seconds("a", 1e6) == pytest.approx(1.0)  # 8 Mbit/s
    post.network.slowed["a"] = 10
    assert post.network.seconds("a", 1e6) == pytest.approx(10.0)
