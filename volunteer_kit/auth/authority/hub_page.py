"""Signing in on the moderators' page with the Hub's own (OAuth 2.0 authorization code, RFC 6749; PKCE, RFC 7636)."""

from __future__ import annotations

import base64
import hashlib
import secrets
import threading
import time
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response

from volunteer_kit.auth.authority.api import TheModerators, address_of, at_the_hub, paced
from volunteer_kit.auth.authority.hub_login import endpoint, exchange_code
from volunteer_kit.auth.authority.page import _html, _sign_in_page, _signed_in
from volunteer_kit.auth.moderation import Refused

WITHIN = 600.0  # s for signing in there
MAX_BEGUN = 1000
COOKIE = "vk_sign_in"
CALLBACK = "/moderate/callback"


class Begun:
    """Sign-ins that went to the Hub and have not come back: state -> PKCE's verifier, until when."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[str, tuple[str, float]] = {}

    def begin(self) -> tuple[str, str]:
        """:returns: the state, and the challenge for the verifier that is kept"""
        state, verifier, now = secrets.token_urlsafe(24), secrets.token_urlsafe(48), time.monotonic()
        with self._lock:
            self._begun = {key: one for key, one in self._begun.items() if one[1] > now}
            while len(self._begun) >= MAX_BEGUN:
                del self._begun[next(iter(self._begun))]
            self._begun[state] = verifier, now + WITHIN
        digest = hashlib.sha256(verifier.encode()).digest()
        return state, base64.urlsafe_b64encode(digest).decode().rstrip("=")

    def take(self, state: str) -> str | None:
        """The verifier, once."""
        with self._lock:
            verifier, until = self._begun.pop(state, (None, 0.0))
        return verifier if until > time.monotonic() else None


router = APIRouter(prefix="/moderate", include_in_schema=False)


@router.get("/hub", dependencies=[paced("login")])
async def go(request: Request) -> Response:
    settings = request.app.state.desk.settings
    if settings.oauth_client_id is None:
        raise Refused("malformed", "This authority has no app at the Hub: paste a token instead.")
    state, challenge = request.app.state.begun.begin()
    query = {
        "client_id": settings.oauth_client_id, "redirect_uri": settings.url + CALLBACK, "response_type": "code",
        "scope": "openid profile", "state": state, "code_challenge": challenge, "code_challenge_method": "S256",
    }  # fmt: skip
    response = RedirectResponse(f"{endpoint()}/oauth/authorize?{urlencode(query)}", 303)
    # Lax: coming back from the Hub is another site's doing. It opens nothing but the door that it began at.
    response.set_cookie(
        COOKIE, state, max_age=int(WITHIN), path=CALLBACK, httponly=True, samesite="lax",
        secure=request.url.scheme == "https",
    )  # fmt: skip
    return response


@router.get("/callback", dependencies=[paced("login")])
async def back(
    request: Request,
    moderators: TheModerators,
    code: Annotated[str, Query(max_length=2000)] = "",
    state: Annotated[str, Query(max_length=100)] = "",
) -> Response:
    """The same browser that went, within its time, once: else somebody could sign others in as himself."""
    settings, address = request.app.state.desk.settings, address_of(request)
    is_same = secrets.compare_digest(state.encode(), request.cookies.get(COOKIE, "").encode())
    verifier = request.app.state.begun.take(state) if is_same else None
    if not verifier or not code or settings.oauth_client_id is None:
        return _sign_in_page(request, "The sign-in at the Hub was not completed.\n1. Try it again.", 400)

    def sign_in() -> str:
        token = exchange_code(code, verifier, settings.url + CALLBACK, settings.oauth_client_id)
        return moderators.sign_in(token, address)[0]

    try:
        secret = await at_the_hub(request, sign_in)
    except Refused as refused:
        return _sign_in_page(request, str(refused), 403)
    # No redirect: one that another site began would come without the strict cookie. This page goes on by itself.
    response = _signed_in(request, secret, _html("signed_in.html", request))
    response.delete_cookie(COOKIE, path=CALLBACK)
    return response
