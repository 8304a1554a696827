"""The demo door: what it gathers from events, and what it shows meanwhile."""

from __future__ import annotations

import io

import pytest

from tests.demo_story import epoch, event, started, step
from volunteer_kit.demo.state import CurvePoint, DemoState, Mark, first_and_last_loss
from volunteer_kit.demo.view import LiveView, PlainView, clock, duration, swarm_line, table


class TestState:
    def test_every_sample_counts_once_and_over_all_lives(self, story):
        assert {name: v.samples for name, v in story.volunteers.items()} == {
            "volunteer 1": 646, "volunteer 2": 558, "volunteer 3": 76,
        }  # fmt: skip
        assert story.samples == 1280 and story.epoch == 5
        assert sum(story.share(v) for v in story.volunteers.values()) == pytest.approx(1)

    def test_loss_is_the_mean_over_samples_not_over_volunteers(self, story):
        assert [point.epoch for point in story.curve] == [1, 2, 3, 4, 5]
        assert story.curve[0].loss == pytest.approx((100 * 4.0 + 156 * 3.0) / 256)
        assert story.curve[3] == CurvePoint(4, 1.5, 256)

    def test_unknown_losses_and_idle_volunteers_do_not_disturb_the_curve(self):
        state = DemoState()
        for name in "ab":
            state.add(name)
            started(state, name)
        state.apply("a", epoch(1, 64, None, 1.0))
        state.apply("a", epoch(2, 64, 2.0, 2.0))
        state.apply("b", epoch(2, 0, 9.0, 2.0))
        assert state.curve == [CurvePoint(2, 2.0, 64)]
        assert first_and_last_loss(state.curve) == (2.0, 2.0)
        assert first_and_last_loss([]) == (None, None)

    def test_first_and_last_loss_are_a_few_epochs_weighted_by_samples(self):
        curve = [CurvePoint(n, float(n), 100 if n % 2 else 300) for n in range(1, 31)]
        first, last = first_and_last_loss(curve)
        assert first == pytest.approx((1 * 100 + 2 * 300 + 3 * 100) / 500)
        assert last == pytest.approx((28 * 300 + 29 * 100 + 30 * 300) / 700)

    def test_killed_volunteer_is_back_only_when_its_new_life_has_worked(self, story):
        killed = story.volunteers["volunteer 2"]
        assert killed.lives == 2 and killed.returned and killed.back_after == pytest.approx(8.0)
        assert killed.samples_of_life == 90
        assert story.marks == [
            Mark(3, "volunteer 2 killed"), Mark(5, "volunteer 2 back"), Mark(5, "volunteer 3 joined"),
        ]  # fmt: skip

    def test_work_of_the_killed_life_that_is_told_late_is_no_return(self):
        state = DemoState()
        state.add("a")
        started(state, "a")
        state.killed("a", 10.0)
        state.apply("a", epoch(1, 64, 2.0, 10.1))
        assert not state.volunteers["a"].returned
        state.apply("a", event("restarting", 10.2, message=""))
        started(state, "a", "checkpoint", 1)
        state.apply("a", epoch(2, 0, 2.0, 12.0))
        assert not state.volunteers["a"].returned

    def test_lost_parts_and_speed_of_the_swarm(self, story):
        assert story.lost_parts == 1
        story.apply("volunteer 1", step(5, speed=40.0))
        story.apply("volunteer 3", step(5, speed=20.0))
        assert story.samples_per_second == 60.0
        story.apply("volunteer 3", event("left", total_samples=76, epochs=1))
        assert story.samples_per_second == 40.0

    def test_skipped_records_are_those_of_the_volunteer_that_has_read_most(self):
        state = DemoState()
        for name in "ab":
            state.add(name)
            started(state, name)
        state.apply("a", event("skipped", counts={"nsfw": 2}))
        state.apply("a", event("skipped", counts={"nsfw": 3, "bad_image": 1}))
        started(state, "a", "checkpoint")
        state.apply("a", event("skipped", counts={"nsfw": 1}))  # a new life reads from the beginning
        state.apply("b", event("skipped", counts={"bad_image": 2}))
        assert state.skipped == {"nsfw": 3, "bad_image": 1}

    def test_warnings_name_volunteers_instead_of_peer_ids_and_come_once_a_kind(self, story):
        before = len(story.news)
        for epoch_number in (6, 7):
            message = f"Left out of epoch {epoch_number}: Qm sent a part that is not finite."
            story.apply("volunteer 1", event("warning", kind="refused", message=message))
        said = "Left out of epoch 6: volunteer 3 sent a part that is not finite."
        assert story.news[before:] == [f"volunteer 1 warns: {said}"]
        assert story.warnings == {"refused": 2}

    def test_the_first_error_is_kept_and_says_whose_it_is(self, story):
        story.apply("volunteer 3", event("error", kind="data", message="The shard is gone."))
        story.apply("volunteer 3", event("gave_up", exit_code=2, restarts=0, message="The shard is gone."))
        assert story.error == "volunteer 3 cannot go on: The shard is gone."

    def test_finished_means_everybody(self, story):
        for name in ("volunteer 1", "volunteer 2"):
            story.apply(name, event("finished", epoch=6, path="/x", total_samples=1))
        assert not story.all_finished
        story.apply("volunteer 3", event("finished", epoch=6, path="/x", total_samples=1))
        assert story.all_finished
        assert not DemoState().all_finished

    def test_what_happened_is_told_in_order_and_in_words(self, story):
        text = "\n".join(story.news)
        told = ("first epoch is applied", "killed with SIGKILL", "model of epoch 4", "back: 8 s", "from epoch 5 on")
        for words in told:
            assert words in text, words
        assert text.index("SIGKILL") < text.index("back: 8 s")


