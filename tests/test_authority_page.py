"""The moderators' page: what a person does there, and what others cannot make a browser do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.hub import App, Hub
from tests.local_authority import URL, Authority, add_person, join_body, make_authority
from volunteer_kit.auth.authority.settings import Pace
from volunteer_kit.auth.moderation import Allowlist


@pytest.fixture
def hub(hub) -> Hub:
    add_person(hub, "Mona")
    add_person(hub, "anna", "cats")
    return hub


MONA, ANNA = "hf_MonareadSecret", "hf_annareadSecret"


@pytest.fixture
def make(hub, tmp_path) -> Iterator[Any]:
    made: list[Authority] = []

    def one(url: str = URL, **settings: Any) -> Browser:
        made.append(make_authority(tmp_path, url=url, **settings))
        return Browser(made[-1], url)

    yield one
    for authority in made:
        authority.storage.close()


class Browser:
    """A browser on the page: keeps cookies, names its origin with forms."""

    def __init__(self, authority: Authority, url: str):
        self.authority, self.url = authority, url
        self.http = TestClient(authority.app, base_url=url, follow_redirects=False, raise_server_exceptions=False)

    def sign_in(self, token: str = MONA) -> Any:
        return self.send("sign-in", token=token)

    def send(self, action: str, headers: dict[str, str] | None = None, **form: str) -> Any:
        return self.http.post(f"/moderate/{action}", data=form, headers={"Origin": self.url} | (headers or {}))

    def text(self, **query: Any) -> str:
        answer = self.http.get("/moderate", params=query)
        assert answer.status_code == 200
        return answer.text

    @property
    def form_key(self) -> str:
        return re.search(r'name="form_key" value="([^"]+)"', self.text())[1]

    def act(self, action: str, **form: str) -> str:
        """Send a form of the page; what the page then says."""
        assert self.send(action, form_key=self.form_key, **form).status_code == 303
        return self.text()


def test_the_page_adds_bans_and_lifts(make):
    browser = make()
    assert "Sign in" in browser.text() and "People" not in browser.text()
    assert browser.sign_in().status_code == 303
    browser.http.post("/v1/join", json=join_body(ANNA))
    assert ">anna</a>" in browser.text() and "1 machine in the run" in browser.text()
    assert "berta may take part now" in browser.act("add", username="@berta")
    assert "has not come yet" in browser.text() and "may take part now" not in browser.text(), "it is said once"
    assert "anna is banned" in browser.act("ban", username="anna", reason="spam")
    assert browser.http.post("/v1/join", json=join_body(ANNA)).status_code == 403
    assert "ban of anna is lifted" in browser.act("unban", username="anna")
    assert "is out" in browser.act("remove", username="berta")
    assert "Nobody has such a name" in browser.text(part="zzz")
    log = [entry.action for entry in browser.authority.app.state.moderators.log()]
    assert log == ["removed", "unbanned", "banned", "added"]
    browser.send("sign-out")
    assert "People" not in browser.text()


def test_what_is_refused_is_said_on_the_page(make):
    browser = make()
    browser.sign_in()
    assert "moderators do not ban each other" in browser.act("ban", username="max", reason="spam")
    assert "no name at the Hub" in browser.act("add", username="<script>alert(1)</script>")
    assert "Give a reason" in browser.act("ban", username="anna", reason=" ")
    assert browser.http.post("/moderate/delete-all", headers={"Origin": URL}).status_code in (303, 403, 404)


@pytest.mark.parametrize(
    "token, says", [(ANNA, "not a moderator"), ("hf_x", "does not know"), ("", "no token"), ("<b>", "")]
)
def test_who_does_not_get_in_is_told(make, token, says):
    answer = make().sign_in(token)
    assert answer.status_code == 403 and says in answer.text and "set-cookie" not in answer.headers
    assert token not in answer.text or not token


def test_forms_that_another_site_sends_do_nothing(make):
    browser = make()
    browser.sign_in()
    key = browser.form_key
    form = {"username": "anna", "reason": "spam", "form_key": key}
    for origin in ("https://evil.example", "null", "http://127.0.0.1:8401", "http://127.0.0.1.evil.example:8400"):
        answer = browser.http.post("/moderate/ban", data=form, headers={"Origin": origin})
        assert answer.status_code == 403 and "did not come from" in answer.text
    assert browser.http.post("/moderate/ban", data=form).status_code == 403, "no origin at all"
    for wrong in ("", "x", key[:-1]):
        assert browser.send("ban", **(form | {"form_key": wrong})).status_code == 403
    other = make()
    other.sign_in()
    assert other.send("ban", **form).status_code == 403, "the key of another session"
    assert browser.authority.app.state.moderators.bans() == []
    assert "is banned" in browser.act("ban", username="anna", reason="spam")


def test_a_page_under_a_borrowed_name_is_not_ours(make):
    """DNS rebinding: another site's name leads to this machine, and its page asks as its own origin."""
    browser = make()
    headers = {"Origin": "http://evil.example:8400", "Host": "evil.example:8400"}
    assert browser.http.post("/moderate/sign-in", data={"token": MONA}, headers=headers).status_code == 403


