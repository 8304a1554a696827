"""A checkpoint's way to the Hub with the real client, its model card, and what happens when the Hub refuses it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.hub import Hub
from volunteer_kit.checkpoint import load_checkpoint, save_checkpoint
from volunteer_kit.data.settings import DataConfig
from volunteer_kit.host.settings import HostSettings
from volunteer_kit.host.way_in import make_offer
from volunteer_kit.monitor import errands
from volunteer_kit.monitor.card import draw_curve, model_card
from volunteer_kit.monitor.chore import Chore
from volunteer_kit.monitor.errands import Errands
from volunteer_kit.monitor.kept import Kept, KeptStates
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.runs import build_model, load_run
from volunteer_kit.ways_in import CPU_TORCH, Offer, colab_link, is_pushed, read_offer

TOKEN, REPO = "hf_hostwriteSecret", "cats/demo-model"
HISTORY = [{"epoch": epoch, "loss": 5.0 - epoch / 10} for epoch in range(20)]
LEADERS = [
    {"username": "ada", "hidden": False, "samples": 900, "seconds": 7200.0},
    {"username": "", "hidden": True, "samples": 90, "seconds": 60.0},
    {"username": "e|vil](http://x) <b>", "hidden": False, "samples": 10, "seconds": 60.0},
]


@pytest.fixture(scope="module")
def run():
    return load_run("demo")


@pytest.fixture(scope="module")
def checkpoint(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("monitor")
    named = {name: tensor.detach() for name, tensor in build_model(run).named_parameters()}
    meta = {"epoch": 20, "run_id": run.run_id, "fingerprint": run.fingerprint, "numbers": []}
    return save_checkpoint(folder / "checkpoints", {**named, "optimizer/x/exp_avg": torch.zeros(3)}, meta)


@pytest.fixture
def hub(tmp_path):
    with Hub() as hub:
        hub.tokens[TOKEN] = "mona"
        hub.writers.add(TOKEN)
        with mock.patch.dict(os.environ, hub.environment(tmp_path / "hf"), clear=True):
            yield hub


def task(run, checkpoint: Path, **changes) -> dict:
    words = {
        "repo": REPO, "checkpoint": str(checkpoint), "run": run.model_dump(mode="json"), "epoch": 20, "token": TOKEN,
        "history": HISTORY, "leaders": LEADERS, "pictures": [], "host": None,
    }  # fmt: skip
    return {**words, **changes}


def finish(chore: Chore, timeout: float = 240.0) -> dict:
    deadline = time.monotonic() + timeout
    while (found := chore.result()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_a_checkpoint_is_brought_to_the_hub_and_comes_back(run, checkpoint, hub, tmp_path):
    chore = Chore("volunteer_kit.monitor.push", 120.0)
    picture = tmp_path / "p.png"
    draw_curve(HISTORY, picture, "any picture")
    chore.start(**task(run, checkpoint, pictures=[["a red circle", str(picture)], ["gone", str(tmp_path / "no.png")]]))
    found = finish(chore)
    assert found.get("repo") == REPO, found
    [(name, message, files)] = hub.commits
    assert (name, message) == (REPO, "Step 20")
    assert set(files) == {"model.safetensors", "meta.json", "run.yaml", "loss.png", "README.md", "pictures/0.png"}
    assert files["loss.png"].startswith(b"\x89PNG")
    for file, content in files.items():
        (tmp_path / "back" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "back" / file).write_bytes(content)
    back = load_checkpoint(tmp_path / "back", fingerprint=run.fingerprint, finite=True)
    build_model(run).load_tensors(back.model)
    assert load_run(tmp_path / "back" / "run.yaml").fingerprint == run.fingerprint
    assert not any(TOKEN in asked.path for asked in hub.asked)
    assert all(asked.token is None for asked in hub.asked if asked.path.startswith("/lfs/"))

    chore.start(**task(run, checkpoint, epoch=30))  # the same weights: nothing large travels again
    assert "url" in finish(chore) and len(hub.commits) == 2
    assert sum(asked.method == "PUT" for asked in hub.asked) == len(hub.lfs)


def test_what_the_hub_refuses_is_told_in_words(run, checkpoint, hub):
    chore = Chore("volunteer_kit.monitor.push", 120.0)
    chore.start(**task(run, checkpoint, token="hf_reader"))
    assert "401" in finish(chore)["error"]
    assert not hub.commits


def test_a_failed_upload_is_tried_again_later(run, checkpoint, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(errands, "RETRY_FIRST", 0.2)
    monkeypatch.setattr(errands, "DRAW_EVERY", 1e6)
    folder = checkpoint.parents[1]
    notes, kept = Notes(folder / "journal.sqlite"), KeptStates(folder)
    kept.all = [Kept(20, 0, "", checkpoint.name, confirmed=True)]
    notes.do("set_leaderboard", [{"username": "ada", "samples": 5}, {"username": "Eve", "samples": 4}])
    notes.do("hide", "eve", True)
    for row in HISTORY:
        notes.do("add_metrics", 1000.0 + row["epoch"], row["epoch"], row["loss"], 3.0, 2, 0.5, 100)
    hub.fail("/commit/", times=1, status=403)
    busy = Errands(run, kept, notes, REPO, TOKEN)
    busy._draw_at = float("inf")
    deadline = time.monotonic() + 240
    try:
        while not hub.commits:
            busy.look()
            time.sleep(0.05)
            assert time.monotonic() < deadline
        while not notes.do("events", 10, ("checkpoint",)):
            busy.look()
            time.sleep(0.05)
            assert time.monotonic() < deadline
    finally:
        busy.close()
    [failed] = notes.do("events", 10, ("warning",))
    assert "not brought to the Hub" in failed["detail"]["reason"] and TOKEN not in str(failed)
    card = hub.commits[0][2]["README.md"].decode()
    assert "ada" in card and "Eve" not in card and "and 1 more" in card and "3.10 at step 19" in card
    notes.close()


def test_a_process_that_hangs_or_dies_is_only_an_error(tmp_path, monkeypatch):
    (tmp_path / "strange.py").write_text(
        "import sys, json, time\ntask = json.loads(sys.stdin.readline())\n"
        "time.sleep(task['sleep'])\nprint(task['say'])\nsys.exit(task['code'])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    chore = Chore("strange", 120.0)
    assert chore.result() is None
    for say, code, words in (("no json", 0, "code 0"), ("", 7, "code 7"), ('["list"]', 0, "code 0")):
        chore.start(sleep=0, say=say, code=code)
        assert words in finish(chore)["error"]
    chore.start(sleep=0, say='noise\n{"good": 1}', code=0)
    assert finish(chore) == {"good": 1}
    hanging = Chore("strange", 0.5)
    hanging.start(sleep=60, say="", code=0)
    assert "longer" in finish(hanging)["error"] and not hanging.is_busy


def test_the_answer_is_alone_on_stdout():
    code = (
        "from volunteer_kit.monitor.chore import do_chore\n"
        "def work(task):\n    print('a library talks'); return {'got': task['a']}\n"
        "raise SystemExit(do_chore(work))"
    )
    done = subprocess.run([sys.executable, "-c", code], input='{"a": 5}\n', capture_output=True, text=True, timeout=180)
    assert json.loads(done.stdout) == {"got": 5} and "a library talks" in done.stderr
    done = subprocess.run([sys.executable, "-c", code], input="{}\n", capture_output=True, text=True, timeout=180)
    assert "KeyError" in json.loads(done.stdout)["error"]


@pytest.mark.slow
def test_pictures_are_drawn_from_a_checkpoint(run, checkpoint, tmp_path):
    chore = Chore("volunteer_kit.monitor.drawing", 120.0)
    chore.start(run=run.model_dump(mode="json"), checkpoint=str(checkpoint), folder=str(tmp_path), epoch=20)
    found = finish(chore)
    assert [picture["caption"] for picture in found["pictures"]] == list(run.captions), found
    assert all(Path(picture["path"]).parent == tmp_path / "pictures" for picture in found["pictures"])
    chore.start(run=run.model_dump(mode="json"), checkpoint=str(tmp_path / "none"), folder=str(tmp_path), epoch=20)
    assert "CheckpointError" in finish(chore)["error"]


# --- the way in ---


@pytest.fixture
def host(run, tmp_path) -> Path:
    """A host's folder with an offer for that repository."""
    settings = HostSettings(push_to=REPO)
    make_offer(tmp_path / "host", "https://run.example.org", settings, run)
    return tmp_path / "host"


