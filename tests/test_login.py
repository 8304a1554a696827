"""Logins, with the real huggingface_hub client on a stand-in Hub: where tokens are found, and every way to fail."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tests.hub import Hub
from tests.login_scene import FINE, READ, WRITE, Outcome, Scene, play
from volunteer_kit.auth.login import Identity, Login, LoginError

PUBLIC_KEY = "ed25519:zCxnPDqEWnO5E2QIRyTsT3RpR-IUYM1P65zsY1VYt44"
LINK = "https://huggingface.co/settings/tokens/new?tokenType=fineGrained"
CHAT = {"permissions": ["repo.content.read", "inference.serverless.write"]}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[tuple[Hub, Callable]]:
    with Hub() as hub, hub.client(tmp_path_factory.mktemp("hf")) as ask:
        yield hub, ask


@pytest.fixture
def hub(world) -> Hub:
    hub = world[0]
    hub.forget()
    hub.expired.clear()
    hub.tokens = {READ: "anna", WRITE: "berta", FINE: "clara"}
    hub.rights = {READ: {"displayName": "r", "role": "read"}, WRITE: {"displayName": "w", "role": "write"}}
    hub.orgs = {"anna": ["training-together", "cats"]}
    hub.device = type(hub.device)()
    return hub


@pytest.fixture
def log_in(world, hub) -> Callable[[Scene], Outcome]:
    def run(scene: Scene) -> Outcome:
        outcome = world[1](play, scene)
        for token in (READ, WRITE, FINE, hub.device.token, "secret-device-code"):
            assert token not in outcome.output + outcome.text + str(outcome.notes)
        seen = {asked.path for asked in hub.asked if asked.token}
        assert seen <= {"/api/whoami-v2"}, "the token goes to whoami and nowhere else"
        return outcome

    return run


# Where a login is found


@pytest.mark.parametrize(
    "scene, name",
    [
        (Scene(explicit=READ, file=WRITE, colab=WRITE, variable=WRITE), "anna"),
        (Scene(file=READ, colab=WRITE, kaggle=WRITE, variable=WRITE), "anna"),
        (Scene(colab=READ, variable=WRITE), "anna"),
        (Scene(kaggle=READ, colab=WRITE, variable=WRITE), "anna"),  # Kaggle's image is built on Colab's
        (Scene(kaggle=READ, variable=WRITE), "anna"),
        (Scene(variable=READ, browser=True), "anna"),
        (Scene(types=f"  '{READ}'\n"), "anna"),
        (Scene(), None),
    ],
)
def test_sources_are_tried_in_their_order(log_in, hub, scene, name):
    outcome = log_in(scene)
    assert outcome.name == name and outcome.notes == [] and outcome.kind is None
    assert [asked.token for asked in hub.asked if "whoami" in asked.path] == ([READ] if name else [])
    assert outcome.orgs == (("training-together", "cats") if name else ())


def test_what_fails_falls_through_and_says_so(log_in, hub):
    hub.expired.add("hf_old")
    outcome = log_in(Scene(explicit="no token", file="hf_unknown", colab="hf_old", variable=READ,
                           login={"for_authority": True}))  # fmt: skip
    assert outcome.name == "anna"
    said = ["the token you gave. This is no token", "the login on this machine. The Hub does not know",
            "Colab's secrets. This token has expired"]  # fmt: skip
    assert len(outcome.notes) == len(said)
    for part, note in zip(said, outcome.notes, strict=True):
        assert part in note


def test_on_kaggle_colabs_secrets_are_not_asked(log_in):
    outcome = log_in(Scene(kaggle=WRITE, colab="TimeoutException", variable=READ, login={"for_authority": True}))
    assert outcome.name == "anna"
    assert len(outcome.notes) == 1 and "Kaggle's secrets. This token can write" in outcome.notes[0]


@pytest.mark.parametrize(
    "scene, note",
    [
        (Scene(colab="NotebookAccessError"), "may not read HF_TOKEN"),
        (Scene(colab="SecretNotFoundError"), None),
        (Scene(colab="TimeoutException"), "did not answer in time"),
        (Scene(colab="Error"), "could not be read (Error)"),
        (Scene(kaggle="NotFoundError"), None),
        (Scene(kaggle="ConnectionError"), "internet switched on"),
        (Scene(kaggle="BackendError"), "did not answer"),
        (Scene(kaggle="ValidationError"), "Add-ons > Secrets"),
    ],
)
def test_secrets_that_cannot_be_read(log_in, scene, note):
    scene.variable = READ
    outcome = log_in(scene)
    assert outcome.name == "anna"
    assert len(outcome.notes) == (note is not None) and (note or "") in "".join(outcome.notes)


# The browser


@pytest.mark.newer_packages
def test_the_browser_login_shows_link_and_code_and_polls(log_in, hub):
    hub.tokens[hub.device.token] = "dora"
    hub.device.pending = 3
    outcome = log_in(Scene(browser=True))
    assert outcome.name == "dora" and outcome.code == "52AT-FLYZ" and outcome.link.endswith("user_code=52AT-FLYZ")
    assert hub.device.polls == 4


def test_a_client_without_the_browser_login_says_so_and_takes_a_token(log_in, hub):
    outcome = log_in(Scene(browser=True, old_client=True, types=READ))
    assert outcome.name == "anna" and outcome.link is None and hub.device.clients == []
    assert len(outcome.notes) == 1 and "no login in the browser, so it takes a token" in outcome.notes[0]


@pytest.mark.newer_packages
def test_for_an_authority_the_hosts_own_app_asks_for_less(log_in, hub):
    hub.tokens[hub.device.token] = "dora"
    assert log_in(Scene(browser=True, login={"for_authority": True})).link is None, "everybody's app can write"
    outcome = log_in(Scene(browser=True, login={"for_authority": True, "client_id": "the-hosts-app"}))
    assert outcome.name == "dora" and hub.device.clients == ["the-hosts-app"]
    for scope, kind in (("openid profile write-repos", "can_write"), (None, "unknown_rights")):
        hub.device.scope, hub.device.polls = scope, 0
        outcome = log_in(Scene(browser=True, login={"for_authority": True, "client_id": "the-hosts-app"}))
        assert outcome.kind == kind and outcome.name is None


def log_in_for(run: str) -> tuple[str | None, str | None, list[str]]:
    """Log in with the browser, if there is one for this run; name, link and notes. Runs in the client's process."""
    from volunteer_kit.runs import load_run
    from volunteer_kit.volunteer import _login

    login = _login(load_run(run).authority)
    browser = login.browser()
    if browser is not None:
        assert browser.wait(120)
        login.from_browser()
    return login.name, browser and browser.link, login.notes


