"""A running swarm at whose door strangers call every call there is; benchmarks/admission.py does it with five peers."""

from __future__ import annotations

import pytest

from benchmarks.admission_parts.cells import (
    ATTACKS,
    INCOMING,
    OUTGOING,
    Attackers,
    all_cells,
    attackers,
    try_incoming,
    try_outgoing,
)
from benchmarks.admission_parts.swarm import run


def test_who_shows_nothing_is_refused_at_every_call_and_by_every_call(tmp_path):
    with run(tmp_path, 2) as swarm:
        those = Attackers({name: swarm.add_stranger(name) for name in ("stranger", "friend")})
        those.tokens = {"no token": b"", "good": swarm.join("friend")}
        cells = [try_incoming(swarm, those, kind, attack) for kind in INCOMING for attack in ("no token", "good")]
        cells += [try_outgoing(swarm, those, kind, attack) for kind in OUTGOING for attack in ("no token", "good")]
        assert [cell for cell in cells if not cell.as_it_should] == []


@pytest.mark.slow
def test_every_attack_at_every_call(tmp_path):
    with run(tmp_path, 3) as swarm:
        cells = all_cells(swarm, attackers(swarm))
        assert [cell for cell in cells if not cell.as_it_should] == []
        assert len(cells) == (len(INCOMING) + len(OUTGOING)) * (len(ATTACKS) + 1)