class TestView:
    def test_table_shows_every_column_in_words(self, story):
        console, text = recording_console()
        console.print(table(story, "trains", 83.0, 270.0))
        shown = text()
        for words in (
            "1:23 of 4:30", "epoch 5", "volunteer", "state", "samples/s", "share", "device", "training", "50%",
            "CPU, 1 thread", "the swarm", "killed with SIGKILL",
        ):  # fmt: skip
            assert words in shown, words
        assert max(len(line) for line in shown.splitlines()) <= 110

    def test_table_before_anything_is_known(self):
        state = DemoState()
        state.add("volunteer 1")
        console, text = recording_console()
        console.print(table(state, "start", 0.0, 60.0))
        assert "waiting to start" in text() and "nan" not in text()

    def test_live_view_draws_on_a_terminal(self, story):
        console, text = recording_console()
        view = LiveView(console)
        view.start()
        view.update(story, "trains", 5.0, 60.0)
        view.note("a line [that] stays")
        view.stop()
        assert "volunteer 3" in text() and "a line [that] stays" in text()

    def test_plain_lines_are_few_and_without_control_characters(self, story):
        out = io.StringIO()
        view = PlainView(out, every=1000.0)
        for _ in range(50):
            view.update(story, "training", 83.0, 270.0)
        lines = out.getvalue().splitlines()
        assert len(lines) == len(story.news) + 1
        assert lines[-1] == swarm_line(story, 83.0, 270.0)
        assert all(ord(letter) >= 32 for letter in "".join(lines))

    def test_clock(self):
        assert [clock(s) for s in (-1, 0, 59.9, 61, 3600)] == ["0:00", "0:00", "0:59", "1:01", "60:00"]
        assert [duration(s) for s in (30, 99, 125, 240.2)] == ["30 s", "99 s", "2 min 5 s", "4 min"]


def recording_console():
    from rich.console import Console

    out = io.StringIO()
    return Console(file=out, width=110, force_terminal=True, color_system=None), out.getvalue
