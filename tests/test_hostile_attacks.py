"""benchmarks/hostile.py: its table of attacks, what they send, and what it counts. The attacks themselves take minutes
and are the benchmark's."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from benchmarks.hostile_parts.attack import LINK, MACHINE, MEMBER, OPEN, STRANGER, Outcome
from benchmarks.hostile_parts.links import Watched
from benchmarks.hostile_parts.report import BOUNDS, figures, harm
from benchmarks.hostile_parts.table import ATTACKS, by_name, rows

CASES = {STRANGER, MEMBER, OPEN, LINK, MACHINE}


def test_the_table_has_all_kinds_of_attacks():
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names) >= 25
    assert {attack.point for attack in ATTACKS} == set(range(1, 9))
    assert {case for attack in ATTACKS for case in attack.cases} == CASES


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_names_its_surface_and_has_a_limit(attack):
    assert attack.surface and attack.cases and set(attack.cases) <= CASES
    assert 0 < attack.seconds <= 60 and callable(attack.perform)


def test_rows_are_chosen_by_run_and_name():
    every = [row for run in ("link", "hosted", "open") for row in rows(run)]
    assert len(every) == sum(len(attack.cases) for attack in ATTACKS)
    assert all(case.run == "open" for _, case in rows("open"))
    assert {attack.name for attack, _ in rows("hosted", ["dht-nested"])} == {
        name for name in (attack.name for attack in ATTACKS) if name.startswith("dht-nested")
    }
    quick = [row for run in ("link", "hosted", "open") for row in rows(run, quick=True)]
    assert 0 < len(quick) < len(every) / 2


def test_nested_words_are_what_they_say():
    """Few levels of them, which hivemind's own serializer reads. In this process another test may have bounded it."""
    code = (
        "from hivemind.dht.storage import DictionaryDHTValue; from hivemind.utils import MSGPackSerializer\n"
        "from benchmarks.hostile_parts import messages\n"
        "assert MSGPackSerializer.loads(messages.nested_word(2)) == (((),),)\n"
        "found = MSGPackSerializer.loads(messages.nested_dictionary(1))\n"
        "assert isinstance(found, DictionaryDHTValue) and [subkey for subkey, _ in found.items()] == [((),)]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_opened_files_are_seen(tmp_path):
    (tmp_path / "mine").write_text("x")
    watched = Watched(tmp_path)
    try:
        assert watched.opened() == []
        list(tmp_path.iterdir())
        assert watched.opened() == []
        thread = threading.Thread(target=(tmp_path / "mine").read_bytes)
        thread.start()
        thread.join()
        assert watched.opened() == ["mine"]
    finally:
        watched.close()


def test_figures_count_harm():
    quiet = {"pause": 0.5}
    attack = by_name("dht-nested-values")
    good = Outcome(attack, MEMBER, pause=1.5, memory=20.0, peak=90.0)
    told = figures([good], quiet)
    assert all(told[key] <= bound for key, bound in BOUNDS.items() if key in told) and not harm(good)
    assert told["worst_pause_s"] == 1.0 and told["memory_growth_mb"] == 20 and told["memory_peak_mb"] == 90

    killed = Outcome(attack, OPEN, died=["volunteer 1: DHT", "volunteer 1: p2pd", "monitor: DHT"])
    stuck = Outcome(attack, OPEN, stuck=["volunteer 1", "volunteer 2"], run_stopped=True, pause=4.0)
    read = Outcome(by_name("link-local-folder"), LINK, files=["photos.tar"], code=["the mark was written"])
    back = Outcome(by_name("kill-dht"), MACHINE, recovery=12.0, died=["volunteer 1: DHT"])
    told = figures([good, killed, stuck, read, back], quiet)
    assert told["attacks"] == 5 and told["peers_stopped"] == 4 and told["runs_stopped"] == 1
    assert told["worst_pause_s"] == 3.5 and told["worst_recovery_s"] == 12.0
    assert told["local_files_read"] == told["code_run"] == 1
    assert all(harm(outcome) for outcome in (killed, stuck, read))
