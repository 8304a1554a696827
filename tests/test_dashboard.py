"""The dashboard's one dict and what is made of it: page, sentences, an export, the command."""

from __future__ import annotations

import json
import time

import pytest
import typer
from typer.testing import CliRunner

from tests.dashboard_server import RUN
from tests.fake_journal import NOW, fill, hostile_journal
from volunteer_kit.cli_dashboard import add_verbs
from volunteer_kit.dashboard import DashboardError, export_page
from volunteer_kit.dashboard.happenings import Names, sentence, told
from volunteer_kit.dashboard.page import facts, headline, large, render
from volunteer_kit.dashboard.state import SILENT_AFTER, build_state, empty_state, profile_of, run_info
from volunteer_kit.journal import Journal, JournalReader
from volunteer_kit.runs import load_run


@pytest.fixture(scope="module")
def run():
    return run_info(load_run("demo"))


def state_of(folder, run, now=NOW):
    with JournalReader(folder / "journal.sqlite") as reader:
        return build_state(reader, run, now)


# --- the dict ---


def test_the_dict_of_a_run_with_many(tmp_path, run):
    state = state_of(fill(tmp_path, "many", NOW), run)
    assert {"run", "now", "history", "leaderboard", "images", "events"} <= state.keys()
    assert state["run"]["run_id"] == "demo" and state["run"]["status"] == "finished"  # the demo has 560 steps
    assert {"time", "epoch", "loss", "samples_per_second", "volunteers", "progress"} <= state["now"].keys()
    assert 300 < len(state["history"]) <= 500
    assert state["history"][-1]["time"] == state["now"]["time"]
    first = state["leaderboard"][0]
    assert {"rank", "name", "samples", "share", "hours", "machines", "here", "provisional"} <= first.keys()
    assert first["name"] == "ada" and first["here"] is True
    assert sum(leader["share"] for leader in state["leaderboard"]) == pytest.approx(1)
    assert [image["epoch"] for image in state["images"][:5]] == [7600] * 4 + [7450]
    assert "mallory was banned: sends noise" in [event["text"] for event in state["events"]]
    json.dumps(state, allow_nan=False)


def test_two_thousand_volunteers_are_a_hundred_and_a_number(tmp_path, run):
    state = state_of(fill(tmp_path, "crowd", NOW), run)
    assert len(state["leaderboard"]) == 100 and state["accounts"] == 2000
    assert sum(leader["share"] for leader in state["leaderboard"]) < 1
    assert "and 1,900 more" in render(state)


def test_no_peer_id_is_in_any_view(tmp_path, run):
    state = state_of(fill(tmp_path, "many", NOW), run)
    assert "Qm0" not in json.dumps(state) and "Qm0" not in render(state)


@pytest.mark.parametrize(
    ("epoch", "volunteers", "age", "title"),
    [
        (5, 2, 1, "Training"),
        (5, 0, 1, "Nobody is training at the moment"),
        (5, 2, SILENT_AFTER + 1, "No news from the monitor"),
        (560, 2, SILENT_AFTER + 1, "The run is finished"),
    ],
)
def test_the_headline_says_how_it_stands(tmp_path, run, epoch, volunteers, age, title):
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.add_metrics(NOW - age, epoch, 4.0, 10.0, volunteers, 0.5, 1280)
    assert headline(state_of(tmp_path, run))[1] == title


def test_before_anything_is_known_every_view_works(run):
    state = empty_state(run)
    assert headline(state)[1] == "Waiting for the first report"
    assert [fact.value for fact in facts(state)] == ["–"] * 5
    assert "Nobody has given samples yet" in render(state)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (31250, "31,250"), (3_120_000, "3.1 million"), (4e8, "400 million"), (2.4e9, "2.4 billion")],
)
def test_large_numbers_are_read_at_a_glance(value, text):
    assert large(value) == text


# --- events in words ---


def event(kind, text="", time=NOW, **detail):
    return {"kind": kind, "text": text, "time": time, "detail": detail}


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (event("joined", username="ada", device="Tesla T4"), "ada joined with Tesla T4"),
        (event("joined"), "A volunteer joined"),
        (event("left", username="Bob"), "A volunteer left"),
        (event("banned", username="mallory", reason="noise"), "mallory was banned: noise"),
        (
            event("banned", username="mallory", reason="Bob and bobby saw it, bob."),
            "mallory was banned: a volunteer and bobby saw it, a volunteer.",
        ),
        (event("rollback", to_epoch=6090), "The model went back to its checkpoint of step 6,090"),
        (event("warning", "{username} and {by} disagree", username="ada", by="bob"), "ada and a volunteer disagree"),
        (event("warning", "{username.__class__} {0} {unknown}"), "{username.__class__} {0} …"),
        (event("warning", "", reason="The disk is nearly full"), "The disk is nearly full"),
        (event("checkpoint", "", epoch=float("1e3")), "Checkpoint of step 1,000 saved"),
    ],
)
def test_events_in_words_with_bob_hidden(one, text):
    assert sentence(one, Names({"bob"})) == text


