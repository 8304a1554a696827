"""Real peers whose rounds carry a few values of many, and whose optimizers step between rounds."""

from __future__ import annotations

import json

import pytest

from tests.local_swarm import local_swarm

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
        finished = swarm.finish(*peers)
    assert len({(e["epoch"], e["digest"]) for e in finished}) == 1
    for peer in peers:
        whole = rounds_of(peer, 3)[-2:]  # in its first one a newcomer may be behind
        assert len(whole) == 2 and all(e["received"] == 1.0 and not e["refused"] for e in whole)
        assert all(e["sent"] < 4 * NUMEL * 4 / 3 / 5 for e in whole)  # small tensors are fp16 here
        assert min(losses(peer)[-3:]) < losses(peer)[0]
        note = json.loads((tmp_path / f"left-{peers.index(peer)}.json").read_text())
        assert note["numel"] == NUMEL and note["total"] >= 256


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
