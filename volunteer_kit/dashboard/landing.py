"""The host's page for people, at its root and at the run's link: what is trained, who is here, how to join.

It is served by the authority, at the one address that a host gives away, together with the notebook, the kit's wheel
and, under /dashboard/, the dashboard.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, PlainTextResponse

from volunteer_kit import __version__
from volunteer_kit.dashboard.app import FOR_OTHER_SITES, HEADERS, POLL, Printed, make_app, tagged
from volunteer_kit.dashboard.board import Board, Edition
from volunteer_kit.dashboard.page import by_epoch, headline, page_environment, static_tag
from volunteer_kit.dashboard.preview import preview
from volunteer_kit.dashboard.state import State
from volunteer_kit.run_sizes import parameters_of, state_bytes, step_bytes
from volunteer_kit.runs import RunConfig
from volunteer_kit.ways_in import NOTEBOOK, read_offer
from volunteer_kit.widgets import words

HTML, YAML = "text/html", ("application/yaml", "text/yaml", "application/x-yaml", "text/x-yaml")
QUALITY = re.compile(r"0(\.[0-9]{0,3})?|1(\.0{0,3})?")
SHOWN_PICTURES, SHOWN_PEOPLE = 6, 24
WHEEL = re.compile(r"volunteer_kit-[A-Za-z0-9.+!_]{1,60}-py3-none-any\.whl")


class About(NamedTuple):
    """The run file in sentences for a visitor."""

    trained: str
    who: str
    costs: str
    has_run_file: bool


def about(config: RunConfig, *, has_run_file: bool = False) -> About:
    """Sentences of a run; no path or setting of the host's machine is in them."""
    return About(_trained(config), _who(config), _costs(config), has_run_file)


def _trained(config: RunConfig) -> str:
    size = _large(parameters_of(config))
    if not config.draws:
        return f"Members train {size} parameters of a language model together, each on data of its own."
    data = config.data
    source = "pictures with captions that the run's host chose"
    if data.kind == "scenes":
        source = "coloured shapes that the program draws itself"
    elif data.kind == "hub" and data.dataset:
        source = f"the data set {data.dataset.partition('@')[0]} of the Hugging Face Hub"
    return (
        f"A transformer of {size} parameters learns to draw what a caption says, from {source}. Everybody's machine "
        "works on its own samples; every few moments all of them average what they learned."
    )


def _who(config: RunConfig) -> str:
    authority = config.authority
    if authority is None or authority.open:
        return "Everybody with an account at Hugging Face may join; it is free."
    if authority.organization:
        return f"Members of {authority.organization} at Hugging Face may join, and those whom its moderators add."
    return "Those may join whom the run's host has listed, by their names at Hugging Face. Ask the host."


def _costs(config: RunConfig) -> str:
    return (
        f"{words.size(state_bytes(config))} to download at first, about {words.size(step_bytes(config))} with each "
        "step of the swarm, and the power of a full load."
    )


def _large(value: int) -> str:
    return f"{value / 1e6:,.1f} million" if value >= 1e6 else f"{value:,}"


class Landing:
    """The pages and files of a host's root, over a board.

    :param folder: the host's, with join.ipynb and kit/
    """

    def __init__(self, board: Board, folder: Path, about: About, run_file: Path | None = None):
        self._board, self._folder, self._about, self._run_file = board, folder, about, run_file
        self._pages = Printed(self._print)
        self._lock = threading.Lock()
        self._drawn: tuple[tuple[str, ...], bytes] = ((), b"")  # the addresses of the pictures, and the preview

    def page(self, request: Request) -> Response:
        """The page, as it is now."""
        response = tagged(
            request, self._board.edition(), self._pages, "text/html; charset=utf-8", "Accept, Accept-Encoding"
        )
        response.headers.update(HEADERS)
        return response

    def install(self, app: FastAPI) -> None:
        """Add what lies beside the page to the host's application."""
        app.add_api_route("/og.png", self._preview, methods=["GET", "HEAD"], include_in_schema=False)
        app.add_api_route(f"/{NOTEBOOK}", self._notebook, methods=["GET", "HEAD"], include_in_schema=False)
        app.add_api_route("/kit/{name}", self._wheel, methods=["GET", "HEAD"], include_in_schema=False)
        app.mount("/dashboard", make_app(self._board, self._run_file))

    def _print(self, edition: Edition) -> bytes:
        return render(edition.state, self._about, self._dashboard(), edition.tag).encode()

    def _dashboard(self) -> str:
        offer = read_offer(self._folder)
        return (offer and offer.dashboard) or "/dashboard/"

    def _preview(self) -> Response:
        """The picture that messengers and social networks show beside a link."""
        state = self._board.state()
        shown = newest(state)
        key = tuple(image["url"] for image in shown)
        with self._lock:
            if self._drawn[0] != key or not self._drawn[1]:
                paths = [self._board.picture(int(image["url"].split("/")[1].split("-")[0])) for image in shown]
                self._drawn = key, preview(state["run"]["run_id"], [path for path in paths if path is not None])
            content = self._drawn[1]
        headers = {"Cache-Control": "public, max-age=600", **FOR_OTHER_SITES}
        return Response(content, media_type="image/png", headers=headers)

    def _notebook(self) -> Response:
        path = self._folder / NOTEBOOK
        if not path.is_file():
            return PlainTextResponse("This run has no notebook.", 404)
        kept = {"Cache-Control": "no-cache"}
        return FileResponse(path, media_type="application/x-ipynb+json", filename=NOTEBOOK, headers=kept)

    def _wheel(self, name: str) -> Response:
        path = self._folder / "kit" / name
        if not WHEEL.fullmatch(name) or not path.is_file():
            return PlainTextResponse("There is no such wheel.", 404)
        return FileResponse(path, media_type="application/zip", headers={"Cache-Control": "no-cache"})