def bring(run, host: Path, token: str = TOKEN) -> dict:
    chore = Chore("volunteer_kit.monitor.push_way_in", 120.0)
    chore.start(run=run.model_dump(mode="json"), host=str(host), token=token)
    return finish(chore)


def test_notebook_kit_and_card_are_brought_to_the_hub(run, hub, host):
    assert bring(run, host) == {"repo": REPO, "is_private": False, "is_news": True}
    [(name, message, files)] = hub.commits
    offer = read_offer(host)
    assert name == REPO and set(files) == {"join.ipynb", f"kit/{offer.wheel}", "README.md"}
    assert hashlib.sha256(files[f"kit/{offer.wheel}"]).hexdigest() == offer.sha256
    assert files["join.ipynb"] == (host / "join.ipynb").read_bytes()
    # the stand-in's address is not the real Hub's, so nothing says that Colab opens it
    card = files["README.md"].decode()
    assert "## Take part" in card and f"#sha256={offer.sha256}" in card and "colab" not in card
    assert "step 0" not in card and "hf download" not in card, "there is no model yet"
    assert offer.repo == REPO and is_pushed(host, offer)
    assert f"{hub.url}/{REPO}/resolve/main/kit/{offer.wheel}" in files["join.ipynb"].decode()


def test_a_card_that_is_there_stays_but_for_the_wheel_that_it_names(run, hub, host):
    offer = read_offer(host)
    old = f"# mine\npip install 'https://x/kit/volunteer_kit-0.0.9-py3-none-any.whl#sha256={'0' * 64}'\n"
    hub.add("models", REPO, {"README.md": old.encode()})
    bring(run, host)
    card = hub.commits[0][2]["README.md"].decode()
    assert card == f"# mine\npip install 'https://x/kit/{offer.wheel}#sha256={offer.sha256}'\n"


