"""One dict and its three views, from a real server over a real journal: what is in it, and what never is."""

from __future__ import annotations

import gzip
import json
import socket
import time

import pytest
import typer
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from tests.dashboard_server import RUN, dashboard
from tests.fake_journal import fill
from volunteer_kit.cli_dashboard import add_verbs
from volunteer_kit.dashboard import DashboardError, export_page, serve
from volunteer_kit.dashboard.board import Board
from volunteer_kit.dashboard.happenings import Names, sentence, told
from volunteer_kit.dashboard.page import facts, headline, large, render
from volunteer_kit.dashboard.state import SILENT_AFTER, build_state, empty_state, profile_of, run_info
from volunteer_kit.journal import Journal, JournalReader
from volunteer_kit.runs import load_run

NOW = 1_790_000_000.0


@pytest.fixture(scope="module")
def run():
    return run_info(load_run("demo"))


def state_of(folder, run, now=NOW):
    with JournalReader(folder / "journal.sqlite") as reader:
        return build_state(reader, run, now)


def metrics(text: str) -> dict[str, float]:
    """Samples of a scrape: name and labels -> value."""
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    names = [s.name + "".join(f"{{{k}={v}}}" for k, v in sorted(s.labels.items())) for s in samples]
    assert len(set(names)) == len(names), "a series stands there twice"
    return dict(zip(names, [sample.value for sample in samples], strict=True))


# --- the dict ---


def test_the_dict_of_a_run_with_many(tmp_path, run):
    state = state_of(fill(tmp_path, "many", NOW), run)
    assert {"run", "now", "history", "leaderboard", "images", "events"} <= state.keys()
    assert state["run"]["run_id"] == "demo" and state["run"]["status"] == "finished"  # the demo has 280 steps
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
        (280, 2, SILENT_AFTER + 1, "The run is finished"),
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


# --- names that are hidden, text that is hostile ---


def hostile_journal(folder):
    with Journal(folder / "journal.sqlite") as journal:
        journal.add_metrics(time.time(), 5, 4.0, 10.0, 3, 0.5, 1280)
        journal.add_event(NOW, "joined", username="secretperson", device="T4")
        journal.add_event(NOW, "banned", username="mallory", reason="copied SecretPerson's <script>alert(1)</script>")
        journal.add_event(NOW, "warning", "seen near secretperson", by="secretperson")
        journal.set_members([{"username": "secretperson", "peer_id": "Qmsecret", "device": "<b>T4</b>", "here": True}])
        journal.set_leaderboard([
            {"username": "SecretPerson", "samples": 900, "seconds": 7200, "machines": 2},
            {"username": "quietone", "samples": 100, "seconds": 3600, "machines": 1},
            {"username": "<img src=x onerror=alert(1)>", "samples": 10},
        ])  # fmt: skip
        picture = folder / "pictures" / "a.png"
        picture.parent.mkdir()
        picture.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
        journal.add_picture(NOW, 5, 'by secretperson "><script>alert(2)</script></script>', picture)
        journal.hide("secretperson", True)
        journal.hide("quietone", True)
    return folder


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    with dashboard(hostile_journal(tmp_path_factory.mktemp("hostile"))) as server:
        yield server


@pytest.mark.parametrize("path", ["", "api/state", "metrics"])
def test_a_hidden_name_is_in_no_view_and_its_numbers_are(hostile, path):
    text = hostile.text(path)
    assert "secretperson" not in text.casefold() and "quietone" not in text
    assert "Qmsecret" not in text
    assert "900" in text or path == "metrics"


def test_the_numbers_of_those_hidden_are_one_series_in_prometheus(hostile):
    found = metrics(hostile.text("metrics"))
    assert found["volunteer_kit_account_samples_total{name=(hidden)}"] == 1000
    assert found["volunteer_kit_account_seconds_total{name=(hidden)}"] == 10800
    assert found["volunteer_kit_account_samples_total{name=<img src=x onerror=alert(1)>}"] == 10


def test_prometheus_has_what_the_page_has(hostile):
    found, state = metrics(hostile.text("metrics")), hostile.state()
    assert found["volunteer_kit_loss"] == state["now"]["loss"] == 4.0
    assert found["volunteer_kit_samples_total"] == 1280 and found["volunteer_kit_volunteers"] == 3
    assert found["volunteer_kit_epoch_progress_ratio"] == 0.5 and found["volunteer_kit_monitor_up"] == 1
    assert found["volunteer_kit_events_total{kind=banned}"] == 1
    assert found["volunteer_kit_run_info{run_id=demo}{status=running}"] == 1


def test_strangers_markup_stays_text(hostile):
    page = hostile.text()
    assert "<script>alert" not in page and "<img src=x" not in page and "<b>T4" not in page
    assert "&lt;script&gt;alert(2)" in page and "&lt;img src=x" in page and "&lt;b&gt;T4" in page


def test_curves_inside_the_page_cannot_end_their_element(run):
    state = empty_state(run)
    state["events"] = [{"time": NOW, "kind": "rollback", "text": "</script><script>alert(3)</script>"}]
    page = render(state)
    assert page.count("</script>") == page.count("<script")
    assert "\\u003c/script\\u003e" in page


def test_nothing_inline_may_run(hostile):
    _, headers, body = hostile.get()
    policy = headers["content-security-policy"]
    assert "script-src 'self';" in policy and "unsafe" not in policy and "default-src 'none'" in policy
    assert b" style=" not in body and b"onclick" not in body
    assert headers["x-content-type-options"] == "nosniff"


