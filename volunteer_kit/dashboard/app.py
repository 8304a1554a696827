"""Routes: the page, its files, JSON and Prometheus. Read only; anybody may ask, so nothing here costs much."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST

from volunteer_kit.dashboard.board import Board, Edition
from volunteer_kit.dashboard.page import STATIC, render
from volunteer_kit.dashboard.prometheus import exposition

POLL = 2.0  # s between two looks of an open page; unchanged is answered with 304 and no body
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def make_app(board: Board) -> FastAPI:
    """The dashboard's application over a board."""
    app = FastAPI(title="volunteer-kit dashboard", docs_url=None, redoc_url=None, openapi_url=None)
    printed = _Printed()

    @app.middleware("http")
    async def secure(request: Request, call_next):
        response = await call_next(request)
        response.headers.update(HEADERS)
        return response

    @app.api_route("/", methods=["GET", "HEAD"])
    def page(request: Request) -> Response:
        edition = board.edition()
        return _tagged(request, edition, lambda: printed.page(edition), "text/html; charset=utf-8")

    @app.api_route("/api/state", methods=["GET", "HEAD"])
    def state(request: Request) -> Response:
        edition = board.edition()
        return _tagged(request, edition, lambda: _json(edition), "application/json")

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    def metrics() -> Response:
        return Response(exposition(board.state), media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/pictures/{number}-{time}.png", methods=["GET", "HEAD"])
    def picture(number: int, time: int) -> Response:
        path = board.picture(number) if 0 < number < 2**53 else None
        if path is None:
            return PlainTextResponse("There is no such picture.", 404)
        cached = {"Cache-Control": "public, max-age=86400, immutable"}
        return FileResponse(path, media_type="image/png", headers=cached)

    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    return app


class _Printed:
    """The page of the newest edition, so that each is rendered once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tag, self._page = "", b""

    def page(self, edition: Edition) -> bytes:
        with self._lock:
            if self._tag != edition.tag:
                html = render(edition.state, tag=edition.tag, problem=edition.problem, poll=POLL)
                self._tag, self._page = edition.tag, html.encode()
            return self._page


def _json(edition: Edition) -> bytes:
    return json.dumps(edition.state, allow_nan=False, ensure_ascii=False).encode()


def _tagged(request: Request, edition: Edition, body: Callable[[], bytes], media_type: str) -> Response:
    """304 for those who have it already; compressed for those who can."""
    headers = {"ETag": f'W/"{edition.tag}"', "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if edition.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    content = body()
    if "gzip" in request.headers.get("accept-encoding", ""):
        content = gzip.compress(content, 5)
        headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers, media_type=media_type)
