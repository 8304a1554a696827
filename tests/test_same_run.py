"""Whether those who are here train the same run, and what is said if not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from volunteer_kit.runs import PROTOCOL_VERSION, load_run
from volunteer_kit.session.same_run import check_same_run
from volunteer_kit.swarm.errors import SwarmError

RUN = load_run("demo")
OURS = SimpleNamespace(fingerprint=RUN.fingerprint, protocol=PROTOCOL_VERSION)
OTHER = SimpleNamespace(fingerprint="f" * 32, protocol=PROTOCOL_VERSION)
NEWER = SimpleNamespace(fingerprint="e" * 32, protocol=PROTOCOL_VERSION + 1)


@pytest.mark.parametrize(
    ("records", "was_here", "outcome"),
    [
        ([], False, None),
        ([OURS], False, None),
        ([OTHER, NEWER, OURS], False, None),  # one of ours is enough
        ([OTHER], False, "wrong_run"),
        ([NEWER], False, "outdated"),
        ([NEWER, NEWER], False, "outdated"),
        ([OTHER, NEWER], False, "wrong_run"),
        ([OTHER, OTHER], True, "warning"),  # back from an outage, before the others are
        ([NEWER], True, "warning"),
    ],
)
def test_peers_of_another_run_are_told_and_send_nobody_away_who_was_here(records, was_here, outcome):
    if outcome in (None, "warning"):
        told = check_same_run(RUN, records, was_here=was_here)
        assert told is None if outcome is None else RUN.run_id in told
    else:
        with pytest.raises(SwarmError) as caught:
            check_same_run(RUN, records, was_here=was_here)
        assert caught.value.kind == outcome