def render(state: State, about: About, dashboard: str = "/dashboard/", tag: str = "") -> str:
    """HTML of the page.

    :param dashboard: address of the dashboard
    :param tag: of the state; an open page asks for another one only
    """
    run, now = state["run"], state["now"]
    images = newest(state)
    here = [leader for leader in state["leaderboard"] if leader["here"]]
    named = [leader for leader in here if not leader["hidden"]][:SHOWN_PEOPLE]
    share = now["epoch"] / run["total_epochs"] if now["epoch"] and run["total_epochs"] else None
    return page_environment().get_template("landing.html").render(
        state=state, run=run, now=now, about=about, dashboard=dashboard, tag=tag, poll=POLL, images=images,
        here=named, more_here=len(here) - len(named), headline=headline(state), standing=standing(state),
        share=None if share is None else min(1.0, share), summary=_summary(run, about), version=__version__,
        assets=static_tag(), preview=_digest(images),
    )  # fmt: skip


def newest(state: State) -> list[Mapping[str, Any]]:
    """The pictures of the newest step that has any."""
    groups = by_epoch(state["images"])
    return list(groups[0][1][:SHOWN_PICTURES]) if groups else []


def standing(state: State) -> str:
    """How the run stands, in a sentence."""
    run, now = state["run"], state["now"]
    is_new = not now["epoch"] and not now["volunteers"] and not state["accounts"]
    if run["status"] == "waiting" or (run["status"] == "running" and is_new):
        return "Ready: waiting for the first volunteer"
    if run["status"] == "finished":
        return f"Finished after {words.number(run['total_epochs'])} steps. Thanks to everybody who took part!"
    at = f"step {words.number(now['epoch'])} of {words.number(run['total_epochs'])}"
    if run["status"] == "silent":
        return f"No news from the host's monitor; last seen at {at}"
    if not now["volunteers"]:
        return f"No volunteer is training at the moment; {at}"
    return f"{words.count(now['volunteers'], 'volunteer')} training now, {at}"


def _summary(run: Mapping[str, Any], about: About) -> str:
    """For search engines and for messengers, which cut it at about 200 characters."""
    said = run["description"].rstrip(".")
    return f"{said}. Lend a machine for as long as you like." if said else about.trained


def _digest(images: list[Mapping[str, Any]]) -> str:
    return hashlib.sha256("".join(image["url"] for image in images).encode()).hexdigest()[:10]


def page_for(landing: Landing, *, has_run_file: bool = True) -> Callable[[Request], Response | None]:
    """Decides which requests for the root and /run.yaml get the page; None means the run file.

    A browser gets the page at both. A program that likes both equally gets the run file at /run.yaml, and the page at
    the root: what makes previews of links says nothing.
    """

    def choose(request: Request) -> Response | None:
        is_root, is_raw = request.url.path == "/", "raw" in request.query_params
        if not has_run_file and is_root:
            return landing.page(request)
        html, yaml = preferences(",".join(request.headers.getlist("accept")))
        is_page = not is_raw and html > 0 and (html > yaml or (is_root and html == yaml))
        return landing.page(request) if is_page else None

    return choose


def preferences(accept: str) -> tuple[float, float]:
    """How much the header Accept (RFC 9110, 12.5.1) asks for HTML, and for YAML: 0 to 1 each. Nothing asks for all.
    A range that is written wrong does not count."""
    qualities: dict[str, float] = {}
    for item in accept.lower().split(",") if accept.strip() else ["*/*"]:
        kind, *parameters = (part.strip() for part in item.split(";"))
        quality = next((part.partition("=")[2] for part in parameters if part.startswith("q=")), "1")
        if QUALITY.fullmatch(quality):
            qualities[kind] = max(float(quality), qualities.get(kind, 0.0))
    html, *yaml = (
        next((qualities[of] for of in (kind, f"{kind.partition('/')[0]}/*", "*/*") if of in qualities), 0.0)
        for kind in (HTML, *YAML)
    )
    return html, max(yaml)
