"""The demo door: what it gathers from events, what it measures, what it shows; at the end a real short demo."""

from __future__ import annotations

import io
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from volunteer_kit.checkpoint import load_checkpoint, save_checkpoint
from volunteer_kit.data.scenes import all_scenes, is_held_out
from volunteer_kit.demo.eval import (
    MAX_GAP,
    checker_accuracy,
    compare,
    derangement,
    held_out_scenes,
    largest_gap,
    reconstruction_error,
    score_scenes,
    tensor_gap,
)
from volunteer_kit.demo.report import DemoResult, Picture, draw_curve, draw_grid, find_problems, summary
from volunteer_kit.demo.state import CurvePoint, DemoState, Mark, first_and_last_loss
from volunteer_kit.demo.view import LiveView, PlainView, clock, duration, swarm_line, table

KEYS = [
    "peers", "epochs", "samples", "loss_first", "loss_last", "colour_match", "caption_match", "caption_match_shuffled",
    "checker_accuracy", "killed_peer_recovered", "joined_late_in_sync", "max_param_gap", "loss_curve", "images",
]  # fmt: skip


def event(event_name: str, time: float = 0.0, **fields) -> dict:
    return {"event": event_name, "time": time, **fields}


def epoch(number: int, samples: int, loss: float | None, time: float, received: float = 1.0) -> dict:
    return event(
        "epoch", time, epoch=number, samples=samples, total_samples=0, loss=loss, group_size=2, received=received,
        seconds=0.4, sent_bytes=1000,
    )  # fmt: skip


def step(number: int, loss: float = 3.0, speed: float = 50.0) -> dict:
    return event(
        "step", epoch=number, samples=16, samples_per_second=speed, loss=loss, num_peers=2, swarm_samples=96,
        target_batch_size=256,
    )  # fmt: skip


def started(state: DemoState, name: str, source: str = "new", at: int = 0) -> None:
    state.apply(name, event("starting", pid=1, name=name))
    state.apply(name, event("device", device="CPU", batch_size=16, precision="fp32", threads=1, why="2 cores"))
    state.apply(name, event("connected", peer_id="Qm", maddrs=[], client_mode=False))
    state.apply(name, event("state_loaded", epoch=at, source=source))


@pytest.fixture
def story() -> DemoState:
    """Two volunteers; the second is killed and returns, a third comes late."""
    state = DemoState()
    for name in ("volunteer 1", "volunteer 2"):
        state.add(name)
        started(state, name)
    for number in (1, 2, 3):
        state.apply("volunteer 1", step(number - 1))
        state.apply("volunteer 1", epoch(number, 100, 5.0 - number, 100.0 + 2 * number))
        state.apply("volunteer 2", epoch(number, 156, 4.0 - number, 100.1 + 2 * number))
    state.killed("volunteer 2", 107.0)
    state.apply("volunteer 2", event("restarting", 107.2, exit_code=-9, delay=1.0, restarts=1, message="killed"))
    state.apply("volunteer 1", epoch(4, 256, 1.5, 110.0, received=0.9))
    started(state, "volunteer 2", "peers", 4)
    state.add("volunteer 3", late=True)
    started(state, "volunteer 3", "peers", 4)
    state.apply("volunteer 1", epoch(5, 90, 1.2, 115.0))
    state.apply("volunteer 2", epoch(5, 90, 1.1, 115.0))
    state.apply("volunteer 3", epoch(5, 76, 1.3, 115.1))
    return state


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


