"""The demo door: what it says, draws and exits with at its end."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from PIL import Image

from tests.demo_story import epoch, started
from volunteer_kit.demo.eval import MAX_GAP, held_out_scenes
from volunteer_kit.demo.report import DemoResult, Picture, draw_curve, draw_grid, find_problems, summary
from volunteer_kit.demo.state import DemoState

KEYS = [
    "peers", "epochs", "samples", "loss_first", "loss_last", "colour_match", "caption_match", "caption_match_shuffled",
    "checker_accuracy", "killed_peer_recovered", "joined_late_in_sync", "max_param_gap", "loss_curve", "images",
]  # fmt: skip


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
