"""Quick Trainers compute a step together, and not each the whole of it."""

from __future__ import annotations

from collections import Counter
from statistics import median

import pytest

from tests.test_hf_failures import trainers

STEPS = 40
MEETING_STEPS = 8  # in which they have not heard of each other's progress yet


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("peers", "batch", "target"), [(2, 8, 8), (3, 8, 16), (4, 4, 16)])
def test_a_step_holds_the_target_however_quick_its_peers_are(tmp_path, peers, batch, target):
    """Where a batch is a step they take turns. A peer that stalls has its share computed by others, so on a busy
    machine some steps hold more; most do not."""
    with trainers(tmp_path, target, max_steps=STEPS, per_device_train_batch_size=batch) as swarm:
        members = swarm.all_begin(peers)
        held, brought = Counter(), Counter()
        for number, peer in enumerate(members):
            peer.wait_event("done", timeout=300.0)
            for step in (event for event in peer.events if event["event"] == "step"):
                held[step["epoch"]] += len(step["rows"])
                brought[number] += len(step["rows"])
    later = [samples for epoch, samples in held.items() if epoch > MEETING_STEPS]
    assert len(later) >= STEPS / 2
    assert median(later) <= 1.25 * target, sorted(held.items())
    assert min(brought[number] for number in range(peers)) >= target * STEPS / peers / 4, brought