@pytest.mark.newer_packages
def test_a_run_with_an_app_of_its_hosts_offers_the_browser(world, hub, tmp_path):
    from volunteer_kit.run_reader import RUN_FILES
    from volunteer_kit.runs import load_run

    demo, runs = (RUN_FILES / "demo.yaml").read_text(), []
    for name, app in (("without", ""), ("with", ", oauth_client_id: the-hosts-app")):
        runs.append(tmp_path / f"{name}.yaml")
        about = f"url: 'https://auth.example.org', public_key: '{PUBLIC_KEY}'{app}"
        runs[-1].write_text(f"{demo}\nauthority: {{{about}}}\n")
    hub.tokens[hub.device.token] = "dora"
    assert world[1](log_in_for, str(runs[0])) == (None, None, []) and hub.device.clients == []
    name, link, _ = world[1](log_in_for, str(runs[1]))
    assert name == "dora" and "user_code" in link and hub.device.clients == ["the-hosts-app"]
    assert len({load_run(run).fingerprint for run in (RUN_FILES / "demo.yaml", *runs)}) == 1, "no setting of training"


@pytest.mark.newer_packages
@pytest.mark.parametrize(
    "device, kind, text",
    [
        ({"answer": "access_denied"}, "denied", "was refused there"),
        ({"answer": "expired_token"}, "timeout", "Nobody logged in"),
        ({"pending": 10**6, "expires_in": 0.2}, "timeout", "Nobody logged in"),
        ({"answer": "server_error"}, "down", "did not complete"),
    ],
)
def test_browser_logins_that_fail(log_in, hub, device, kind, text):
    vars(hub.device).update(device)
    outcome = log_in(Scene(browser=True))
    assert outcome.kind == kind and text in outcome.text and LINK in outcome.text and outcome.name is None


@pytest.mark.newer_packages
def test_a_browser_login_that_is_called_off_polls_no_more(log_in, hub):
    hub.device.pending = 10**6
    outcome = log_in(Scene(browser=True, cancel=True))
    assert outcome.name is None and outcome.kind is None and outcome.seconds < 60


# Ways to fail

AUTHORITY = {"for_authority": True}
MEMBERS = {"organization": "dogs"}


