"""Routes: the page, its files, JSON and Prometheus. Read only; anybody may ask, so nothing here costs much."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Scope

from volunteer_kit.dashboard.board import Board, Edition
from volunteer_kit.dashboard.page import STATIC, render, static_tag
from volunteer_kit.dashboard.prometheus import exposition

POLL = 2.0  # s between two looks of an open page; unchanged is answered with 304 and no body
KEPT = "public, max-age=86400, immutable"  # what is at an address that changes with its content
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
FOR_OTHER_SITES = {"Cross-Origin-Resource-Policy": "cross-origin"}  # of public pictures: forums and READMEs show them


def make_app(board: Board, run_file: Path | None = None) -> FastAPI:
    """The dashboard's application over a board.

    :param run_file: served at /run.yaml, so that `join` takes the dashboard's address too
    """
    app = FastAPI(title="volunteer-kit dashboard", docs_url=None, redoc_url=None, openapi_url=None)
    pages, states, samples = Printed(_page), Printed(_json), Printed(_metrics)

    @app.middleware("http")
    async def secure(request: Request, call_next):
        response = await call_next(request)
        response.headers.update(HEADERS)
        return response

    @app.api_route("/", methods=["GET", "HEAD"])
    def page(request: Request) -> Response:
        return tagged(request, board.edition(), pages, "text/html; charset=utf-8")

    @app.api_route("/api/state", methods=["GET", "HEAD"])
    def state(request: Request) -> Response:
        return tagged(request, board.edition(), states, "application/json")

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    def metrics() -> Response:
        return Response(samples.of(board.edition()).plain, media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/pictures/{number}-{time}.png", methods=["GET", "HEAD"])
    def picture(number: int, time: int) -> Response:
        path = board.picture(number) if 0 < number < 2**53 else None
        if path is None:
            return PlainTextResponse("There is no such picture.", 404)
        return FileResponse(path, media_type="image/png", headers={"Cache-Control": KEPT, **FOR_OTHER_SITES})

    if run_file is not None:

        @app.api_route("/run.yaml", methods=["GET", "HEAD"])
        def run_yaml() -> Response:
            """As it is now: the first peers' addresses in it may change."""
            if not run_file.is_file():
                return PlainTextResponse("The run file is not there just now.", 404)
            return FileResponse(run_file, media_type="text/yaml", headers={"Cache-Control": "no-cache"})

    @app.exception_handler(RequestValidationError)
    async def unknown(request: Request, error: RequestValidationError) -> Response:
        """FastAPI's own answer would repeat what was asked."""
        return PlainTextResponse("There is no such picture.", 404)

    app.mount("/static", _Static(directory=STATIC), name="static")
    return app


class _Static(StaticFiles):
    """Files that browsers keep where the address names their version: ?v=TAG."""

    def file_response(self, full_path: Any, stat_result: Any, scope: Scope, status_code: int = 200) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        if scope["query_string"] == f"v={static_tag()}".encode():
            response.headers["Cache-Control"] = KEPT
        return response


class _Text(NamedTuple):
    plain: bytes
    compressed: bytes


class Printed:
    """The newest edition as text, made once for all who ask."""

    def __init__(self, make: Callable[[Edition], bytes]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._tag, self._text = "", _Text(b"", b"")

    def of(self, edition: Edition) -> _Text:
        with self._lock:
            if self._tag != edition.tag:
                plain = self._make(edition)
                self._tag, self._text = edition.tag, _Text(plain, gzip.compress(plain, 5))
            return self._text


def _page(edition: Edition) -> bytes:
    return render(edition.state, tag=edition.tag, problem=edition.problem, poll=POLL).encode()


def _metrics(edition: Edition) -> bytes:
    return exposition(lambda: edition.state)


def _json(edition: Edition) -> bytes:
    return json.dumps(edition.state, allow_nan=False, ensure_ascii=False).encode()


def tagged(
    request: Request, edition: Edition, printed: Printed, media_type: str, vary: str = "Accept-Encoding"
) -> Response:
    """304 for those who have it already; compressed for those who can."""
    headers = {"ETag": f'W/"{edition.tag}"', "Cache-Control": "no-cache", "Vary": vary}
    if edition.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    text = printed.of(edition)
    content = text.plain
    if "gzip" in request.headers.get("accept-encoding", ""):
        content = text.compressed
        headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers, media_type=media_type)
