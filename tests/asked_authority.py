"""What tests ask an authority, as volunteer and as moderator, and fixtures for it."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.local_authority import Authority, join_body, make_authority, refresh_body
from volunteer_kit.auth.access_token import BanList, read_bans_statement


class Page:
    """What a test asks the authority."""

    def __init__(self, authority: Authority):
        self.authority = authority
        self.http = TestClient(authority.app, base_url="http://127.0.0.1:8400", raise_server_exceptions=False)

    def post(self, path: str, body: Any, **more: Any) -> Any:
        return self.http.post(path, json=body, **more)

    def join(self, token: str, number: int = 0, **more: Any) -> Any:
        return self.post("/v1/join", join_body(token, number, **more))

    def refresh(self, number: int = 0, **more: Any) -> Any:
        return self.post("/v1/refresh", refresh_body(number, **more))

    def moderator(self, token: str) -> Moderator:
        answer = self.post("/v1/moderate/session", {"hf_token": token})
        assert answer.status_code == 200, answer.text
        return Moderator(self, answer.json()["session"])

    def bans(self) -> BanList:
        """As a peer takes them."""
        answer = self.http.get("/v1/bans").json()
        statement = read_bans_statement(base64.b64decode(answer["statement"]), self.authority.trust, time.time())
        bans = BanList.of(answer["version"], map(bytes.fromhex, answer["accounts"]))
        assert bans.matches(statement) and 60 <= statement.expires_at - time.time() <= 120
        return bans


class Moderator:
    def __init__(self, page: Page, session: str):
        self.page, self.headers = page, {"Authorization": f"Bearer {session}"}

    def do(self, action: str, username: str, **more: str) -> Any:
        return self.page.post(f"/v1/moderate/{action}", {"username": username, **more}, headers=self.headers)

    def see(self, what: str, **query: Any) -> list[dict[str, Any]]:
        return self.page.http.get(f"/v1/moderate/{what}", params=query, headers=self.headers).json()[what]


def kind_of(answer: Any, status: int) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"kind", "message"}
    return error["kind"]


def fixtures() -> tuple[Any, Any]:
    """For a test module: `page, lite = fixtures()`."""

    @pytest.fixture
    def page(hub, tmp_path, database) -> Iterator[Page]:
        authority = make_authority(tmp_path, database)
        yield Page(authority)
        authority.storage.close()

    @pytest.fixture
    def lite(hub, tmp_path) -> Iterator[Any]:
        """Makes authorities on SQLite, for what no database has to do with."""
        made: list[Authority] = []

        def make(**settings: Any) -> Page:
            made.append(make_authority(tmp_path, **settings))
            return Page(made[-1])

        yield make
        for authority in made:
            authority.storage.close()

    return page, lite
