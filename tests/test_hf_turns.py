"""Quick Trainers compute a step together, and not each the whole of it."""

from __future__ import annotations

from statistics import median

import pytest

from tests.test_hf_failures import trainers

STEPS = 30
PAUSE = 0.4  # s of a batch: steps of milliseconds would be over before the second peer has compiled its first one
LEAST = 8  # steps that all are in


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("peers", "batch", "target"), [(2, 8, 8), (4, 4, 16)])
def test_a_step_holds_the_target_however_quick_its_peers_are(tmp_path, peers, batch, target):
    """Where a batch is a step they take turns. A peer that stalls has its share computed by others, so on a busy
    machine some steps hold more; most do not."""
    with trainers(tmp_path, target, max_steps=STEPS, per_device_train_batch_size=batch) as swarm:
        members = [swarm.load() for _ in range(peers)]
        for number, peer in enumerate(members):
            swarm.begin(peer, number, wait_for=peers, pause=PAUSE)
        brought = []  # of each peer: epoch -> samples
        for peer in members:
            peer.wait_event("done", timeout=300.0)
            steps = [event for event in peer.events if event["event"] == "step" and event["rows"]]
            brought.append({step["epoch"]: len(step["rows"]) for step in steps})
    begin = max(min(epochs) for epochs in brought)  # from here on all are in
    later = [sum(epochs.get(epoch, 0) for epochs in brought) for epoch in range(begin, STEPS)]
    later = [samples for samples in later if samples]
    assert len(later) >= LEAST
    assert median(later) <= 1.25 * target, later
    for epochs in brought:
        own = sum(samples for epoch, samples in epochs.items() if epoch >= begin)
        assert own >= target * len(later) / peers / 4, brought