def test_cookies_go_nowhere_else(make):
    cookie = make().sign_in().headers["set-cookie"]
    for part in ("HttpOnly", "SameSite=strict", "Path=/moderate"):
        assert part in cookie
    assert "Secure" not in cookie, "on this machine itself"
    cookie = make(url="https://auth.example.org").sign_in().headers["set-cookie"]
    assert cookie.startswith("__Secure-vk_moderator=") and "; Secure" in cookie


def test_a_cookie_is_no_key_to_the_api(make):
    browser = make()
    browser.sign_in()
    answer = browser.http.post("/v1/moderate/ban", json={"username": "anna", "reason": "spam"})
    assert answer.status_code == 401


def test_browsers_are_told_to_run_no_script_and_show_it_in_no_frame(make):
    browser = make()
    browser.sign_in()
    for path in ("/moderate", "/moderate/style.css", "/v1/run", "/nowhere", "/moderate/hub"):
        headers = browser.http.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "script-src" not in policy
        assert headers["x-frame-options"] == "DENY" and headers["x-content-type-options"] == "nosniff"
    text = browser.text()
    assert "<script" not in text and not re.search(r"\son\w+=|\sstyle=|javascript:", text)


def test_everything_is_escaped(make):
    evil = "<img src=x onerror=alert(1)>\"'&"
    browser = make(allowlist=Allowlist.of(moderators=["mona"]), oauth_client_id=None)
    browser.sign_in()
    text = browser.act("ban", username="anna", reason=evil)
    assert "<img" not in text and "&lt;img src=x onerror=alert(1)&gt;&#34;&#39;&amp;" in text
    assert 'value="&lt;img' in browser.text(part=evil) and "<img" not in browser.text(part=evil)


def test_errors_are_a_page_too(make):
    browser = make(pace=Pace(login="1/minute"))
    assert "<h1>" in browser.http.get("/moderate", params={"before": "x"}).text
    browser.sign_in()
    answer = browser.sign_in()
    assert answer.status_code == 429 and "Wait" in answer.text and "<h1>" in answer.text


# --- signing in with the Hub's page ---


@pytest.fixture
def app(hub) -> App:
    hub.app = App("the-hosts-app", person="Mona")
    return hub.app


def go(browser: Browser) -> tuple[str, str]:
    """To the Hub's page; the address that it sends the browser back to, and where it was."""
    import requests

    assert 'href="/moderate/hub"' in browser.text()
    there = browser.http.get("/moderate/hub").headers["location"]
    back = requests.get(there, allow_redirects=False, timeout=10).headers["Location"]
    return back, there


def test_with_the_hubs_page(make, app):
    browser = make(oauth_client_id="the-hosts-app")
    back, there = go(browser)
    assert (
        "scope=openid+profile" in there and "code_challenge_method=S256" in there and back.startswith(f"{URL}/moderate")
    )
    answer = browser.http.get(back)
    assert answer.status_code == 200 and "location" not in answer.headers, "a redirect would lose the strict cookie"
    assert 'http-equiv="refresh"' in answer.text and "SameSite=strict" in answer.headers["set-cookie"]
    assert "Mona" in browser.text() and "People" in browser.text()
    assert browser.http.get(back).status_code == 400, "it works once"


def test_a_sign_in_that_another_browser_began_is_not_taken(make, app):
    """Else somebody could sign a moderator in as himself, and read what that one does."""
    back, _ = go(make(oauth_client_id="the-hosts-app"))
    victim = make(oauth_client_id="the-hosts-app")
    assert victim.http.get(back).status_code == 400
    go(victim)
    assert victim.http.get(back).status_code == 400 and "People" not in victim.text()


@pytest.mark.parametrize(
    "change, status, says",
    [
        ({"person": "anna"}, 403, "not a moderator"),
        ({"scope": "openid profile write-repos"}, 403, "write-repos"),
    ],
)
def test_hub_logins_that_are_refused(make, app, change, status, says):
    vars(app).update(change)
    browser = make(oauth_client_id="the-hosts-app")
    answer = browser.http.get(go(browser)[0])
    assert answer.status_code == status and says in answer.text


def test_a_denied_or_broken_sign_in_is_told(make, app):
    browser = make(oauth_client_id="the-hosts-app")
    back, there = go(browser)
    state = re.search(r"state=([^&]+)", back)[1]
    answer = browser.http.get("/moderate/callback", params={"error": "access_denied", "state": state})
    assert answer.status_code == 400 and "not completed" in answer.text
    back, _ = go(browser)
    app.codes.clear()
    assert "did not complete" in browser.http.get(back).text
