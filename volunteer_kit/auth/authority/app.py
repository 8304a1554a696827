"""The authority as an ASGI application."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import FastAPI
from fastapi.responses import FileResponse, RedirectResponse

from volunteer_kit.auth.access_token import KeyFolder
from volunteer_kit.auth.authority import api, hub_page, page, wire
from volunteer_kit.auth.authority.convictions import Convictions
from volunteer_kit.auth.authority.desk import Desk
from volunteer_kit.auth.authority.moderators import Moderators
from volunteer_kit.auth.authority.settings import Settings
from volunteer_kit.auth.authority.storage import Storage


def create_app(
    settings: Settings, storage: Storage, keys: KeyFolder, clock: Callable[[], float] = time.time
) -> FastAPI:
    """`clock`: s since 1970."""
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

    @app.get("/", include_in_schema=False)
    async def front() -> RedirectResponse:
        return RedirectResponse("/moderate")

    if settings.run_file is not None:

        @app.get("/run.yaml", include_in_schema=False)
        def run_file() -> FileResponse:
            """As it is now: the first peers' addresses in it may change."""
            return FileResponse(settings.run_file, media_type="text/yaml", headers={"Cache-Control": "no-cache"})

    return app
