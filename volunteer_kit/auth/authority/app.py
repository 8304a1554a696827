"""The authority as an ASGI application."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response
from starlette.exceptions import HTTPException

from volunteer_kit.auth.access_token import KeyFolder
from volunteer_kit.auth.authority import api, hub_page, page, wire
from volunteer_kit.auth.authority.convictions import Convictions
from volunteer_kit.auth.authority.desk import Desk
from volunteer_kit.auth.authority.moderators import Moderators
from volunteer_kit.auth.authority.settings import Settings
from volunteer_kit.auth.authority.storage import Storage


def create_app(
    settings: Settings,
    storage: Storage,
    keys: KeyFolder,
    clock: Callable[[], float] = time.time,
    *,
    page_for: Callable[[Request], Response | None] = lambda request: None,
) -> FastAPI:
    """The root and /run.yaml are a page for people and the run file for programs.

    :param clock: s since 1970
    :param page_for: the page, where one is due to whoever asks
    """
    app = FastAPI(
        title=f"Authority of {settings.run_id}", openapi_url="/v1/openapi.json", docs_url=None, redoc_url=None
    )
    app.state.desk = Desk(settings, storage, keys, clock)
    app.state.moderators = Moderators(app.state.desk)
    app.state.convictions = Convictions(app.state.desk)
    app.state.begun = hub_page.Begun()
    wire.install(app, page.error_page)
    for router in (api.router, api.moderate, hub_page.router, page.router):
        app.include_router(router)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    @app.api_route("/run.yaml", methods=["GET", "HEAD"], include_in_schema=False)
    def front(request: Request) -> Response:
        """The run file as it is now: the first peers' addresses in it may change."""
        if (page_of_run := page_for(request)) is not None:
            return page_of_run
        if settings.run_file is None or not settings.run_file.is_file():
            raise HTTPException(404)
        kept = {"Cache-Control": "no-cache", "Vary": "Accept"}
        return FileResponse(settings.run_file, media_type="text/yaml", headers=kept)

    return app