def test_nothing_is_fetched_from_elsewhere(hostile):
    for path in ("", "static/page.css", "static/page.js", "static/charts.js"):
        assert "//cdn" not in hostile.text(path) and 'src="http' not in hostile.text(path)


# --- the server ---


def test_what_has_not_changed_is_not_sent_again(hostile):
    for path in ("", "api/state"):
        status, headers, body = hostile.get(path)
        again, _, nothing = hostile.get(path, **{"If-None-Match": headers["etag"]})
        assert (status, again, nothing) == (200, 304, b"") and body
        _, headers, squeezed = hostile.get(path, **{"Accept-Encoding": "gzip"})
        assert headers["content-encoding"] == "gzip" and gzip.decompress(squeezed) == body


def test_a_picture_is_served_and_nothing_else_of_the_folder(hostile, tmp_path):
    (image,) = hostile.state()["images"]
    status, headers, body = hostile.get(image["url"])
    assert status == 200 and headers["content-type"] == "image/png" and body.startswith(b"\x89PNG")
    for path in ("journal.sqlite", "pictures/../journal.sqlite", "pictures/%2e%2e%2fjournal.sqlite",
                 "pictures/99-1.png",
                 "static/../app.py", "static/%2e%2e/app.py", "pictures/a.png", "pictures/9999999999999999999999-1.png",
                 "docs", "openapi.json"):  # fmt: skip
        assert hostile.get(path)[0] in (404, 422), path


def test_a_picture_that_is_none_or_lies_elsewhere_is_not_served(tmp_path, run):
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"\x89PNG\r\n\x1a\nsecret")
    folder = tmp_path / "monitor"
    with Journal(folder / "journal.sqlite") as journal:
        journal.add_metrics(NOW, 1, 1.0, 1.0, 1, 0.1, 1)
        (folder / "text.png").write_text("PRIVATE KEY")
        journal.add_picture(NOW, 1, "", folder / "text.png")
        journal._db.execute("INSERT INTO pictures VALUES (2, 1, 1, '', '../secret.png')")
        (folder / "link.png").write_bytes(b"")
        journal.add_picture(NOW, 1, "", folder / "link.png")
        (folder / "link.png").unlink()
        (folder / "link.png").symlink_to(secret)
    board = Board(folder, run)
    board.edition()
    assert [board.picture(number) for number in (1, 2, 3, 4)] == [None] * 4
    board.close()


def test_it_starts_before_the_monitor_and_follows_a_journal_that_is_replaced(tmp_path, run, monkeypatch):
    monkeypatch.setattr("volunteer_kit.dashboard.board.LOOK_EVERY", 0)
    board = Board(tmp_path / "monitor", run, clock=lambda: NOW)
    assert board.state()["run"]["status"] == "waiting"
    path = tmp_path / "monitor" / "journal.sqlite"
    with Journal(path) as journal:
        assert board.state()["run"]["status"] == "waiting"
        journal.add_metrics(NOW, 5, 4.0, 10.0, 2, 0.5, 1280)
        first = board.edition()
        assert first.state["now"]["epoch"] == 5 and board.edition() is first
    path.rename(path.with_suffix(".old"))
    with Journal(path) as journal:
        journal.add_metrics(NOW, 9, 4.0, 10.0, 2, 0.5, 1280)
        assert board.state()["now"]["epoch"] == 9
    for old in path.parent.glob("journal.sqlite*"):
        old.unlink()
    path.write_bytes(b"rubbish " * 2000)
    broken = board.edition()
    assert "damaged" in broken.problem and broken.state["now"]["epoch"] == 9
    assert "cannot be read just now" in render(broken.state, problem=broken.problem)
    assert str(path) not in render(broken.state, problem=broken.problem)
    path.unlink()
    with Journal(path) as journal:
        journal.add_metrics(NOW, 10, 4.0, 10.0, 2, 0.5, 1280)
        assert board.state()["now"]["epoch"] == 10 and not board.edition().problem
    board.close()


def test_silence_is_noticed_although_nothing_is_written(tmp_path, run, monkeypatch):
    monkeypatch.setattr("volunteer_kit.dashboard.board.LOOK_EVERY", 0)
    now = [NOW]
    board = Board(tmp_path, run, clock=lambda: now[0])
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.add_metrics(NOW, 5, 4.0, 10.0, 2, 0.5, 1280)
        assert board.state()["run"]["status"] == "running"
        now[0] += SILENT_AFTER + 1
        assert board.state()["run"]["status"] == "silent"
    board.close()


def test_it_ends_soon_after_sigterm_with_a_visitor_connected(tmp_path):
    with dashboard(tmp_path) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as visitor:
            visitor.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert visitor.recv(9) == b"HTTP/1.1 "
            began = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - began < 10


def test_a_port_that_is_taken_is_told(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(DashboardError, match=f"port {port}") as told:
            serve("demo", folder=tmp_path, port=port)
    assert "--port 0" in str(told.value)


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
        ("demo", {"folder": tmp_path, "host": "127.0.0.1", "port": 0}),
        ("demo", {"folder": None, "host": "127.0.0.1", "port": 7}),
    ]


def test_the_command_exports(tmp_path):
    done = command("export", str(RUN), "--folder", str(hostile_journal(tmp_path)), "--out", str(tmp_path / "space"))
    assert done.exit_code == 0 and "index.html" in done.output
    assert (tmp_path / "space" / "index.html").is_file()
