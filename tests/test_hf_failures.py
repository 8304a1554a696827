"""Trainers of a swarm that die, are resumed, fall behind, or are left alone."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fine_tunes import TalkingPeer, on_loopback
from volunteer_kit.swarm.net.connectivity import NOBODY

PEER = "benchmarks.trainer_parts.peer"
LEARNING = {"per_device_train_batch_size": 4, "learning_rate": 3e-3, "logging_steps": 5}
MEETING = {"run_id": "three"}


class Trainers:
    """Processes of benchmarks/trainer_parts/peer.py, or of another such module, the others invited by the first."""

    def __init__(
        self,
        folder: Path,
        target: int,
        options: dict | None = None,
        module: str = PEER,
        opt: dict | None = None,
        **arguments,
    ):
        self._folder, self.peers, self._module = folder, [], module
        self._settings = {
            "arguments": {**LEARNING, **arguments},
            "opt": {**MEETING, "target_batch_size": target, **(opt or {})},
            "options": options or {},
        }

    def load(self) -> TalkingPeer:
        """A process that has not begun yet."""
        peer = TalkingPeer(self._folder / f"{len(self.peers)}.log", module=self._module)
        self.peers.append(peer)
        return peer

    def begin(self, peer: TalkingPeer, number: int, wait_for: int = 1, **settings) -> None:
        """:param number: whose rows it has, and whose folder"""
        invited = [] if peer is self.peers[0] else on_loopback(self.peers[0].wait_event("invitation")["maddrs"])
        peer.out = self._folder / f"{number}.safetensors"
        own = {
            "rows": [1000 * number, 400],
            "out": str(peer.out),
            "dht": {"initial_peers": invited},
            "opt": {**self._settings["opt"], "wait_for_peers": wait_for},
        }
        peer.order(json.dumps({**self._settings, **own, **settings}))

    def all_begin(self, count: int) -> list[TalkingPeer]:
        for peer in [self.load() for _ in range(count)]:
            self.begin(peer, self.peers.index(peer), wait_for=count)
        return self.peers


@contextlib.contextmanager
def trainers(folder: Path, target: int, **settings) -> Iterator[Trainers]:
    made = Trainers(folder, target, **settings)
    try:
        yield made
    finally:
        for peer in made.peers:
            peer.kill()


def peer_id(peer: TalkingPeer) -> str:
    return peer.wait_event("invitation")["maddrs"][0].rsplit("/", 1)[1]


def step_of(peer: TalkingPeer, after: int, group_size: int, with_rows: bool = False) -> dict:
    """The next one after this epoch that it took in a group of so many.

    :param with_rows: of its own; a member of a round need not bring any
    """

    def fits(event: dict) -> bool:
        return event["epoch"] > after and event["group_size"] == group_size and not event["cause"]

    return peer.wait_for(lambda e: e["event"] == "step" and fits(e) and (e["rows"] or not with_rows))


def last_step(peer: TalkingPeer) -> int:
    return max(event["epoch"] for event in peer.events if event["event"] == "step")


def end_equal(*peers: TalkingPeer) -> list[list[float]]:
    """:returns: their losses, as logged"""
    logs = [peer.wait_event("done")["log"] for peer in peers]
    models = [load_file(peer.out) for peer in peers]
    assert all(torch.equal(models[0][name], model[name]) for model in models[1:] for name in models[0])
    return [[entry["loss"] for entry in log if "loss" in entry] for log in logs]


@pytest.mark.slow
def test_of_three_one_is_killed_and_another_killed_and_resumed(tmp_path):
    """The two that are left end with one model, and wait for nobody, though the records of the dead stay a minute."""
    with trainers(tmp_path, 48, max_steps=60, save_strategy="steps", save_steps=5) as swarm:
        first, lost, resumed = swarm.all_begin(3)
        again = swarm.load()
        met = step_of(resumed, after=8, group_size=3)["epoch"]
        lost.kill()
        step_of(first, after=met, group_size=2)
        resumed.kill()
        checkpoint = resumed.out.with_suffix(".safetensors.d") / "checkpoint-5"  # a later one may be half written
        swarm.begin(again, 2, resume=str(checkpoint))
        back = step_of(again, after=met, group_size=2)["epoch"]
        first.wait_for(lambda e: e["event"] == "step" and e["epoch"] == 60)
        assert back > met
        first.wait_event("done", timeout=80.0)  # the records of the dead stay for longer
        losses = end_equal(first, again)
        assert last_step(first) == last_step(again) == 60
        assert all(loss[-1] < loss[0] for loss in losses)


@pytest.mark.slow
def test_a_slow_one_is_left_out_and_comes_back(tmp_path):
    with trainers(tmp_path, 48, max_steps=60) as swarm:
        first, second, slow = swarm.all_begin(3)
        met = step_of(slow, after=5, group_size=3)["epoch"]
        slow.process.send_signal(signal.SIGSTOP)  # its p2pd goes on, as that of a machine with much to compute
        without = step_of(first, after=met + 3, group_size=2)["epoch"]
        slow.process.send_signal(signal.SIGCONT)
        step_of(slow, after=without, group_size=3, with_rows=True)
        losses = end_equal(first, second, slow)
        assert last_step(first) == last_step(second) == last_step(slow) == 60
        assert all(loss[-1] < loss[0] for loss in losses)


@pytest.mark.slow
def test_the_one_that_is_left_of_two_says_when_it_goes_on_alone(tmp_path):
    with trainers(tmp_path, 48, options={"alone_after": 40.0}, max_steps=30) as swarm:
        gone, left = sorted(swarm.all_begin(2), key=peer_id)  # of two, the one with the smaller id may decide alone
        step_of(left, after=5, group_size=2)
        gone.kill()
        assert left.wait_event("done")["steps"] == 30 == last_step(left)
        assert "Nobody in the swarm answers" in left.said or "More than half of the swarm" in left.said
        assert "After 40 s of silence this one goes on alone." in left.said
        assert "Steps are committed here again." in left.said


@pytest.mark.slow
def test_of_two_the_one_that_may_decide_alone_goes_on_at_once(tmp_path):
    with trainers(tmp_path, 48, options={"alone_after": 600.0}, max_steps=30) as swarm:
        left, gone = sorted(swarm.all_begin(2), key=peer_id)
        step_of(left, after=5, group_size=2)
        gone.kill()
        assert left.wait_event("done")["steps"] == 30 == last_step(left)
        assert "goes on alone" not in left.said


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "jump", "words"),
    [(0, 3600.0, "jumped forward by 1 h"), (1, -3600.0, "jumped back by 1 h")],
    ids=["who began", "who joined"],
)
def test_whose_clock_jumps_or_machine_sleeps_says_so_and_comes_back_by_itself(tmp_path, number, jump, words):
    """Steps have no dates: it takes part in them meanwhile, and nobody starts anything by hand."""
    how = {"module": "tests.clocked_trainer", "max_steps": 10**6}
    with trainers(tmp_path, 32, **how) as swarm:
        peers = swarm.all_begin(2)
        lost = peers[number]
        step_of(lost, after=3, group_size=2)
        lost.order(json.dumps({"clock": jump}))
        lost.wait_for(lambda e: words in e.get("text", ""))
        step_of(lost, after=last_step(lost) + 1, group_size=2)
        lost.order(json.dumps({"clock": 0.0}))
        step_of(lost, after=last_step(lost) + 1, group_size=2)
        for peer in peers:  # both do, or the true time would be an hour later for one of them
            peer.order(json.dumps({"sleep": 3600.0}))
        for peer in peers:
            peer.wait_for(lambda e: "slept for 1 h" in e.get("text", ""))
        step_of(lost, after=last_step(lost) + 1, group_size=2)
        assert NOBODY not in lost.said
