"""Real peers whose rounds carry a few values of many, and whose optimizers step between rounds."""

from __future__ import annotations

import json

import pytest

from tests.local_swarm import is_whole, local_swarm

NUMEL = 32 * 48 + 48 + 48 * 24 + 24  # of tests/swarm_peer.py's model


def losses(peer) -> list[float]:
    return [event["loss"] for event in peer.events if event["event"] == "epoch"]


def rounds_of(peer, members: int) -> list[dict]:
    return [e for e in peer.events if e["event"] == "epoch" and e["group_size"] == members and e["failure"] is None]


@pytest.mark.parametrize(
    "delayed", [pytest.param(False, marks=pytest.mark.slow), True], ids=["at once", "in the background"]
)
def test_sparse_rounds_keep_peers_equal_and_learning(tmp_path, delayed):
    settings = {
        "grad_codec": "sparse", "density": 1 / 8, "delay_grad_averaging": delayed, "delay_optimizer_step": delayed,
    }  # fmt: skip
    with local_swarm(tmp_path) as swarm:
        peers = [swarm.add(**settings, left_over=str(tmp_path / f"left-{n}.bin")) for n in range(3)]
        for peer in peers:
            peer.wait_epoch(8, group_size=3)
            peer.wait_whole()
        finished = swarm.finish(*peers)
    assert len({(e["epoch"], e["digest"]) for e in finished}) == 1
    notes = [json.loads((tmp_path / f"left-{n}.json").read_text()) for n in range(3)]
    ((numel, total),) = {(note["numel"], note["total"]) for note in notes}  # of the last round, the same for all
    assert numel == NUMEL and total > 0
    if not delayed:  # or the last round's samples are told of after the end
        steps = [e for peer in peers for e in peer.events if e["event"] == "epoch"]
        assert total == sum(e["samples"] for e in steps if e["epoch"] == finished[0]["epoch"])
    for peer in peers:
        whole = list(filter(is_whole, peer.events))
        assert all(e["received"] == 1.0 for e in whole)
        assert all(e["sent"] < 4 * NUMEL * 4 / 3 / 5 for e in whole)  # small tensors are fp16 here
        assert min(losses(peer)[-3:]) < losses(peer)[0]


@pytest.mark.parametrize(
    "delayed", [pytest.param(False, marks=pytest.mark.slow), True], ids=["at once", "in the background"]
)
def test_local_steps_with_a_peer_in_client_mode(tmp_path, delayed):
    """The public code refuses local updates in client mode; here it is a peer like any other."""
    settings = {
        "local_batch": 16, "grad_codec": "sparse", "density": 1 / 4,
        "delay_grad_averaging": delayed, "delay_optimizer_step": delayed,
    }  # fmt: skip
    with local_swarm(tmp_path) as swarm:
        peers = [swarm.add(**settings, client_mode=number == 2) for number in range(3)]
        for peer in peers:
            peer.wait_epoch(6, group_size=3)
        finished = swarm.finish(*peers)
    assert len({(e["epoch"], e["digest"]) for e in finished}) == 1
    for peer in peers:
        assert rounds_of(peer, 3)
        assert min(losses(peer)[-3:]) < losses(peer)[0]
