"""An authority at work: the real application on a stand-in Hub, in this process or served over real HTTP."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from cryptography.hazmat.primitives.asymmetric import rsa
from fastapi import FastAPI

from tests.hub import Hub
from volunteer_kit.auth import identity
from volunteer_kit.auth.access_token import KeyFolder, Trust
from volunteer_kit.auth.authority.app import create_app
from volunteer_kit.auth.authority.server import serve
from volunteer_kit.auth.authority.settings import Settings
from volunteer_kit.auth.authority.storage import Storage
from volunteer_kit.auth.moderation import Allowlist
from volunteer_kit.auth.proof import join_claim, prove, public_text, refresh_claim

RUN = "demo"
ALLOWLIST = Allowlist.of("cats", users=["Lena"], moderators=["Mona", "Max"])
URL = "http://127.0.0.1:8400"


@cache
def key(number: int) -> rsa.RSAPrivateKey:
    """A peer's; making one takes a while, so tests share them."""
    return rsa.generate_private_key(65537, 2048)


@contextlib.contextmanager
def this_hub(hub: Hub) -> Iterator[Hub]:
    """For the client in this process; it takes its address from the environment once."""
    from huggingface_hub import constants

    with mock.patch.object(constants, "ENDPOINT", hub.url), mock.patch.object(identity, "PAUSES", (0.01, 0.01)):
        yield hub


def add_person(hub: Hub, name: str, *orgs: str, role: str = "read") -> str:
    """:returns: a token of this person's settings"""
    token = f"hf_{name}{role}Secret"
    hub.tokens[token], hub.rights[token] = name, {"displayName": "t", "role": role}
    hub.orgs[name] = list(orgs)
    return token


@dataclass
class Authority:
    app: FastAPI
    keys: KeyFolder
    storage: Storage

    @property
    def public_key(self) -> str:
        return self.keys.root_public

    @property
    def trust(self) -> Trust:
        return Trust.of(RUN, self.public_key)


def make_authority(
    folder: Path, database: str | None = None, *, allowlist: Allowlist = ALLOWLIST, url: str = URL,
    clock: Any = time.time, page_for: Any = lambda request: None, **settings: Any,
) -> Authority:  # fmt: skip
    keys = KeyFolder(folder / "keys")
    keys.create(RUN)
    storage = Storage(database or folder / "authority.sqlite", RUN)
    about = Settings(RUN, url, allowlist, **settings)
    return Authority(create_app(about, storage, keys, clock, page_for=page_for), keys, storage)


@contextlib.contextmanager
def served(authority: Authority, port: int = 0) -> Iterator[str]:
    """Over HTTP, in a thread. Gives the address."""
    ready, stop, at = threading.Event(), threading.Event(), []

    def on_ready(url: str) -> None:
        at.append(url)
        ready.set()

    arguments = {"port": port, "on_ready": on_ready, "stop": stop}
    thread = threading.Thread(target=serve, args=(authority.app,), kwargs=arguments)
    thread.start()
    try:
        assert ready.wait(120), "the authority did not start"
        yield at[0]
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive(), "it ends soon after it was told to"


def join_body(token: str, number: int = 0, *, run_id: str = RUN, at: float | None = None) -> dict[str, Any]:
    moment = int(time.time() if at is None else at)
    proof = prove(key(number), join_claim(run_id, moment, token))
    return {**_body(number, run_id, moment, proof), "hf_token": token, "scope": None}


def refresh_body(number: int = 0, *, run_id: str = RUN, at: float | None = None) -> dict[str, Any]:
    moment = int(time.time() if at is None else at)
    return _body(number, run_id, moment, prove(key(number), refresh_claim(run_id, moment)))


def _body(number: int, run_id: str, moment: int, proof: str) -> dict[str, Any]:
    public_key = public_text(key(number)).decode()
    return {"run_id": run_id, "public_key": public_key, "time": moment, "proof": proof}
