"""Counted samples stay counted: those of a branch that may lose wait."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from volunteer_kit.home import Home
from volunteer_kit.session.tally import Tally
from volunteer_kit.swarm.options import StepReport


class Machine:
    """A volunteer's tally, and what it told."""

    def __init__(self, folder):
        self._folder, self.told = folder, []
        self.restart()

    def restart(self) -> None:
        reading = SimpleNamespace(applied=lambda report: report.samples)
        self.tally = Tally(reading, Home(self._folder), lambda event, **fields: self.told.append((event, fields)))

    def step(self, samples: int, openings: tuple[str, ...] = (), unconfirmed: bool = False) -> int:
        report = StepReport(1, samples, 2, 1.0, 0.1, 0, 0, openings=openings, is_unconfirmed=unconfirmed)
        return self.tally.count(report)

    @property
    def shown(self) -> tuple[int, int, int]:
        """Samples, steps and waiting samples, as they were told last."""
        totals = [fields for event, fields in self.told if event == "totals"][-1]
        return totals["samples"], totals["epochs"], totals["waiting"]

    @property
    def warnings(self) -> list[str]:
        return [fields["message"] for event, fields in self.told if event == "warning"]


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    assert machine.step(100) == 100 and machine.shown == (100, 1, 0)
    for waiting in (16, 32):
        assert machine.step(16, ("one",), True) == 0
        assert machine.shown == (100, 1, waiting)
    return machine


def test_samples_of_a_branch_count_once_it_is_confirmed(machine):
    assert machine.step(8, ("one",)) == 40
    assert machine.shown == (140, 4, 0) and not machine.warnings
    assert machine.tally.samples == 140


def test_samples_of_a_branch_that_lost_never_counted(machine):
    assert machine.step(8) == 8
    assert machine.shown == (108, 2, 0)
    assert len(machine.warnings) == 1 and machine.warnings[0].startswith("32 samples that this machine trained on")


@pytest.mark.parametrize("openings", [("one",), ()])
def test_a_restart_forgets_nothing_that_waits(machine, openings):
    machine.restart()
    assert machine.step(0, openings) == (32 if openings else 0)
    assert machine.shown == ((132, 3, 0) if openings else (100, 1, 0))


def test_a_branch_behind_another_counts_and_falls_with_the_first(machine):
    assert machine.step(4, ("one", "two"), True) == 0
    assert machine.shown == (100, 1, 36)
    assert machine.step(0, ("one", "two")) == 36


def test_of_two_branches_behind_one_opening_only_that_which_won_counts(machine):
    assert machine.step(4, ("one", "lost"), True) == 0
    assert machine.step(2, ("one", "won")) == 34
    assert machine.shown == (134, 4, 0) and machine.warnings[0].startswith("4 samples that this machine trained on")


def test_one_branch_may_be_lost_and_another_begun(machine):
    assert machine.step(4, ("other",), True) == 0
    assert machine.shown == (100, 1, 4) and len(machine.warnings) == 1


def test_totals_of_an_older_kit_are_read(tmp_path):
    (tmp_path / "totals.json").write_text(json.dumps({"samples": 7, "epochs": 2, "seconds": 3.5}))
    machine = Machine(tmp_path)
    assert machine.step(1) == 1 and machine.shown == (8, 3, 0)