class TestGap:
    def test_equal_bits_have_no_gap_whatever_they_are(self):
        for tensor in (torch.zeros(3), torch.randn(4, 5), torch.arange(5), torch.zeros(0)):
            assert tensor_gap(tensor, tensor.clone()) == 0

    def test_gap_is_relative_to_the_tensor_and_symmetric(self):
        a, b = torch.tensor([1.0, -4.0]), torch.tensor([1.0, -4.002])
        assert tensor_gap(a, b) == pytest.approx(0.002 / 4, rel=1e-3)
        assert tensor_gap(a, b) == tensor_gap(b, a)
        assert tensor_gap(1000 * a, 1000 * b) == pytest.approx(tensor_gap(a, b), rel=1e-4)

    def test_nothing_hides(self):
        one = torch.ones(3)
        assert tensor_gap(torch.zeros(3), one) == math.inf
        assert tensor_gap(one, torch.tensor([1.0, 1.0, math.nan])) == math.inf
        assert tensor_gap(one, torch.ones(4)) == math.inf
        assert tensor_gap(one, one.half()) == math.inf
        assert largest_gap({"a": one}, {"b": one}) == math.inf
        assert largest_gap({"a": one, "b": one}, {"a": one, "b": one + 1e-3}) == pytest.approx(1e-3, rel=1e-2)

    def checkpoints(self, folder: Path, *changes: dict, epochs=(7, 7, 7)):
        torch.manual_seed(0)
        base = {"w": torch.randn(8, 8), "optimizer/0/exp_avg": torch.randn(8, 8), "optimizer/0/step": torch.tensor(7)}
        saved = {}
        for number, (change, epoch) in enumerate(zip(changes, epochs, strict=False), 1):
            tensors = {name: tensor + change.get(name, 0) for name, tensor in base.items()}
            path = save_checkpoint(folder / str(number), tensors, {"epoch": epoch})
            saved[f"volunteer {number}"] = load_checkpoint(path)
        return saved

    def test_all_pairs_of_checkpoints_are_compared(self, tmp_path):
        saved = self.checkpoints(tmp_path, {}, {"w": 1e-3}, {})
        agreement = compare(saved, "volunteer 1", "volunteer 3")
        assert 1e-4 < agreement.max_param_gap < 1e-2
        assert agreement.late_gap == 0 and not agreement.is_close and not agreement.same_bytes

    def test_late_joiner_must_have_the_same_statistics(self, tmp_path):
        saved = self.checkpoints(tmp_path, {}, {}, {"optimizer/0/exp_avg": 0.01})
        agreement = compare(saved, "volunteer 1", "volunteer 3")
        assert agreement.max_param_gap == 0 and agreement.same_bytes
        assert agreement.late_gap > MAX_GAP

    def test_equal_models_of_different_epochs_do_not_agree(self, tmp_path):
        agreement = compare(self.checkpoints(tmp_path, {}, {}, epochs=(7, 8)), "volunteer 1", None)
        assert agreement.max_param_gap == 0 and agreement.late_gap is None and not agreement.is_close


class TestScenes:
    @pytest.mark.parametrize("level", [1, 2])
    def test_sixty_four_held_out_captions_with_as_few_repetitions_as_can_be(self, level):
        scenes = held_out_scenes(level)
        assert len(scenes) == 64 and all(is_held_out(scene) for scene in scenes)
        assert len(set(scenes)) == min(64, len(all_scenes(level, "held_out")))
        assert held_out_scenes(level) == scenes

    @pytest.mark.parametrize("level", [1, 2])
    def test_derangement_gives_everybody_another_caption_once(self, level):
        captions = [scene.caption for scene in held_out_scenes(level)]
        other = derangement(captions)
        assert sorted(other) == list(range(64))
        assert all(captions[i] != captions[j] for i, j in enumerate(other))

    def test_captions_that_are_all_the_same_cannot_be_exchanged(self):
        with pytest.raises(ValueError, match="cannot be exchanged"):
            derangement(["a"] * 4)

    def test_true_pictures_get_everything_right(self):
        scenes = held_out_scenes(1)
        scores = score_scenes(scenes, [scene.render() for scene in scenes], 1)
        assert scores.colour_match >= 0.98 and scores.caption_match >= 0.98
        assert scores.caption_match_shuffled == 0
        assert len(scores.checks) == 64

    def test_a_model_that_draws_one_picture_for_all_is_found_out(self):
        scenes = held_out_scenes(1)
        scores = score_scenes(scenes, [scenes[0].render()] * 64, 1)
        assert scores.caption_match <= 3 / 64 and scores.caption_match_shuffled <= 3 / 64
        assert score_scenes(scenes, [np.zeros((32, 32, 3), np.uint8)] * 64, 1).colour_match == 0

    @pytest.mark.parametrize("level", [1, 2])
    def test_checker_is_right_on_true_pictures(self, level):
        assert checker_accuracy(level) >= 0.98

    def test_reconstruction_error_is_a_root_mean_square(self):
        assert reconstruction_error(torch.zeros(2, 3, 4, 4), torch.full((2, 3, 4, 4), 0.25)) == pytest.approx(0.25)


def result(**changes) -> DemoResult:
    fields = dict(
        peers=3, epochs=5, samples=1280, loss_first=3.390625, loss_last=1.2, colour_match=0.9, caption_match=0.7,
        caption_match_shuffled=0.0, checker_accuracy=1.0, killed_peer_recovered=True, joined_late_in_sync=True,
        max_param_gap=0.0, loss_curve="a/loss.png", images="a/pictures.png",
    )  # fmt: skip
    return DemoResult(**{**fields, **changes})