def test_a_private_repository_is_told(run, hub, host):
    hub.add("models", REPO, {}, private=True)
    hub.admitted.add(TOKEN)
    assert bring(run, host) == {"repo": REPO, "is_private": True, "is_news": True}
    assert read_offer(host).repo == "" and is_pushed(host, read_offer(host))


def test_a_gated_repository_is_as_a_private_one(run, hub, host):
    hub.add("models", REPO, {}, gated=True)
    hub.admitted.add(TOKEN)
    assert bring(run, host)["is_private"] is True and read_offer(host).repo == ""


def test_the_hub_is_asked_anew_who_may_read_it(run, hub, host):
    """Its owner makes it public, gates it, takes it away; and the Hub is away for a while."""
    hub.admitted.add(TOKEN)
    hub.add("models", REPO, {}, private=True)
    bring(run, host)
    files = hub.commits[0][2]

    def asked(**how: bool) -> tuple[dict, str]:
        hub.add("models", REPO, files, **how)
        return bring(run, host), read_offer(host).repo

    assert asked() == ({"repo": REPO, "is_private": False, "is_news": True}, REPO)
    assert asked() == ({"repo": REPO, "is_private": False, "is_news": False}, REPO)
    hub.fail("/api/models/", times=9, status=503)
    found, repo = asked(private=True)
    assert "error" in found and repo == REPO, "it could not be asked"
    hub.forget()
    assert asked(gated=True) == ({"repo": REPO, "is_private": True, "is_news": True}, "")
    assert asked()[1] == REPO
    assert asked(private=True)[1] == ""
    assert asked()[1] == REPO
    del hub._repos["models", REPO]
    assert bring(run, host)["is_private"] is True and read_offer(host).repo == ""
    assert len(hub.commits) == 1, "nothing was brought again"


def test_another_file_than_the_pinned_one_is_not_brought(run, hub, host):
    (host / "join.ipynb").write_text("{}")
    assert "has changed" in bring(run, host)["error"] and not hub.commits


