"""First peers, monitors and Trainers under one key: each notices, and does what its kind does then."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import nursery
from tests.local_swarm import ROOT, LocalPeer
from tests.monitored import SMALLER, monitored
from tests.test_hf_failures import Trainers, step_of, trainers
from tests.test_host import copy_of_living
from volunteer_kit.run_reader import find_run_file
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net.identity import ensure_identity
from volunteer_kit.swarm.net.same_key import SKEW, Sharing, TwinWatch
from volunteer_kit.training.hf_config import read_hivemind_config
from volunteer_kit.training.hf_member import Member

HERE = "/ip4/127.0.0.1/tcp/0"
WITHIN = 240.0  # s; some 30, but on a busy machine


class Looks:
    """Finds one thing after another under a key; the last one again and again."""

    def __init__(self, *found: Sharing | Exception):
        self.found, self.count = [*found], 0

    def look(self) -> Sharing:
        self.count += 1
        found = self.found.pop(0) if len(self.found) > 1 else self.found[0]
        if isinstance(found, Exception):
            raise found
        return found


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_each_kind_of_twin_is_told_once_and_a_dht_that_fails_ends_no_watch():
    looks, told = Looks(Sharing.ALONE, OSError(), Sharing.FIRST, Sharing.FIRST, Sharing.LATER, Sharing.ALONE), []
    watch = TwinWatch(looks, told.append, every=0.01)
    until(lambda: looks.count > 8)
    watch.close()
    assert told == [Sharing.FIRST, Sharing.LATER]


def test_while_the_clock_is_wrong_nothing_is_written():
    looks, asked = Looks(Sharing.LATER), []
    watch = TwinWatch(looks, lambda sharing: None, may_look=lambda: asked.append(1), every=0.01)
    until(lambda: len(asked) > 3)
    watch.close()
    assert not looks.count


class FirstPeer(LocalPeer):
    """`python -m volunteer_kit.host_peer` of the demo."""

    def __init__(self, folder: Path, name: str, key: Path, *options: str):
        words = [str(find_run_file("demo")), "--identity-path", str(key), "--host-maddrs", HERE, *options]
        self.log = folder / f"{name}.log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = nursery.start("volunteer_kit.host_peer", words, log=self.log, environment=environment)
        self._begin_to_read()

    def said_of(self, kind: str) -> dict | str:
        return self.wait_for(lambda event: kind in event, WITHIN)[kind]


@pytest.fixture
def first_peers(tmp_path):
    """Makes them, each with its own copy of one key."""
    made = []
    ensure_identity(tmp_path / "identity.key")

    def make(*options: str, key: Path | None = None) -> FirstPeer:
        own = tmp_path / str(len(made)) / "identity.key"
        own.parent.mkdir()
        shutil.copy(key or tmp_path / "identity.key", own)
        made.append(FirstPeer(tmp_path, f"peer-{len(made)}", own, *options))
        return made[-1]

    yield make
    for one in made:
        one.kill()


@pytest.mark.slow
def test_the_later_of_two_first_peers_ends_and_the_other_goes_on(first_peers, tmp_path):
    """They know each other by a third."""
    ensure_identity(tmp_path / "third.key")
    known = ",".join(first_peers(key=tmp_path / "third.key").said_of("ready")["maddrs"])
    first = first_peers("--initial-peers", known)
    assert first.said_of("ready")
    time.sleep(SKEW + 2)  # who ended as the other began is no twin
    later = first_peers("--initial-peers", known)
    assert "this one ends" in later.said_of("over") and "It came later" in first.said_of("warning")
    assert not any("over" in event for event in first.said())


@pytest.mark.slow
def test_a_first_peer_whose_twin_is_at_its_old_address_does_not_start(first_peers):
    """The two have nobody in common: volunteers have the address of one or of the other."""
    address = first_peers().said_of("ready")["maddrs"][0]
    copy = first_peers("--given-out", address)
    assert "this one ends" in copy.said_of("over") and copy.process.wait(WITHIN) == 2
    assert not any("ready" in event for event in copy.said())


@pytest.mark.slow
def test_a_first_peer_starts_where_nobody_is_at_its_old_address(first_peers):
    assert first_peers("--given-out", "/ip4/127.0.0.1/tcp/9/p2p/QmX").said_of("ready")


@pytest.mark.slow
def test_the_later_of_two_monitors_gives_up_its_key_and_the_other_goes_on(tmp_path):
    with monitored(tmp_path, open_run=True, **SMALLER) as run:
        run.monitor(name="known")  # both know it
        first = run.monitor(name="first", wait=False)
        first.ready()
        copy_of_living(tmp_path / "first", tmp_path / "later", "monitor.lock")
        time.sleep(SKEW + 2)
        later = run.monitor(name="later", wait=False)
        assert later.process.wait(WITHIN) == 2
        assert "Start this monitor again: it makes a key of its own" in later.log.read_text()
        assert (tmp_path / "later" / "identity.key.shared").is_file()
        assert not (tmp_path / "later" / "identity.key").exists()
        first.wait(lambda journal: any("It came later" in str(e) for e in journal.events(100, ("warning",))), WITHIN)


def key_and_copy(folder: Path) -> tuple[Path, Path]:
    key, copy = folder / "second.key", folder / "twin.key"
    ensure_identity(key)
    shutil.copy(key, copy)
    return key, copy


def begin(swarm: Trainers, number: int, **dht: object) -> LocalPeer:
    invited = [m for m in swarm.peers[0].wait_event("invitation")["maddrs"] if m.startswith("/ip4/127.0.0.1/tcp/")]
    peer = swarm.load()
    swarm.begin(peer, number, dht={"initial_peers": invited, **dht})
    return peer


@pytest.mark.parametrize(
    ("initial_peers", "is_there", "words"),
    [
        ([], True, "Others join by this peer's key"),
        (["/ip4/127.0.0.1/tcp/9/p2p/QmXoypizjW3WknFiJnKLwHCnL72vedxjQkDDP1mXWo6uco"], False, '"identity_path" in'),
    ],
    ids=["the one by whom others join", "a key that cannot be moved"],
)
def test_a_trainer_that_can_take_no_other_key_refuses_in_words(tmp_path, initial_peers, is_there, words):
    path = tmp_path / "identity.key"
    if is_there:
        ensure_identity(path)
    dht = {"identity_path": str(path), "initial_peers": initial_peers}
    config = read_hivemind_config({"dht": dht, "opt": {"run_id": "ours", "target_batch_size": 8}})
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    how = {"max_grad_norm": None, "max_steps": 5, "epoch": 0, "schedule": "constant"}
    member = Member(config, model, optimizer, schedule, lambda: (0, 0.0, ()), **how)
    with pytest.raises(SwarmError, match=words) as told:
        member.give_up_key()
    assert told.value.kind == "identity_taken" and "and was here before" in str(told.value)
    assert path.exists() == is_there


@pytest.mark.slow
def test_a_trainer_whose_key_another_one_has_takes_a_new_one_at_its_start(tmp_path):
    key, copy = key_and_copy(tmp_path)
    with trainers(tmp_path, 48, max_steps=5000) as swarm:
        swarm.begin(swarm.load(), 0)
        second = begin(swarm, 1, identity_path=str(key))
        step_of(second, after=0, group_size=2)
        twin = begin(swarm, 2, identity_path=str(copy))
        step_of(twin, after=0, group_size=3)
        assert "This one takes a key of its own" in twin.said
        assert copy.with_name("twin.key.shared").read_bytes() == key.read_bytes() != copy.read_bytes()


@pytest.mark.slow
def test_a_trainer_that_finds_its_twin_later_comes_back_under_a_new_key(tmp_path):
    """Neither can be called: the look at the start finds none."""
    key, copy = key_and_copy(tmp_path)
    with trainers(tmp_path, 48, max_steps=5000) as swarm:
        swarm.begin(swarm.load(), 0)
        second = begin(swarm, 1, identity_path=str(key), check_if_identity_free=False, client_mode=True)
        step_of(second, after=0, group_size=2)
        time.sleep(SKEW + 2)
        twin = begin(swarm, 2, identity_path=str(copy), check_if_identity_free=False, client_mode=True)
        step_of(twin, after=0, group_size=3)
        assert "and was here before" in twin.said and "This one takes a key of its own" in twin.said
        assert copy.with_name("twin.key.shared").read_bytes() == key.read_bytes() != copy.read_bytes()
        second.wait_for(lambda e: e["event"] == "line" and "It came later" in e["text"], WITHIN)
        assert key.is_file()