class TestReport:
    def test_the_last_line_is_one_line_of_strict_json_with_the_issue_s_keys(self):
        line = result(max_param_gap=math.inf, skipped={"nsfw": 3}).json_line()
        fields = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert "\n" not in line
        assert list(fields)[: len(KEYS)] == KEYS
        assert fields["max_param_gap"] is None and fields["skipped"] == {"nsfw": 3}
        assert fields["loss_first"] == 3.3906 and fields["killed_peer_recovered"] is True

    def test_a_good_demo_has_no_problems(self, story):
        assert find_problems(story, recovered=True, in_sync=True, gap=0.0, max_gap=MAX_GAP) == []
        assert result().ok and result().exit_code == 0

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            (dict(recovered=False), "came back, but did not end"),
            (dict(epochs=(7, 8, 7)), "different epochs: 7, 8, 7"),
            (dict(in_sync=False), "late joiner"),
            (dict(gap=1e-4), "0.0001 of their size, more than 1e-05"),
            (dict(gap=None), "cannot be compared"),
            (dict(gap=math.nan), "parameters differ"),
        ],
    )
    def test_each_failure_is_named(self, story, settings, words):
        good = dict(recovered=True, in_sync=True, gap=0.0, max_gap=MAX_GAP)
        problems = find_problems(story, **{**good, **settings})
        assert len(problems) == 1 and words in problems[0]
        assert result(problems=tuple(problems)).exit_code == 1

    def test_a_loss_that_rises_or_is_not_there_is_a_failure(self, story):
        good = dict(recovered=True, in_sync=True, gap=0.0, max_gap=MAX_GAP)
        assert "no training" in find_problems(DemoState(), **good)[0]
        story.apply("volunteer 1", epoch(6, 2560, 9.0, 120.0))
        assert "did not fall" in find_problems(story, **good)[0]
        story.apply("volunteer 1", epoch(7, 2560, math.inf, 120.0))
        assert "not finite" in find_problems(story, **good)[0]

    def test_summary_tells_the_story_in_plain_words(self, story):
        text = "\n".join(summary(result(), story, seconds=95.0, level=1, same_bytes=True))
        told = ("3 volunteers", "95 s", "3.391", "back at work after 8 s", "came late", "bit by bit", "90%", "70%")
        for words in told:
            assert words in text, words
        assert "Problem" not in text
        text = "\n".join(summary(result(problems=("it broke",)), story, seconds=95.0, level=1, same_bytes=False))
        assert "Problem: it broke." in text and "bit by bit" not in text

    def test_a_late_joiner_that_was_too_late_is_named(self):
        state = DemoState()
        for name in "ab":
            state.add(name, late=name == "b")
            started(state, name)
        state.apply("a", epoch(1, 64, 3.0, 1.0))
        state.apply("a", epoch(2, 64, 2.0, 2.0))
        problems = find_problems(state, recovered=False, in_sync=False, gap=0.0, max_gap=MAX_GAP)
        assert len(problems) == 2 and "not ready before the training ended" in problems[1]
        assert "did not come back" in problems[0]

    def test_left_out_records_are_a_table_of_causes_largest_first(self, story):
        text = summary(result(skipped={"nsfw": 3, "bad_image": 1200}), story, seconds=9, level=None, same_bytes=True)
        rows = [line.split() for line in text if line.startswith(" ")]
        assert [row[:2] for row in rows if row[0][0].isdigit()][-2:] == [["1,200", "bad_image"], ["3", "nsfw"]]
        none = summary(result(skipped={}), story, seconds=9, level=None, same_bytes=True)
        assert "No record was left out of training." in none

    def test_curve_and_grid_are_pictures(self, story, tmp_path):
        curve = draw_curve(story.curve, story.marks, tmp_path / "loss.png", "demo")
        one = draw_curve(story.curve[:1], [], tmp_path / "one.png", "demo")
        pictures = [Picture(scene.render(), scene.caption, "as the caption says") for scene in held_out_scenes(1, 10)]
        grid = draw_grid(pictures, tmp_path / "grid.png", "drawn", columns=4)
        rows = draw_grid(pictures, tmp_path / "rows.png", "drawn", columns=4, rows_of=[("first", 6), ("second", 4)])
        for path in (curve, one, grid, rows):
            with Image.open(path) as image:
                assert image.format == "PNG" and min(image.size) > 200
        with Image.open(grid) as image:
            reds = np.asarray(image.convert("RGB")).reshape(-1, 3)
            assert len(np.unique(reds, axis=0)) > 20  # the scenes' own colours are in it


