"""What a worker does beside its loop: when it begins afresh, and what it draws."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from PIL import Image

from volunteer_kit.home import Home
from volunteer_kit.runs import build_model, load_run
from volunteer_kit.session import pictures as pictures_module
from volunteer_kit.session.lookout import memory_gb, should_renew
from volunteer_kit.session.pictures import KEPT, DrawPictures

ROOMY, TIGHT = SimpleNamespace(total=16e9, available=8e9), SimpleNamespace(total=16e9, available=1e9)
HOUR = 3600.0


@pytest.mark.parametrize(
    ("held", "settled", "machine", "age", "renews"),
    [
        (2.0, 2.0, ROOMY, HOUR, False),
        (3.4, 2.0, ROOMY, HOUR, False),  # half as much again, and half a GB, are allowed
        (3.6, 2.0, ROOMY, HOUR, True),
        (3.6, 2.0, ROOMY, 600, False),  # so soon it is not growth
        (3.6, None, ROOMY, HOUR, False),
        (2.5, 2.0, TIGHT, HOUR, True),  # where memory is short, less growth is too much
        (2.2, 2.0, TIGHT, HOUR, False),  # and others have taken it
        (0.4, 0.2, ROOMY, HOUR, False),
    ],
)
def test_when_a_worker_begins_afresh(held, settled, machine, age, renews):
    assert should_renew(held, settled, machine, age) is renews


def test_memory_is_measured():
    assert 0.01 < memory_gb() < 20


def test_the_runs_captions_are_drawn_and_old_pictures_go(tmp_path):
    run, told = load_run("demo"), []
    draw = DrawPictures(run, Home(tmp_path), lambda event, **fields: told.append((event, fields)))
    model = build_model(run)
    model.train()
    for epoch in range(1, 9):
        draw.draw(model, epoch)
    assert [event for event, _ in told] == ["pictures"] * 8 and model.training
    shown = told[-1][1]["pictures"]
    assert [one["caption"] for one in shown] == [*run.captions]
    assert Image.open(shown[0]["path"]).size == (32, 32)
    assert len(list(tmp_path.rglob("*.png"))) == KEPT


def test_drawing_takes_its_share_of_the_time_and_no_more(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(pictures_module.time, "monotonic", lambda: clock.now)
    run, drawn = load_run("demo"), []
    draw = DrawPictures(run, Home(tmp_path), lambda *_, **__: None)

    def slowly(model):
        drawn.append(clock.now)
        clock.now += 2.0
        return model

    monkeypatch.setattr(draw, "_pixels", slowly)
    monkeypatch.setattr(draw, "_write", lambda pixels, epoch: [tmp_path] * len(run.captions))
    trainer, report = SimpleNamespace(model=None), SimpleNamespace(epoch=1)
    while clock.now < 1000:
        draw.on_epoch(trainer, report, None)
        clock.now += 1
    assert 9 <= len(drawn) <= 11 and 2.0 * len(drawn) <= 0.03 * clock.now


def test_a_run_without_captions_and_a_machine_without_a_folder_draw_nothing(tmp_path):
    told = []
    run = load_run("demo")
    for one in (
        DrawPictures(run, None, told.append),
        DrawPictures(run.model_copy(update={"captions": ()}), Home(tmp_path), told.append),
    ):
        one.draw(None, 1)
    assert told == [] and list(tmp_path.iterdir()) == []


def test_what_goes_wrong_with_drawing_is_told_once_and_training_goes_on(tmp_path):
    told = []
    draw = DrawPictures(load_run("demo"), Home(tmp_path), lambda event, **fields: told.append(event))
    (tmp_path / "pictures").write_text("in the way")
    model = build_model(load_run("demo"))
    draw.draw(model, 1)
    draw.draw(model, 2)
    assert told == ["warning"]
