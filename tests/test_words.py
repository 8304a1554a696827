"""What a volunteer reads, sentence by sentence: numbers for people, headlines, facts, ways out."""

from __future__ import annotations

import math

import pytest

from volunteer_kit.widgets import words
from volunteer_kit.widgets.progress import Progress
from volunteer_kit.widgets.terms import Terms

NOW = 1_800_000_000.0
PNG = b"\x89PNG\r\n\x1a\nrest"


def training(**values) -> Progress:
    known = dict(
        run_id="demo", state="training", started=NOW - 7600, updated=NOW, my_samples=12345, my_epochs=212, share=0.034,
        rank=3, volunteers=41, samples_per_second=1.25, swarm_samples_per_second=29.1, epoch=1040, total_epochs=31250,
        swarm_samples=3021, target_batch_size=4096, seconds_to_step=37.0, bytes_sent=3.2e9, bytes_received=4.1e9,
        loss=[(1, 7.1), (500, 5.0), (1040, 4.417)], device="Tesla T4", plan="batches of 8, fp16", why="no bf16",
    )  # fmt: skip
    return Progress(**{**known, **values})


@pytest.mark.parametrize(
    "function, value, says",
    [
        (words.number, 1234, "1,234"), (words.number, 1234.6, "1,235"), (words.number, 12.34, "12.3"),
        (words.number, 0.274, "0.27"), (words.number, 0, "0"), (words.number, None, "–"), (words.number, math.nan, "–"),
        (words.number, math.inf, "–"), (words.size, 640, "640 B"), (words.size, 12_400, "12 kB"),
        (words.size, 3.21e9, "3.2 GB"), (words.size, 1.5e12, "1.5 TB"), (words.size, None, "–"),
        (words.duration, 8.4, "8 s"), (words.duration, 89, "89 s"), (words.duration, 118, "2 min"),
        (words.duration, 4800, "1 h 20 min"), (words.duration, 7200, "2 h"), (words.duration, 100 * 3600, "4 d 4 h"),
        (words.duration, -3, "0 s"), (words.duration, math.inf, "–"), (words.percent, 0.43, "43 %"),
        (words.percent, 0.034, "3.4 %"), (words.percent, 0.00001, "< 0.1 %"), (words.percent, 0.9999, "99 %"),
        (words.percent, 1.0, "100 %"), (words.percent, 0, "0 %"), (words.percent, None, "–"),
        (words.ordinal, 1, "1st"), (words.ordinal, 2, "2nd"), (words.ordinal, 3, "3rd"), (words.ordinal, 11, "11th"),
        (words.ordinal, 112, "112th"), (words.ordinal, 1021, "1,021st"),
    ],
)  # fmt: skip
def test_numbers_for_people(function, value, says):
    assert function(value) == says


@pytest.mark.parametrize(
    "values, says",
    [
        ({}, "Training, 3rd of 41 volunteers, your samples are in"),
        ({"my_samples": 0}, "Training, 3rd of 41 volunteers"),
        ({"my_waiting": 1024}, "Training, 3rd of 41 volunteers, 1,024 samples of yours wait for the others"),
        ({"rank": None, "volunteers": 1}, "Training, 1 volunteer here, your samples are in"),
        ({"state": "downloading", "downloaded": 0.43, "seconds_left": 118},
         "Downloading the model: 43 %, about 2 min left"),
        ({"state": "downloading", "detail": "43 %, about 2 min left"}, "Downloading the model: 43 %, about 2 min left"),
        ({"state": "downloading"}, "Downloading the model"),
        ({"state": "reconnecting", "detail": "in 8 s"}, "Connection lost, trying again in 8 s"),
        ({"state": "restarting", "detail": "in 8 s"}, "The training program broke off and starts again in 8 s"),
        ({"state": "reconnecting", "detail": "the worker ended"}, "Connection lost, trying again: the worker ended"),
        ({"state": "averaging", "detail": "5 s"}, "Averaging with the others: 5 s"),
        ({"state": "connecting"}, "Connecting to the other volunteers"),
        ({"state": "paused"}, "Paused"),
        ({"state": "failed", "detail": "no disk left"}, "Stopped: no disk left"),
    ],
)  # fmt: skip
def test_headlines(values, says):
    assert words.headline(training(**values)) == says


def test_every_state_has_its_words():
    for table in (words.TONES, words.HEADLINES, words.MEANINGS):
        assert set(table) == set(words.State.__args__)


def test_the_last_word_stands_when_it_is_over():
    assert words.meaning(training(state="failed", message="1. Free some disk")) == "1. Free some disk"
    assert words.meaning(training(message="not yet")) == words.MEANINGS["training"]
    first, second = words.summary(training(state="left"))
    assert "Thank you" in first and "12,345 samples of yours in 212 steps, 3.4 %" in second


def test_what_else_there_is_to_know_of_a_stay():
    assert words.stay(training(name="ann", checkpoint="/c/7")) == "as ann, 2 h 7 min here; newest checkpoint: /c/7"
    assert "other window" in words.stay(training(is_elsewhere=True))
    assert "other window" not in words.stay(training(is_elsewhere=True, state="left"))


def test_nothing_is_promised_that_is_not_kept():
    said = " ".join([*words.MEANINGS.values(), *(text for _, text in Terms("demo").points())])
    assert "handed over;" in words.MEANINGS["leaving"] and "not handed over" in said and "nothing is lost" not in said


@pytest.mark.parametrize(
    "values, says",
    [
        ({}, "3.4 % of the swarm's"),
        ({"my_samples": 0, "my_epochs": 0}, "none counted yet"),
        ({"share": None}, "in 212 steps"),
    ],
)
def test_what_is_said_of_your_samples(values, says):
    assert words.facts(training(**values))[0].note == says


def test_what_is_not_known_is_not_invented():
    empty = {fact.label: fact.value for fact in words.facts(Progress())}
    assert empty["Your place"] == empty["The swarm"] == empty["Global step"] == words.NOT_YET
    assert words.step_line(Progress()) == "Next step: not known yet" and words.step_share(Progress()) == 0
    assert words.loss_line(Progress(loss=[(1, math.nan)])) == "Loss: not known yet"


def test_steps_bars_and_warnings():
    text = "Next step: 3,021 of 4,096 samples collected together, about 37 s left"
    assert words.step_line(training()) == text and words.bar(training()) == (text, 3021 / 4096)
    assert words.step_share(training(swarm_samples=9999)) == 1
    label, share = words.bar(training(state="downloading", downloaded=None))
    assert "asking who has it" in label and share is None
    shown = words.warnings(training(warnings=[(NOW - 60, "old"), (NOW - 1, "new")]))
    assert shown == ["new (just now)", "old (60 s ago)"]


def test_text_of_others_is_one_line_without_controls():
    assert words.plain("a\n b\tc\x1b[0m\x00\u202ed") == "a b c[0md"
    assert len(words.plain("x" * 9999)) == words.LONGEST