def test_it_is_brought_once_for_each_version_and_again_after_a_refusal(run, hub, host, monkeypatch):
    monkeypatch.setattr(errands, "RETRY_FIRST", 0.2)
    said: list[dict] = []
    hub.fail("/commit/", times=1, status=403)
    notes = Notes(host / "monitor" / "journal.sqlite")

    def serve_until(is_so) -> None:
        busy = Errands(
            run, KeptStates(host / "monitor"), notes, REPO, TOKEN, lambda line: said.append(json.loads(line))
        )
        deadline = time.monotonic() + 240
        try:
            while not is_so():
                busy.look()
                time.sleep(0.05)
                assert time.monotonic() < deadline
        finally:
            busy.close()

    serve_until(lambda: any("said" in line for line in said))
    assert "not brought" in said[0]["warning"] and REPO in said[1]["said"] and TOKEN not in str(said)
    assert len(hub.commits) == 1
    hub.admitted.add(TOKEN)
    hub.add("models", REPO, hub.commits[0][2], private=True)
    serve_until(lambda: len(said) == 3)  # another start of the same kit: it asks, and brings nothing
    assert "private" in said[2]["said"] and read_offer(host).repo == "" and len(hub.commits) == 1
    monkeypatch.setattr(errands, "ASK_EVERY", 0.2)
    before = len(hub.asked)

    def made_public() -> bool:
        if len(hub.asked) > before + 1:  # the first question found it private
            hub.add("models", REPO, hub.commits[0][2])
        return len(said) == 4

    serve_until(made_public)
    assert read_offer(host).repo == REPO and "private" not in said[3]["said"] and len(hub.commits) == 1
    make_offer(host, "https://other.example.org", HostSettings(push_to=REPO), run)
    serve_until(lambda: len(said) == 5)
    assert len(hub.commits) == 2 and b"other.example.org" in hub.commits[1][2]["join.ipynb"]
    notes.close()


# --- the card ---


def test_the_card_says_what_a_reader_asks(run):
    card = model_card(run, REPO, 560, HISTORY, LEADERS, [("a red circle", "pictures/0.png")], now=0.0)
    for words in (
        f"hf download {REPO}", "volunteer-kit generate", "LAMB", "560 of 560, on 1970-01-01", "3.10 at step 19",
        "![The loss over the steps](loss.png)", "drawn by volunteer-kit", "ada | 900 | 90.0% | 2.0", "and 1 more",
        "## Limits", run.fingerprint, "(pictures/0.png)", "pipeline_tag: text-to-image",
    ):  # fmt: skip
        assert words in card, words


def test_strangers_names_are_no_markup(run):
    card = model_card(run, REPO, 560, [], LEADERS)
    assert "](http://x" not in card and "<b>" not in card and "e\\|vil" in card


def test_the_card_of_a_run_on_others_data_names_them():
    data = DataConfig(kind="hub", dataset="cats/pictures@v2")
    card = model_card(load_run("dalle-laion").model_copy(update={"data": data}), REPO, 1, [], [])
    assert "datasets:\n- cats/pictures\n" in card and "under which licence" in card
    assert "## By whom" not in card and "loss.png" not in card


def test_no_curve_of_less_than_two_points(tmp_path):
    assert draw_curve([], tmp_path / "a.png", "") is None
    assert draw_curve([{"epoch": 1, "loss": None}, {"epoch": 2, "loss": 3.0}], tmp_path / "a.png", "") is None


OFFER = Offer(
    "https://run.example.org", wheel="volunteer_kit-0.1.0-py3-none-any.whl", sha256="ab" * 32,
    notebook_sha256="cd" * 32, push_to=REPO, repo=REPO,
)  # fmt: skip


def test_the_card_leads_in_while_the_run_goes_on(run):
    card = model_card(run, REPO, 20, HISTORY, LEADERS, offer=OFFER)
    for words in (
        colab_link(REPO), "volunteer-kit join https://run.example.org", "https://run.example.org/join.ipynb",
        f"https://huggingface.co/{REPO}/resolve/main/kit/{OFFER.wheel}#sha256={'ab' * 32}",
    ):  # fmt: skip
        assert words in card, words
    assert "OWNER" not in card
    assert "## Take part" not in model_card(run, REPO, 560, HISTORY, LEADERS, offer=OFFER), "it is finished"
    local = replace(OFFER, url="http://127.0.0.1:8000")
    assert "127.0.0.1" not in model_card(run, REPO, 20, HISTORY, LEADERS, offer=local)


@pytest.mark.parametrize("offer", [None, OFFER, replace(OFFER, push_to="", repo=""), replace(OFFER, wheel="")])
def test_the_card_installs_no_name_that_anybody_could_register(run, offer):
    card = model_card(run, REPO, 20, HISTORY, LEADERS, offer=offer)
    for line in card.splitlines():
        assert "pip install" not in line or "#sha256=" in line or CPU_TORCH in line, line
