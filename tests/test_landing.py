"""The host's page for people, at its root and at the run's link, and what lies beside it."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from tests.fake_journal import NOW, fill, hostile_journal
from tests.local_authority import URL, make_authority
from volunteer_kit.dashboard.board import Board
from volunteer_kit.dashboard.landing import Landing, about, page_for, render, standing
from volunteer_kit.dashboard.preview import HEIGHT, WIDTH, preview
from volunteer_kit.dashboard.state import build_state, empty_state, run_info, way_in
from volunteer_kit.journal import Journal, JournalReader
from volunteer_kit.runs import load_run
from volunteer_kit.ways_in import Offer, colab_link, note_pushed, save_offer

OFFER = Offer(
    "https://run.example.org", wheel="volunteer_kit-0.1.0-py3-none-any.whl", sha256="ab" * 32,
    notebook_sha256="cd" * 32, push_to="cats/run",
)  # fmt: skip
CHROMIUM = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


@pytest.fixture(scope="module")
def run():
    return load_run("demo")


@pytest.fixture(scope="module")
def long(run):
    """A run that goes on after as many steps as the fake journals have."""
    return run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"total_epochs": 31_250})})


class Site:
    """A host's application over a folder, and a client of it."""

    def __init__(self, folder: Path, run: Any, offer: Offer | None = OFFER):
        self.folder = folder
        (folder / "run.yaml").write_text("run_id: demo\n")
        (folder / "join.ipynb").write_text('{"cells": []}')
        (folder / "kit").mkdir()
        (folder / "kit" / OFFER.wheel).write_bytes(b"PK wheel")
        (folder / "kit" / "secret.txt").write_text("secret")
        if offer:
            save_offer(folder, offer)
        run_file = folder / "run.yaml"
        self.board = Board(folder / "monitor", run_info(run))
        landing = Landing(self.board, folder, about(run, has_run_file=True), run_file)
        self.authority = make_authority(folder, run_file=run_file, page_for=page_for(landing))
        landing.install(self.authority.app)
        self.http = TestClient(self.authority.app, base_url=URL, follow_redirects=False)

    def get(self, path: str, accept: str | None = "*/*", **headers: str) -> Any:
        return self.http.get(path, headers={"Accept": accept, **headers} if accept else headers)

    def close(self) -> None:
        self.board.close()
        self.authority.storage.close()


@pytest.fixture
def site(tmp_path, long) -> Iterator[Site]:
    fill(tmp_path / "monitor", "many", time.time())
    made = Site(tmp_path, long)
    yield made
    made.close()


