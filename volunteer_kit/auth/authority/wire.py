"""What comes in over HTTP, typed and bounded, and what goes out when it is refused. Nothing of a request is repeated
in an answer or a log: there may be a login in it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from volunteer_kit.auth.moderation import Refused

MAX_BODY = 16_384  # bytes; the largest has a token of 4,096 in it
BODY_WITHIN = 15.0  # s; a client that sends a byte now and then holds a place no longer
STATUS = {
    "banned": 403, "organization": 403, "not_listed": 403, "can_write": 403, "unknown_rights": 403,
    "not_moderator": 403, "not_monitor": 403, "moderator": 403, "forged": 403,
    "wrong": 401, "expired": 401, "proof": 401, "unknown": 401, "session": 401,
    "run": 409, "peers": 409, "already": 409, "still_in": 409, "not_added": 409, "not_banned": 409,
    "full": 409, "nobody": 409, "set_aside": 409, "minority": 409, "limit": 429, "down": 503,
}  # fmt: skip
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer, a browser sends "Origin: null" with a form
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; frame-ancestors 'none'; "
        "base-uri 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_log = logging.getLogger(__name__)


class Proven(BaseModel):
    """A peer that proves its key; see desk.py for what it signs. `time`: s since 1970."""

    model_config = ConfigDict(extra="ignore")

    run_id: str = Field(max_length=64)
    public_key: str = Field(max_length=2000, pattern=r"^ssh-rsa [A-Za-z0-9+/=]+( [ -~]*)?\n?$")
    time: int = Field(ge=0, lt=2**53)
    proof: str = Field(max_length=2000)


def _text(secret: SecretStr) -> SecretStr:
    """pydantic finds half a character (a lone surrogate) in a str by itself, in a SecretStr not."""
    try:
        secret.get_secret_value().encode()
    except UnicodeEncodeError:
        raise ValueError("no text") from None  # the other's own words have the login in them
    return secret


Login = Annotated[SecretStr, Field(min_length=1, max_length=4096), AfterValidator(_text)]


class Join(Proven):
    hf_token: Login
    # What the volunteer believes of his login. The authority does not: it asks the Hub, see hub_login.py.
    scope: str | None = Field(None, max_length=1000)


class Convict(Proven):
    """Of a monitor; see convictions.py."""

    token: str = Field(max_length=1500)
    evidence: str = Field(max_length=12_500)
    votes: int = Field(ge=0, lt=2**31)


class Admitted(BaseModel):
    token: str  # base64
    expires_at: float  # s since 1970
    username: str
    join_again: bool = False  # sign in at the Hub again within a day


class SignIn(BaseModel):
    hf_token: Login


class Named(BaseModel):
    username: str = Field(max_length=100)


class BanThem(Named):
    reason: str = Field(max_length=1000)


def install(app: FastAPI, show_error: Callable[[Request, str, int], Response]) -> None:
    """Errors as {"error": {"kind", "message"}}, or a page for people; bounded bodies, headers that a browser heeds."""
    app.state.show_error = show_error
    app.add_middleware(Bounded)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http_error)
    for trouble in (SQLAlchemyError, OSError):
        app.add_exception_handler(trouble, _down)
    app.add_exception_handler(Exception, _broken)


def error(kind: str, message: str, status: int | None = None, retry_after: float | None = None) -> JSONResponse:
    headers = {} if retry_after is None else {"Retry-After": str(math.ceil(retry_after))}
    status = status or STATUS.get(kind, 400)
    return JSONResponse({"error": {"kind": kind, "message": message}}, status, headers)


def _say(
    request: Request, kind: str, message: str, status: int | None = None, retry_after: float | None = None
) -> Response:
    """To a person in the browser, a page; to a program, JSON."""
    answer = error(kind, message, status, retry_after)
    if request.url.path.startswith("/moderate"):
        page: Response = request.app.state.show_error(request, message, answer.status_code)
        page.headers.update({name: value for name, value in answer.headers.items() if name == "retry-after"})
        return page
    return answer


async def _refused(request: Request, refused: Any) -> Response:
    return _say(request, refused.kind, str(refused), retry_after=refused.retry_after)


async def _malformed(request: Request, invalid: Any) -> Response:
    """FastAPI's own answer would repeat what was sent."""
    wrong = sorted({".".join(str(part) for part in found["loc"][1:]) or "body" for found in invalid.errors()})
    named = [field for field in wrong if field in _FIELDS] or ["the request"]
    return _say(request, "malformed", f"This cannot be understood: {', '.join(named)}.", 422)


_MODELS = (Join, SignIn, BanThem, Convict)
_FIELDS = {field for model in _MODELS for field in model.model_fields} | {"before", "limit", "part"}


async def _http_error(request: Request, found: Any) -> Response:
    what = {404: "There is nothing at this address.", 405: "This address is not asked in this way."}
    message = what.get(found.status_code, "This cannot be understood.")
    response = _say(request, "malformed", message, found.status_code)
    response.headers.update(found.headers or {})
    return response


async def _down(request: Request, trouble: Exception) -> Response:
    """The database or the disk. Its own words are for the host's log only."""
    cause = getattr(trouble, "orig", None) or trouble
    _log.error("%s %s failed: %s: %s", request.method, request.url.path, type(cause).__name__, _first_line(cause))
    if advice := request.app.state.desk.storage.explain(cause):
        _log.error("%s", advice)
    message = "The authority cannot get at its records just now.\n1. Try again in a minute; its host can see why."
    return _say(request, "down", message, retry_after=30)


async def _broken(request: Request, bug: Exception) -> JSONResponse:
    return error("down", "The authority made a mistake of its own; its host can see it.", 500)


def _first_line(cause: BaseException) -> str:
    return (str(cause).strip().splitlines() or [""])[0][:300]


class Bounded:
    """Reads a body whole, within bounds of size and time, before anybody looks at it; adds HEADERS to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                ours = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in ours if pair[0] not in own)]
            await send(message)

        try:
            body = await asyncio.wait_for(_read(receive), BODY_WITHIN)
        except asyncio.TimeoutError:  # in Python 3.10 another one than the builtin
            return await error("malformed", "The request did not arrive.", 408)(scope, receive, send_with_headers)
        except ValueError:
            answer = error("malformed", f"A request has {MAX_BODY} bytes at most.", 413)
            return await answer(scope, receive, send_with_headers)
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            return next(messages, None) or await receive()

        await self._app(scope, replay, send_with_headers)


async def _read(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            raise ValueError("too long")
        if not message.get("more_body", False):
            return body