QUICK_RUN = """
run_id: quick
description: A smaller demo for the tests.
model:
  preset: tiny
  dim: 64
  depth: 2
  heads: 2
  num_text_tokens: {text}
  num_image_tokens: {codes}
image_tokenizer: scenes32
text_tokenizer: words
data: {data}
optimizer: {{lr: 5.0e-3, warmup_epochs: 2, total_epochs: 200}}
target_batch_size: 64
swarm: {{matchmaking_time: 1.0, allreduce_timeout: 6.0, averaging_timeout: 8.0, progress_expiration: 10.0,
         load_state_timeout: 30.0}}
"""


class RealDemo:
    """`volunteer-kit demo` in a process of its own; what it starts is found by a mark in the environment."""

    def __init__(self, folder: Path, *options: str, data: str = "{kind: scenes, level: 1}") -> None:
        from volunteer_kit.data.tokenizer import load_tokenizer
        from volunteer_kit.model.image_tokenizer import load_image_tokenizer

        text, codes = load_tokenizer("words").vocab_size, load_image_tokenizer("scenes32").config.num_codes
        self.out, run = folder / "out", folder / "quick.yaml"
        run.write_text(QUICK_RUN.format(text=text, codes=codes, data=data))
        self._mark = ("DEMO_TEST", secrets.token_hex(8))
        (folder / "tmp").mkdir()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "volunteer_kit.cli", "demo", "--run", str(run), "--out", str(self.out), *options],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=environment | dict([self._mark]),
        )  # fmt: skip

    def read_until(self, words: str) -> str:
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if words in line:
                return "".join(lines)
        pytest.fail(f"{words!r} was not said:\n{''.join(lines)}")

    def finish(self) -> tuple[int, str]:
        """-> exit code and the rest of the output."""
        said = self.process.communicate(timeout=280)[0]
        return self.process.returncode, said

    def left_behind(self) -> list[str]:
        """Processes of this demo that still live."""
        found, mark = [], "=".join(self._mark).encode()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes() and "Z" not in (entry / "stat").read_text().split()[2]:
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_real_demo_trains_recovers_and_leaves_nothing_behind(tmp_path):
    demo = RealDemo(tmp_path, "--peers", "2", "--minutes", "0.5")
    code, said = demo.finish()
    assert demo.left_behind() == []
    assert code == 0, said
    last = json.loads(said.splitlines()[-1])
    assert last["peers"] == 3 and last["epochs"] >= 3 and last["samples"] >= 64 * 3
    assert last["killed_peer_recovered"] is True and last["joined_late_in_sync"] is True
    assert 0 <= last["max_param_gap"] <= MAX_GAP
    assert last["loss_last"] < last["loss_first"]
    assert last["checker_accuracy"] >= 0.98 and last["caption_match_shuffled"] <= 0.1
    for path in (last["loss_curve"], last["images"]):
        with Image.open(path) as image:
            image.verify()
    saved = [load_checkpoint(path) for path in (demo.out / "model").iterdir()]
    assert [checkpoint.epoch for checkpoint in saved] == [last["epochs"]]
    assert list((tmp_path / "tmp").glob("volunteer-kit*")) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_in_good_order_and_keeps_the_model(tmp_path, number):
    demo = RealDemo(tmp_path, "--peers", "2", "--minutes", "5")
    demo.read_until("first epoch is applied")
    demo.process.send_signal(number)
    started = time.monotonic()
    code, said = demo.finish()
    assert time.monotonic() - started < 60
    assert code == 130 and demo.left_behind() == []
    assert "say goodbye" in said and "Traceback" not in said
    assert "is kept in" in said and list((demo.out / "model").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_volunteer_that_cannot_read_its_data_ends_the_demo_with_its_message(tmp_path):
    (tmp_path / "empty.tar").write_bytes(b"")
    data = f"{{kind: shards, shards: {tmp_path / 'empty.tar'}, patience: 5}}"
    demo = RealDemo(tmp_path, "--peers", "2", data=data)
    code, said = demo.finish()
    assert code == 2 and demo.left_behind() == []
    assert "cannot go on" in said and "empty.tar" in said and "Traceback" not in said