@pytest.mark.parametrize(
    "token, login, rights, fault, kind, says",
    [
        ("hf_unknown", {}, None, None, "wrong", ["does not know this token", "Copy it again", LINK, "no box ticked"]),
        ("hf_old", {}, None, None, "expired", ["has expired", LINK]),
        ("two words", {}, None, None, "malformed", ["no token", LINK]),
        ("hf_äöü", {}, None, None, "malformed", ["no token"]),
        ("hf_" + "x" * 5000, {}, None, None, "malformed", ["no token"]),
        ("hf_a\nb", {}, None, None, "malformed", ["no token"]),
        ("api_org_abcdef", {}, None, None, "malformed", ["of an organization", LINK]),
        (READ, {}, None, {"status": 500}, "down", ["error 500", "status.huggingface.co"]),
        (READ, {}, None, {"status": 503}, "down", ["error 503", "again in some minutes"]),
        (READ, {}, None, {"status": 429}, "limit", ["too often", "Wait five minutes"]),
        (READ, {}, None, {"status": 403}, "wrong", ["does not know"]),
        (READ, {}, None, {"cut_after": 5}, "network", ["cannot be reached"]),
        (READ, MEMBERS, None, None, "organization", ["anna is not in the organization dogs", "huggingface.co/dogs"]),
        (WRITE, AUTHORITY, None, None, "can_write", ["its role is write", LINK, "can read your private"]),
        (FINE, AUTHORITY, {"role": "fineGrained", "fineGrained": {"scoped": [CHAT]}}, None, "can_write",
         ["inference.serverless.write", LINK]),
        (FINE, AUTHORITY, {"role": "fineGrained", "fineGrained": {"global": ["discussion.write"]}}, None, "can_write",
         ["discussion.write"]),
        (FINE, AUTHORITY, {"role": "fineGrained"}, None, "unknown_rights", ["cannot be told", LINK]),
        (FINE, AUTHORITY, {"role": "somethingNew"}, None, "unknown_rights", ["cannot be told"]),
        (FINE, AUTHORITY, None, None, "unknown_rights", ["cannot be told"]),
        (FINE, MEMBERS, {"role": "fineGrained", "fineGrained": {}}, None, "organization", ["fine-grained tokens may"]),
    ],
)  # fmt: skip
def test_failures_name_cause_and_next_step(log_in, hub, token, login, rights, fault, kind, says):
    hub.expired.add("hf_old")
    if rights:
        hub.rights[FINE] = rights
    if fault:
        hub.fail("/whoami", times=9, **fault)
    outcome = log_in(Scene(types=token, login=login))
    assert (outcome.kind, outcome.name) == (kind, None), outcome
    for part in ("\n1. ", *says):
        assert part in outcome.text
    assert token not in outcome.output


def test_rights_that_an_authority_may_see(log_in, hub):
    hub.rights[FINE] = {"role": "fineGrained", "fineGrained": {"global": [], "scoped": [
        {"entity": {"name": "clara"}, "permissions": ["repo.content.read", "user.billing.read"]}]}}  # fmt: skip
    for token, name in ((READ, "anna"), (FINE, "clara")):
        assert log_in(Scene(types=token, login=AUTHORITY)).name == name
    assert log_in(Scene(types=READ, login={**AUTHORITY, "organization": "Training-Together"})).name == "anna"
    assert log_in(Scene(types=WRITE)).name == "berta", "without an authority the token stays with the Hub"


def test_no_network(log_in):
    outcome = log_in(Scene(variable=READ, file=READ, endpoint="http://127.0.0.1:9"))
    assert outcome.kind == "network" and "http://127.0.0.1:9" in outcome.text and "\n2. " in outcome.text
    assert outcome.notes == [], "no other token would do better, so none is tried"


def test_short_troubles_are_waited_out(log_in, hub):
    hub.fail("/whoami", times=2, status=502)
    assert log_in(Scene(variable=READ)).name == "anna"


def test_a_hub_that_never_answers_ends_in_time():
    from volunteer_kit.auth.identity import in_time

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        in_time(lambda: time.sleep(100), seconds=0.2)
    assert time.monotonic() - began < 60


def test_an_identity_keeps_its_token_to_itself():
    someone = Identity("anna", ("cats",), READ)
    assert READ not in repr(someone) + str(someone) + f"{someone}" and someone.token == READ
    with pytest.raises(TypeError):
        pickle.dumps(someone)
    assert isinstance(LoginError("wrong", "x"), PermissionError)


def test_without_huggingface_hub_it_says_what_to_install(monkeypatch):
    from volunteer_kit.auth.login import check

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(LoginError, match="volunteer-kit setup") as caught:
        check(READ)
    assert caught.value.kind == "missing"
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert Login().find() is None