class Page(HTMLParser):
    """The tags of a page, by name, with their attributes."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def all(self, tag: str, name: str) -> list[str]:
        return [attrs[name] or "" for found, attrs in self.tags if found == tag and name in attrs]

    def meta(self, key: str) -> str:
        (found,) = [a["content"] for t, a in self.tags if t == "meta" and key in (a.get("property"), a.get("name"))]
        return found or ""


# --- who gets what ---


@pytest.mark.parametrize(
    ("path", "accept", "is_page"),
    [
        ("/", CHROMIUM, True),
        ("/run.yaml", CHROMIUM, True),
        ("/", "text/html", True),
        ("/", "*/*", True),  # makers of previews
        ("/", None, True),
        ("/", "application/yaml, text/yaml, text/plain;q=0.5, */*;q=0.1", False),
        ("/run.yaml", "*/*", False),
        ("/run.yaml", None, False),
        ("/run.yaml", "application/yaml", False),
        ("/run.yaml?raw", CHROMIUM, False),
        ("/run.yaml", "text/html;q=0", False),
        ("/run.yaml", "text/html;q=0.000, */*", False),
        ("/", "text/html; q=0, */*;q=0.5", False),
        ("/run.yaml", "text/yaml;q=0.5, text/html;q=0.4", False),
        ("/run.yaml", "text/yaml;q=0.4, TEXT/HTML;Q=0.5", True),
        ("/run.yaml", "text/html;level=1;q=0.5, text/*;q=0.1", True),
        ("/run.yaml", "text/*", False),
        ("/run.yaml", "application/x-not-text/html", False),
        ("/run.yaml", "text/html;q=many", False),
        ("/run.yaml", "*/*, text/html;q=0.2", False),
        ("/", "text/yaml;q=0, */*", True),
    ],
)
def test_a_person_gets_the_page_and_a_program_the_run_file(site, path, accept, is_page):
    answer = site.get(path, accept)
    assert answer.status_code == 200 and "Accept" in answer.headers["vary"].split(", ")
    assert answer.headers["content-type"].startswith("text/html" if is_page else "text/yaml")
    assert (answer.text == "run_id: demo\n") is not is_page


def test_the_root_leads_nobody_to_the_moderators_login(site):
    assert site.get("/").status_code == 200 and "/moderate" not in site.get("/").headers.get("location", "")
    assert "href=\"/moderate\"" in site.get("/").text


def test_a_host_without_a_run_file_has_the_page_all_the_same(site):
    (site.folder / "run.yaml").unlink()
    assert site.get("/", CHROMIUM).status_code == 200 and site.get("/run.yaml").status_code == 404


def test_what_has_not_changed_is_not_sent_again(site):
    first = site.get("/")
    again = site.get("/", **{"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"") and first.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", ["/dashboard/", "/dashboard/api/state", "/dashboard/run.yaml", "/dashboard/metrics"])
def test_only_what_never_changes_is_kept_for_a_day(site, path):
    assert "immutable" not in site.get(f"{path}?v=x").headers.get("cache-control", "")
    style, *_ = [a["href"] for t, a in Page(site.get("/").text).tags if t == "link" and a["rel"] == "stylesheet"]
    assert "immutable" in site.get(style).headers["cache-control"]
    assert "immutable" not in site.get("/dashboard/static/no.css?v=x").headers.get("cache-control", "")


def test_other_sites_may_show_the_pictures_and_nothing_else(site):
    pictures = [image for image in Page(site.get("/").text).all("img", "src") if "/pictures/" in image]
    for path in ("/og.png", pictures[0]):
        assert site.get(path).headers["cross-origin-resource-policy"] == "cross-origin", path
    for path in ("/", "/run.yaml", "/join.ipynb", "/moderate", "/dashboard/", "/dashboard/pictures/9999-1.png"):
        assert site.get(path).headers["cross-origin-resource-policy"] == "same-origin", path


@pytest.mark.parametrize(
    "path",
    ["/", "/run.yaml", "/og.png", "/join.ipynb", f"/kit/{OFFER.wheel}", "/moderate", "/moderate/style.css", "/v1/run",
     "/v1/bans", "/dashboard/", "/dashboard/api/state", "/dashboard/metrics", "/dashboard/run.yaml"],
)  # fmt: skip
def test_head_is_answered_as_get(site, path):
    head = site.http.head(path)
    got = site.get(path)
    assert (head.status_code, head.headers["content-type"]) == (200, got.headers["content-type"])


# --- what it says ---


def test_it_says_what_is_trained_who_is_here_and_how_to_join(site):
    text = site.get("/", CHROMIUM).text
    page = Page(text)
    for words in (
        "python3 -m venv", "GPU or CPU", "whl/cpu",
        "demo", "172,112 parameters", "coloured shapes", "ada", "41 people have taken part", "Before you join",
        "volunteer-kit join https://run.example.org", "volunteer-kit setup", f"#sha256={'ab' * 32}", "step 7,617 of",
    ):  # fmt: skip
        assert words in text, words
    assert page.all("button", "data-copy")[-1] == "volunteer-kit join https://run.example.org"
    links = page.all("a", "href")
    assert {"/dashboard/", "/moderate", "/run.yaml?raw", "https://run.example.org/join.ipynb"} <= set(links)
    assert len([image for image in page.all("img", "src") if image.startswith("/dashboard/pictures/")]) == 4
    assert "OWNER" not in text and "colab" not in text.lower()


def test_once_the_hub_has_the_notebook_it_opens_in_colab(site, monkeypatch):
    monkeypatch.setattr("volunteer_kit.dashboard.board.LOOK_EVERY", 0)
    before = site.get("/")
    note_pushed(site.folder, OFFER, is_private=False)
    after = site.get("/", **{"If-None-Match": before.headers["etag"]})
    assert after.status_code == 200
    links = Page(after.text).all("a", "href")
    assert links.count(colab_link("cats/run")) == 2 and "https://huggingface.co/cats/run" in links


def test_previews_of_the_link_have_words_and_a_picture(site):
    page = Page(site.get("/").text)
    assert page.meta("og:title") == "demo: train it together" and page.meta("og:description")
    assert page.meta("og:url") == "https://run.example.org/"
    place = page.meta("og:image")
    assert place.startswith("https://run.example.org/og.png?v=")
    picture = site.get(place.removeprefix("https://run.example.org"))
    image = Image.open(io.BytesIO(picture.content))
    assert picture.headers["content-type"] == "image/png" and image.size == (WIDTH, HEIGHT)
    assert len(image.convert("RGB").getcolors(2**20)) > 5


def test_strangers_words_stay_words(tmp_path, run):
    site = Site(tmp_path, run)
    hostile_journal(tmp_path / "monitor")
    try:
        text = site.get("/", CHROMIUM).text
        assert "<script>alert" not in text and "<img src=x" not in text and "&lt;script&gt;alert(2)" in text
        assert "secretperson" not in text.casefold() and "Qmsecret" not in text
        assert site.get("/og.png").status_code == 200, "a picture that is none is left out"
    finally:
        site.close()


def test_a_runs_own_words_are_escaped_too(run):
    state = empty_state({**run_info(run), "description": '"><script>1</script>', **way_in(OFFER)})
    text = render(state, about(run))
    assert "<script>1" not in text and "&lt;script&gt;" in text


def test_nothing_inline_may_run_and_nothing_comes_from_elsewhere(site):
    answer = site.get("/", CHROMIUM)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff" and " style=" not in answer.text
    page = Page(answer.text)
    sources = [*page.all("script", "src"), *page.all("img", "src")]
    sources += [a["href"] for t, a in page.tags if t == "link" and a["rel"] != "canonical"]
    for source in sources:
        assert source.startswith("/dashboard/") and site.get(source).status_code == 200, source
    assert site.get("/moderate").headers["content-security-policy"].startswith("default-src 'none'; style-src")


@pytest.mark.parametrize(
    ("now", "status", "words"),
    [
        ({}, "waiting", "waiting for the first volunteer"),
        ({"epoch": 5, "volunteers": 1}, "running", "1 volunteer training now, step 5 of 560"),
        ({"epoch": 5, "volunteers": 0}, "running", "No volunteer is training"),
        ({"epoch": 5, "volunteers": 3}, "silent", "No news"),
        ({"epoch": 560, "volunteers": 0}, "finished", "Finished after 560 steps"),
    ],
)
def test_how_it_stands_is_said_in_a_sentence(run, now, status, words):
    state = empty_state(run_info(run))
    state["now"].update(now)
    state["run"]["status"] = status
    assert words in standing(state) and words in render(state, about(run))


def test_a_finished_run_invites_nobody(tmp_path, run):
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.add_metrics(NOW, 560, 1.0, 1.0, 0, 0.0, 1)
    with JournalReader(tmp_path / "journal.sqlite") as reader:
        state = build_state(reader, {**run_info(run), **way_in(replace(OFFER, repo="cats/run"))}, NOW)
    text = render(state, about(run))
    assert "Get the model" in text and "volunteer-kit join" not in text and 'id="join"' not in text


def test_nothing_of_the_hosts_machine_is_told(run):
    data = run.data.model_copy(update={"kind": "shards", "shards": "/srv/secret/{0..9}.tar"})
    shards = run.model_copy(update={"data": data})
    assert "/srv" not in json.dumps(about(shards)) and str(Path.home()) not in json.dumps(about(run))


# --- what lies beside it ---


def test_notebook_and_wheel_are_served_and_nothing_else_of_the_folder(site):
    notebook, wheel = site.get("/join.ipynb"), site.get(f"/kit/{OFFER.wheel}")
    assert notebook.json() == {"cells": []} and 'filename="join.ipynb"' in notebook.headers["content-disposition"]
    assert wheel.content == b"PK wheel"
    for path in ("/kit/secret.txt", "/kit/..%2frun.yaml", "/kit/../authority.sqlite", "/kit/", "/kit", "/way_in.json",
                 "/keys/root.pem", "/authority.sqlite", "/dashboard/journal.sqlite",
                 "/kit/volunteer_kit-9.9-py3-none-any.whl"):  # fmt: skip
        assert site.get(path).status_code in (404, 405, 307), path
    (site.folder / "join.ipynb").unlink()
    assert site.get("/join.ipynb").status_code == 404


def test_the_dashboard_is_beside_it(site):
    assert "Leaderboard" in site.get("/dashboard/").text
    state = site.get("/dashboard/api/state").json()
    assert [way["kind"] for way in state["run"]["ways"]] == ["kaggle", "notebook", "terminal"]
    assert site.get("/dashboard/run.yaml").text == "run_id: demo\n"
    assert site.get("/dashboard").headers["location"].endswith("/dashboard/")
    board = Page(site.get("/dashboard/").text)
    assert "https://run.example.org/" in board.all("a", "href")
    assert board.all("button", "data-copy")[-1] == "volunteer-kit join https://run.example.org"


@pytest.mark.parametrize("count", range(8))
def test_a_preview_has_its_size_with_any_number_of_pictures(tmp_path, count):
    paths = []
    for number in range(count):
        Image.new("RGB", (32, 32), (40 * number, 90, 200)).save(tmp_path / f"{number}.png")
        paths.append(tmp_path / f"{number}.png")
    (tmp_path / "none.png").write_bytes(b"\x89PNG\r\n\x1a\nrubbish")
    image = Image.open(io.BytesIO(preview("a-run", [*paths, tmp_path / "none.png", tmp_path / "gone.png"])))
    assert image.size == (WIDTH, HEIGHT) and len(image.getcolors(2**20)) > 1
