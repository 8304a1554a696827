"""Which ways into a run are told, for which host: one function, by a table."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from volunteer_kit.ways_in import (
    PUSHED,
    Offer,
    colab_link,
    is_pushed,
    is_reachable,
    note_pushed,
    read_offer,
    save_offer,
    ways_in,
)

WHEEL, SHA256 = "volunteer_kit-0.1.0-py3-none-any.whl", "ab" * 32
PUBLIC = Offer(
    "https://run.example.org", wheel=WHEEL, sha256=SHA256, notebook_sha256="cd" * 32, push_to="cats/run",
    repo="cats/run",
)  # fmt: skip
LOCAL = replace(PUBLIC, url="http://127.0.0.1:8000")


@pytest.mark.parametrize(
    ("offer", "kinds"),
    [
        (PUBLIC, ["colab", "kaggle", "notebook", "terminal"]),
        (replace(PUBLIC, repo=""), ["kaggle", "notebook", "terminal"]),
        (replace(PUBLIC, repo="", push_to=""), ["kaggle", "notebook", "terminal"]),
        (replace(PUBLIC, hub="https://hub.example.com"), ["kaggle", "notebook", "terminal"]),
        (replace(PUBLIC, url="https://203.0.114.7"), ["colab", "kaggle", "notebook", "terminal"]),
        (replace(PUBLIC, url="https://run.example.org:8443"), ["colab", "kaggle", "notebook", "terminal"]),
        (LOCAL, ["notebook", "terminal"]),
        (replace(PUBLIC, url="http://localhost:8000"), ["notebook", "terminal"]),
        (replace(PUBLIC, url="http://[::1]:8000"), ["notebook", "terminal"]),
        (replace(PUBLIC, url="https://192.168.1.5"), ["notebook", "terminal"]),
        (replace(PUBLIC, url="https://10.0.0.1:8443"), ["notebook", "terminal"]),
        (replace(PUBLIC, url="https://100.64.0.9"), ["notebook", "terminal"]),
        (replace(PUBLIC, url="https://[fd00::1]"), ["notebook", "terminal"]),
        (replace(PUBLIC, url="https://box.local"), ["notebook", "terminal"]),
        (replace(PUBLIC, url="https://trainer"), ["notebook", "terminal"]),
        (replace(PUBLIC, url="https://gpu.corp"), ["notebook", "terminal"]),
        (replace(PUBLIC, notebook_sha256=""), ["terminal"]),
        (Offer("https://run.example.org"), ["terminal"]),
        (Offer("https://run.example.org", draws=False), ["trainer"]),
        (replace(PUBLIC, draws=False, notebook_sha256=""), ["terminal", "trainer"]),
        (replace(LOCAL, draws=False, notebook_sha256=""), ["terminal", "trainer"]),
    ],
)
def test_only_what_can_work_is_told(offer, kinds):
    ways = ways_in(offer)
    assert [way.kind for way in ways] == kinds
    told = json.dumps([way._asdict() for way in ways])
    assert "OWNER" not in told and "github" not in told
    for platform in ("colab", "kaggle"):
        assert (platform in told.lower()) is (platform in kinds)


def test_each_way_has_what_it_takes():
    ways = {way.kind: way for way in ways_in(PUBLIC)}
    assert ways["colab"].link == colab_link("cats/run")
    assert colab_link("cats/run") == (
        "https://colab.research.google.com/#fileId=https%3A//huggingface.co/cats/run/blob/main/join.ipynb"
    )
    assert ways["kaggle"].link == ways["notebook"].link == "https://run.example.org/join.ipynb"
    environment, install, setup, join = ways["terminal"].lines
    assert environment.startswith("python3 -m venv ") and "whl/cpu" in ways["terminal"].note
    assert shlex.split(install) == [
        "python", "-m", "pip", "install", f"https://run.example.org/kit/{WHEEL}#sha256={SHA256}",
    ]  # fmt: skip
    assert (setup, join) == ("volunteer-kit setup", "volunteer-kit join https://run.example.org")


def test_without_a_wheel_nothing_is_installed_by_hope():
    assert ways_in(Offer("https://run.example.org"))[0].lines == ("volunteer-kit join https://run.example.org",)
    assert not any("pip" in line for line in ways_in(Offer("https://run.example.org", draws=False))[0].lines)


def test_the_lines_of_a_trainer_are_python():
    terminal, way = ways_in(replace(PUBLIC, draws=False, notebook_sha256=""))
    compile("\n".join(way.lines), "lines", "exec")
    assert 'swarm_trainer("https://run.example.org"' in way.lines[-1]
    environment, install = terminal.lines
    assert environment.startswith("python3 -m venv ") and "whl/cpu" in terminal.note
    assert shlex.split(install)[-1] == f"volunteer-kit[hf] @ https://run.example.org/kit/{WHEEL}#sha256={SHA256}"


def test_the_host_comes_before_the_hub():
    assert PUBLIC.wheel_urls == [
        f"https://run.example.org/kit/{WHEEL}", f"https://huggingface.co/cats/run/resolve/main/kit/{WHEEL}",
    ]  # fmt: skip
    assert replace(PUBLIC, push_to="").wheel_urls == PUBLIC.wheel_urls[:1] and Offer("https://a.org").wheel_urls == []


def test_the_dashboard_is_at_the_host_unless_it_is_told_otherwise():
    assert PUBLIC.dashboard_url == "https://run.example.org/dashboard/"
    assert replace(PUBLIC, dashboard="https://stats.example.org").dashboard_url == "https://stats.example.org"


@pytest.mark.parametrize("url", ["https://a.example.org", "https://8.8.8.8", "https://[2606:4700::1]:8443"])
def test_names_and_addresses_of_the_internet_are_reachable(url):
    assert is_reachable(url)


# --- what the host's processes tell each other ---


def test_the_offer_is_as_pushed_only_while_the_hub_has_these_very_files(tmp_path):
    offer = replace(PUBLIC, repo="")
    assert read_offer(tmp_path) is None
    save_offer(tmp_path, offer)
    assert read_offer(tmp_path) == offer and not is_pushed(tmp_path, offer)
    note_pushed(tmp_path, offer, is_private=False)
    assert read_offer(tmp_path) == PUBLIC and is_pushed(tmp_path, offer)
    for change in ({"notebook_sha256": "00"}, {"sha256": "00"}, {"push_to": "cats/other"}, {"push_to": ""}):
        save_offer(tmp_path, replace(offer, **change))
        assert read_offer(tmp_path).repo == "" and not is_pushed(tmp_path, replace(offer, **change)), change


def test_a_private_repository_is_no_way_in(tmp_path):
    offer = replace(PUBLIC, repo="")
    save_offer(tmp_path, offer)
    note_pushed(tmp_path, offer, is_private=True)
    assert read_offer(tmp_path).repo == "" and is_pushed(tmp_path, offer), "it is not brought there again and again"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"url": 5}', '{"url": "https://a.org"}', "null"])
def test_a_damaged_file_is_as_none(tmp_path, text):
    (tmp_path / "way_in.json").write_text(text)
    assert read_offer(tmp_path) is None
    save_offer(tmp_path, replace(PUBLIC, repo=""))
    (tmp_path / PUSHED).write_text(text)
    assert read_offer(tmp_path).repo == ""
