"""How rounds went, as the monitor adds it up and the dashboard tells it."""

from __future__ import annotations

import json

import pytest
from hivemind.p2p import PeerID

from tests.dashboard_server import RUN
from tests.somebody import record_of
from volunteer_kit.dashboard.page import render, share
from volunteer_kit.dashboard.prometheus import exposition
from volunteer_kit.dashboard.state import build_state, empty_state, run_info
from volunteer_kit.journal import Journal, JournalReader
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.monitor.rounds import MORE, Rounds
from volunteer_kit.runs import load_run
from volunteer_kit.swarm.records.failures import CAUSES, RoundCounts

A, B = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in (1, 2))

# --- the monitor ---


def test_the_monitor_adds_up_what_comes_and_nothing_else(tmp_path):
    notes = Notes(tmp_path / "journal.sqlite")
    seen = Rounds(notes)

    def look(epoch: int, **told: RoundCounts | None) -> dict[str, int]:
        peers = {"a": A, "b": B}
        records = {peers[k]: record_of(peers[k], rounds=c and c.as_dict()) for k, c in told.items()}
        seen.look(records, [str(A), str(B)], epoch)
        return notes.do("rounds")

    assert look(1, a=RoundCounts(900, 800, {"incomplete": 9}), b=None) == {}  # before this monitor, or of an older kit
    once = {"rounds": 2, "complete_groups": 1, "incomplete": 1}
    assert look(3, a=RoundCounts(902, 801, {"incomplete": 10}), b=RoundCounts()) == once
    assert look(4, a=RoundCounts(902, 801, {"incomplete": 10})) == once
    both = {"rounds": 5, "complete_groups": 3, "incomplete": 2}
    assert look(6, a=RoundCounts(1, 0, {"incomplete": 1}), b=RoundCounts(2, 2)) == both  # a began anew
    assert look(7) == both, "who leaves takes nothing along"
    liar = RoundCounts(10**6, 0, {"incomplete": 10**6})
    assert look(8, b=liar) == {**both, "rounds": 5 + 2 + MORE, "incomplete": 2 + 2 + MORE}
    seen.look({B: record_of(B, rounds=RoundCounts(2 * 10**6).as_dict())}, [], 9)
    assert notes.do("rounds")["rounds"] == 7 + MORE, "whose account is not known says nothing"
    notes.close()


# --- the dashboard ---


def test_every_view_tells_them(tmp_path):
    run = run_info(load_run(RUN))
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.add_metrics(5.0, 5, 4.0, 10.0, 3, 0.5, 1280)
        journal.add_rounds(1990, 1980, {"incomplete": 4})
        journal.add_rounds(10, 5, {"incomplete": 2})
    with JournalReader(tmp_path / "journal.sqlite") as journal:
        state = build_state(journal, run, 6.0)
    failed = {"incomplete": 6}
    assert state["rounds"] == {"total": 2000, "complete_groups": 1985, "complete_share": 0.9925, "failed": failed}
    json.dumps(state, allow_nan=False)
    text = exposition(lambda: state).decode()
    assert 'volunteer_kit_rounds_failed_total{cause="incomplete"} 6.0' in text
    assert "volunteer_kit_rounds_total 2000.0" in text and "volunteer_kit_rounds_complete_groups_total 1985.0" in text
    page = render(state)
    assert "99.25 %" in page and "0.30 %" in page and CAUSES["incomplete"] in page


def test_a_journal_of_an_older_kit_has_none(tmp_path):
    run, path = run_info(load_run(RUN)), tmp_path / "journal.sqlite"
    with Journal(path) as journal, journal._writing() as db:
        db.execute("DROP TABLE rounds")
    with JournalReader(path) as journal:
        state = build_state(journal, run, 6.0)
    assert state["rounds"] == empty_state(run)["rounds"] and state["rounds"]["total"] == 0
    assert 'id="rounds"' not in render(state)
    with Journal(path) as journal:
        journal.add_rounds(1, 1, {})
        assert journal.rounds() == {"rounds": 1, "complete_groups": 1}


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 0, "–"), (5, 5, "100 %"), (0, 5, "0 %"), (99_999, 100_000, "99.99 %"), (1, 10**6, "0.01 %")],
)
def test_nearly_all_is_not_all(part, whole, text):
    assert share(part, whole) == text