def test_a_crowd_that_joins_is_one_line_and_checkpoints_are_few():
    joins = [event("joined", time=NOW - number, username=name) for number, name in enumerate(["bob", *"vwxyz"])]
    (line,) = told(joins, Names({"bob"}))
    assert line["text"] == "v, w and 4 others joined" and line["time"] == NOW
    assert len(told(joins[:3], Names(()))) == 3
    assert len(told([event("checkpoint", epoch=number) for number in range(9)], Names(()))) == 2
    again = [event("joined", time=NOW - number, username="ada") for number in range(9)]
    assert told(again, Names(()))[0]["text"] == "ada joined"


# --- the export ---


def test_the_export_has_all_it_needs_and_no_hidden_name(tmp_path):
    out = tmp_path / "space"
    index = export_page(RUN, out, folder=hostile_journal(tmp_path))
    assert index == out / "index.html"
    text = index.read_text() + (out / "state.json").read_text() + (out / "README.md").read_text()
    assert "secretperson" not in text.casefold()
    assert (out / "README.md").read_text().startswith("---\n") and "\nsdk: static\n" in text
    state = json.loads((out / "state.json").read_text())
    assert (out / state["images"][0]["url"]).is_file()
    for path in ("static/page.css", "static/vendor/uplot/uPlot.iife.min.js", "static/vendor/uplot/LICENSE"):
        assert (out / path).is_file()


def test_a_second_export_replaces_the_first_and_leaves_others_files_alone(tmp_path):
    folder, out = hostile_journal(tmp_path), tmp_path / "space"
    export_page(RUN, out, folder=folder)
    (out / "README.md").write_text("mine")
    (out / "pictures" / "mine.png").write_text("mine")
    (old,) = [path.name for path in (out / "pictures").glob("*-*.png")]
    with Journal(folder / "journal.sqlite") as journal:
        journal._db.execute("DELETE FROM pictures")
        journal.add_metrics(time.time(), 77, 3.0, 10.0, 3, 0.5, 1280)
    export_page(RUN, out, folder=folder)
    assert json.loads((out / "state.json").read_text())["now"]["epoch"] == 77
    assert not (out / "pictures" / old).exists() and (out / "pictures" / "mine.png").exists()
    assert (out / "README.md").read_text() == "mine"


def test_a_page_of_somebody_elses_is_not_written_over(tmp_path):
    (tmp_path / "index.html").write_text("<h1>my home page</h1>")
    with pytest.raises(DashboardError, match="not replaced"):
        export_page(RUN, tmp_path, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]


def test_names_lead_to_the_hub_only_where_they_are_the_hubs(run):
    state = empty_state({**run, "names_are_hub_accounts": True})
    names = ("ada", "a volunteer", "0123456789ab", "a/../b")
    shown = [{"name": name, "hidden": name == "a volunteer"} for name in names]
    assert [profile_of(state, leader) for leader in shown] == ["https://huggingface.co/ada", "", "", ""]
    assert profile_of(empty_state(run), shown[0]) == ""


# --- the command ---


def command(*words: str):
    app = typer.Typer()
    add_verbs(app, lambda verb: verb)
    app.command()(lambda: None)  # with one command only, typer leaves its name out
    return CliRunner().invoke(app, ["dashboard", *words])


def test_the_commands_default_is_to_serve(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr("volunteer_kit.dashboard.door.serve", lambda run, **given: called.append((run, given)))
    assert command("demo", "--folder", str(tmp_path), "--port", "0").exit_code == 0
    assert command("--port", "7", "demo").exit_code == 0
    assert called == [
        ("demo", {"folder": tmp_path, "host": "localhost", "port": 0}),
        ("demo", {"folder": None, "host": "localhost", "port": 7}),
    ]


def test_the_command_exports(tmp_path):
    done = command("export", str(RUN), "--folder", str(hostile_journal(tmp_path)), "--out", str(tmp_path / "space"))
    assert done.exit_code == 0 and "index.html" in done.output
    assert (tmp_path / "space" / "index.html").is_file()
