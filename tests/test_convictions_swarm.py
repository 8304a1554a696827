"""Real peers in processes of their own: most convict one, and it is refused by all; a few do, and nothing happens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.free_ports import free_port
from tests.local_authority import RUN, Authority, add_person, make_authority, served
from tests.local_swarm import LocalPeer
from volunteer_kit.auth.moderation import Allowlist
from volunteer_kit.dashboard.happenings import Names, sentence
from volunteer_kit.journal import JournalReader

NAMES = ("ada", "bob", "cleo", "mallory")
WITHIN = 180.0  # s; far less, but on a busy machine


class Swarm:
    """Those in NAMES, and with an authority a monitor."""

    def __init__(self, folder: Path):
        self.folder, self.peers, self.first = folder, {}, []

    def add(self, name: str, **settings) -> LocalPeer:
        home = self.folder / name
        home.mkdir()
        settings |= {"identity": str(home / "identity.key"), "initial_peers": self.first}
        peer = self.peers[name] = LocalPeer(self.folder / f"{name}.log", module="tests.convicting_peer", **settings)
        connected = peer.wait_event("connected")
        self.first = self.first or connected["maddrs"]
        return peer

    def id_of(self, name: str) -> str:
        return self.peers[name].wait_event("connected")["peer_id"]

    def meet(self) -> None:
        """All take part, and everybody has seen it."""
        for name in NAMES:
            self.peers[name].ask(ask="take_part")
        everybody = {self.id_of(name) for name in NAMES}
        for peer in self.peers.values():
            until(lambda p=peer: set(p.ask(ask="seen")["seen"]) == everybody, peer)

    def verdict(self, by: str, of: str) -> str | None:
        found = self.peers[by].ask(ask="verdicts", peers=[self.id_of(of)])
        return found["verdicts"][self.id_of(of)]

    def wait_for_verdicts(self, of: str, fits: Callable[[str | None], bool]) -> float:
        """:returns: s until it was everybody else's verdict"""
        began = time.monotonic()
        for name, peer in self.peers.items():
            if name != of:
                until(lambda n=name: fits(self.verdict(n, of)), peer)
        return time.monotonic() - began


def until(true: Callable[[], bool], peer: LocalPeer) -> None:
    deadline = time.monotonic() + WITHIN
    while not true():
        assert time.monotonic() < deadline, peer.story()
        time.sleep(0.2)


@contextlib.contextmanager
def swarm(folder: Path) -> Iterator[Swarm]:
    made = Swarm(folder)
    try:
        yield made
    finally:
        for peer in made.peers.values():
            peer.kill()


def test_in_an_open_run_most_shut_out_one_and_few_nobody(tmp_path):
    with swarm(tmp_path) as run:
        for name in NAMES:
            run.add(name)
        run.meet()
        assert run.peers["mallory"].ask(ask="convict", peer=run.id_of("ada"))["stored"]
        for name in NAMES[:2]:
            assert run.peers[name].ask(ask="convict", peer=run.id_of("mallory"))["stored"]
        for name in NAMES[:3]:
            peer = run.peers[name]  # two of three; it takes two looks, and one that misses somebody costs another two
            until(lambda p=peer: p.ask(ask="look")["condemned"] == [run.id_of("mallory")], peer)
            assert run.verdict(name, "mallory") == "convicted" and run.verdict(name, "ada") is None
            assert run.id_of("mallory") not in run.peers[name].ask(ask="seen")["seen"], "its records do not count"


@pytest.fixture
def authority(hub, tmp_path) -> Iterator[tuple[Authority, str]]:
    port = free_port()
    made = make_authority(tmp_path, allowlist=Allowlist.of(is_open=True), url=f"http://127.0.0.1:{port}")
    with served(made, port) as url:
        yield made, url
    made.storage.close()


@pytest.mark.slow
def test_most_convict_one_the_authority_bans_it_and_a_moderator_lets_it_in_again(hub, authority, tmp_path):
    authority, url = authority
    about = {"authority": url, "public_key": authority.public_key, "run_id": RUN}
    with swarm(tmp_path) as run:
        run.add("monitor", keys=str(tmp_path / "keys"), **about)
        for name in NAMES:
            run.add(name, hf_token=add_person(hub, name), **about)
        run.meet()

        assert run.peers["mallory"].ask(ask="convict", peer=run.id_of("ada"))["stored"]
        began = time.monotonic()
        for name in NAMES[:3]:
            assert run.peers[name].ask(ask="convict", peer=run.id_of("mallory"))["stored"]
        run.wait_for_verdicts("mallory", lambda reason: reason in ("convicted", "banned"))
        honoured = time.monotonic() - began
        run.wait_for_verdicts("mallory", lambda reason: reason == "banned")
        banned = time.monotonic() - began
        assert honoured < WITHIN and banned < 2 * WITHIN
        called = run.peers["mallory"].ask(ask="call", kind="rpc_find", peer=run.id_of("ada"))
        assert "is banned" in called["outcome"]
        moderators = authority.app.state.moderators
        (ban,) = moderators.bans()
        assert (ban.name, ban.by) == ("mallory", "the swarm")
        (finding,) = moderators.convictions([ban])["mallory"]["findings"]
        assert finding["by"] == ["ada", "bob", "cleo"]
        journal = JournalReader(tmp_path / "monitor" / "journal.sqlite")
        until(lambda: journal.events(10, ("banned",)), run.peers["monitor"])
        (event,) = journal.events(10, ("banned",))
        assert sentence(event, Names(())).startswith("mallory was banned by the swarm: 3 of the 3 other accounts found")

        moderators.unban("Mona", "mallory", "page")
        freed = run.wait_for_verdicts("mallory", lambda reason: reason is None)
        assert freed < WITHIN
        for _ in range(2):
            assert [peer.ask(ask="look")["condemned"] for peer in run.peers.values()] == [[]] * 5
        assert moderators.bans() == [] and run.verdict("bob", "mallory") is None, "the same evidence does not ban again"
        assert all(run.verdict(name, "ada") is None for name in ("bob", "cleo")), "one alone has convicted nobody"
        print(f"\nrefused by all after {honoured:.1f} s, banned after {banned:.1f} s, free again after {freed:.1f} s")
