"""The dashboard as a browser meets it: a real server, a hostile journal, names that are hidden."""

from __future__ import annotations

import gzip
import socket

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.dashboard_server import dashboard
from tests.fake_journal import NOW, hostile_journal
from volunteer_kit.dashboard import DashboardError, serve
from volunteer_kit.dashboard.board import Board
from volunteer_kit.dashboard.page import render
from volunteer_kit.dashboard.state import SILENT_AFTER, empty_state, run_info
from volunteer_kit.journal import Journal
from volunteer_kit.runs import load_run


@pytest.fixture(scope="module")
def run():
    return run_info(load_run("demo"))


def metrics(text: str) -> dict[str, float]:
    """Samples of a scrape: name and labels -> value."""
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    names = [s.name + "".join(f"{{{k}={v}}}" for k, v in sorted(s.labels.items())) for s in samples]
    assert len(set(names)) == len(names), "a series stands there twice"
    return dict(zip(names, [sample.value for sample in samples], strict=True))


# --- names that are hidden, text that is hostile ---


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


def test_it_ends_after_sigterm_with_a_visitor_connected(tmp_path):
    with dashboard(tmp_path) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as visitor:
            visitor.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert visitor.recv(9) == b"HTTP/1.1 "
            assert server.stop() == 0, "though the visitor stays"


def test_a_port_that_is_taken_is_told(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(DashboardError, match=f"port {port}") as told:
            serve("demo", folder=tmp_path, port=port)
    assert "--port 0" in str(told.value)
