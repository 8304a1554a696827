"""Settings that are found while it trains: the loop does as the tuner wants, and tells it how that went."""

from __future__ import annotations

from tests.alone_trainer import hungry, make_trainer, squared_error, until
from volunteer_kit.device import Setting, Tuner, search
from volunteer_kit.training.tuning import Chosen, Tuning


class Script:
    """A tuner that wants one setting after the other, each for two microbatches, and the last for good."""

    why = "as the script says"

    def __init__(self, *settings: tuple[int, bool]):
        self.left = [setting for setting in settings[:-1] for _ in range(2)] + [settings[-1]]
        self.told: list[tuple] = []

    @property
    def settled(self) -> bool:
        return len(self.left) == 1

    def next(self):
        return Chosen(*self.left[0])

    def measured(self, setting, samples, seconds, peak_bytes, limit_bytes, idle_bytes):
        self.told.append((*setting, samples, peak_bytes, limit_bytes, idle_bytes))
        self.left.pop(0)

    def out_of_memory(self, setting):
        self.told.append((*setting, "out of memory"))
        self.left = [(setting.batch_size - 1, setting.checkpointing)]


class Counter:
    """Memory of which one more byte is taken each time that somebody looks."""

    def __init__(self):
        self.begun = self.looks = 0

    def begin(self):
        self.begun += 1

    def peak_bytes(self):
        self.looks += 1
        return self.looks

    def limit_bytes(self):
        return 1000


def test_each_microbatch_is_as_the_tuner_wants_it_and_it_is_told_how_that_went():
    told, tuner, memory = [], Script((2, False), (3, True), (5, False)), Counter()
    tuning = Tuning(tuner, memory, on_plan=lambda setting, why: told.append((*setting, why)))
    seen = []

    def compute_loss(model, batch):
        seen.append((len(batch.text), model.checkpointing))
        return squared_error(model, batch)

    trainer, _ = make_trainer(compute_loss, tuning=tuning, target=22)
    trainer.model.checkpointing = False
    trainer.train(until(trainer, 1))
    assert seen == [(2, False)] * 3 + [(3, True)] * 2 + [(5, False)] * 2
    assert [entry[:3] for entry in tuner.told] == [(2, False, 2)] * 2 + [(3, True, 3)] * 2, "it has settled: no more"
    assert [entry[3:] for entry in tuner.told] == [(2, 1000, 1), (3, 1000, 1), (5, 1000, 4), (6, 1000, 4)]
    assert memory.begun == 2 and told == [(5, False, "as the script says")]


def test_the_kits_tuner_in_the_loop_loses_one_microbatch_at_most(monkeypatch):
    for name in ("BLOCK", "DUEL", "FINAL"):
        monkeypatch.setattr(search, name, 0.05)  # s; how good the choice is, test_tuner.py looks at
    told = []
    tuner = Tuner(Setting(8), largest=512, estimate=lambda setting: setting.batch_size, limit_bytes=1e9)
    tuning = Tuning(tuner, Counter(), on_plan=lambda *plan: told.append(plan))
    trainer, optimizer = make_trainer(hungry(100), tuning=tuning, target=10**9)
    trainer.model.checkpointing = False
    trainer.train(lambda: tuner.settled)
    assert trainer.microbatches_too_large == tuner.ooms <= 1 and trainer.batch_size <= 100
    assert told == [(trainer.tuning.setting, tuner.why)]
    assert {word[1] for word in optimizer.story if word[0] == "step"} > {8, 16}


def test_steps_that_wait_for_others_are_not_measured():
    """Averaging leaves a report; a download in the middle, or an outage, none. One of 40 s would settle the tuner."""
    tuner = Script((4, False), (4, True), (4, False))
    trainer, optimizer = make_trainer(tuning=Tuning(tuner, Counter()), target=8)  # every second one ends an epoch
    trainer.train(until(trainer, 3))
    assert len(tuner.told) == 2, "not the very first one either: it pays for what is loaded once"
    speed, step = trainer.samples_per_second, optimizer.step

    def waits(*arguments, **named):
        taken = step(*arguments, **named)
        optimizer.only_accumulated = False
        return taken

    optimizer.step, optimizer.target = waits, 16
    trainer.train(until(trainer, 4))
    assert len(tuner.told) == 2 and trainer.samples_per_second == speed


def test_hours_later_memory_runs_out_and_the_plan_changes():
    told, tuner = [], Script((8, False))
    tuning = Tuning(tuner, Counter(), on_plan=lambda setting, why: told.append(setting))
    trainer, optimizer = make_trainer(hungry(6), tuning=tuning, target=6)
    trainer.train(until(trainer, 1))
    assert tuner.told == [(8, False, "out of memory"), (7, False, "out of memory")]
    assert [word[1] for word in optimizer.story if word[0] == "step"] == [6] and trainer.batch_size == 6
    assert told == [(8, False), (7, False), (6, False)]
