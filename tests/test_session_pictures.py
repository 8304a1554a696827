"""What a worker draws while it trains, and when."""

from __future__ import annotations

from types import SimpleNamespace

from PIL import Image

from volunteer_kit.home import Home
from volunteer_kit.runs import build_model, load_run
from volunteer_kit.session import pictures as pictures_module
from volunteer_kit.session.pictures import KEPT, DrawPictures


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
    monkeypatch.setattr(pictures_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
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
