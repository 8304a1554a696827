"""A login as a volunteer's machine has it, played in a process whose Hub is the stand-in."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import time
import traceback
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from volunteer_kit.auth.login import Login, LoginError

READ, WRITE, FINE = "hf_readonlyAAAA", "hf_writesBBBB", "hf_finegrainedCCCC"


@dataclass
class Scene:
    """What a volunteer's machine has; built in the client's process."""

    login: dict[str, Any] = field(default_factory=dict)  # arguments of Login
    explicit: str | None = None
    file: str | None = None  # what `hf auth login` left
    colab: str | None = None  # a token, or the name of the error that userdata.get raises
    kaggle: str | None = None
    variable: str | None = None
    endpoint: str | None = None
    types: str | None = None  # a token that is typed
    browser: bool = False
    cancel: bool = False
    old_client: bool = False  # as huggingface_hub 1.11


@dataclass
class Outcome:
    name: str | None = None
    orgs: tuple[str, ...] = ()
    kind: str | None = None
    text: str = ""
    notes: list[str] = field(default_factory=list)
    link: str | None = None
    code: str | None = None
    output: str = ""  # everything printed, logged, warned, and every repr and traceback
    seconds: float = 0.0


def play(scene: Scene) -> Outcome:
    """Log in as `scene` has it. Runs in the client's process."""
    from volunteer_kit.auth import identity

    printed, outcome, began = io.StringIO(), Outcome(), time.monotonic()
    logging.getLogger().addHandler(handler := logging.StreamHandler(printed))
    logging.getLogger().setLevel(logging.DEBUG)
    login = Login(**scene.login)
    with contextlib.ExitStack() as stack:
        for context in (contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), *_places(scene)):
            stack.enter_context(context)
        stack.enter_context(mock.patch.object(identity, "PAUSES", (0.01, 0.01)))
        try:
            _log_in(login, scene, outcome)
        except LoginError as error:
            outcome.kind, outcome.text = error.kind, str(error)
            printed.write(traceback.format_exc() + repr(error))
        printed.write(repr(login) + repr(login.identity) + str(login.identity) + str(vars(login)))
    logging.getLogger().removeHandler(handler)
    if login.identity:
        outcome.name, outcome.orgs = login.identity.name, login.identity.orgs
    outcome.notes, outcome.output, outcome.seconds = login.notes, printed.getvalue(), time.monotonic() - began
    return outcome


def _log_in(login: Login, scene: Scene, outcome: Outcome) -> None:
    login.find(scene.explicit)
    if scene.browser and login.identity is None and (browser := login.browser()) is not None:
        while browser.is_waiting and not (scene.cancel and browser.link):
            browser.wait(0.05)
        outcome.link, outcome.code = browser.link, browser.code
        if scene.cancel:
            login.close()
            assert browser.wait(10), "it ends soon after it was called off"
        login.from_browser()
        if browser.error is not None:
            raise browser.error
    if scene.types and login.identity is None:
        login.check(scene.types)


def _places(scene: Scene) -> list[contextlib.AbstractContextManager]:
    from huggingface_hub import constants
    from huggingface_hub.utils import _auth

    _auth._OAUTH_REFRESH_CACHE = None
    Path(constants.HF_TOKEN_PATH).unlink(missing_ok=True)
    if scene.file:
        Path(constants.HF_TOKEN_PATH).write_text(scene.file + "\n")
    modules, variables = {}, {"HF_TOKEN": scene.variable or ""}
    if scene.colab:
        modules |= _colab(scene.colab)
        variables["COLAB_RELEASE_TAG"] = "release-colab-external_20261101-060000_RC00"
    if scene.kaggle:
        modules["kaggle_secrets"] = _kaggle(scene.kaggle)
        variables["KAGGLE_KERNEL_RUN_TYPE"] = "Interactive"
    if scene.old_client:
        modules["huggingface_hub.utils._oauth_device"] = None
    endpoint = scene.endpoint or constants.ENDPOINT
    return [
        mock.patch.dict(sys.modules, modules),
        mock.patch.dict(os.environ, variables),
        mock.patch.object(constants, "ENDPOINT", endpoint),
    ]


def _failing(name: str) -> type[Exception]:
    return type(name, (Exception,), {})


def _colab(secret: str) -> dict[str, types.ModuleType]:
    userdata = types.ModuleType("google.colab.userdata")

    def get(key: str) -> str:
        assert key == "HF_TOKEN"
        if secret.startswith("hf_"):
            return secret
        raise _failing(secret)(f"the secret {READ} or so")

    userdata.get = get
    colab, google = types.ModuleType("google.colab"), types.ModuleType("google")
    google.colab, colab.userdata = colab, userdata
    return {"google": google, "google.colab": colab, "google.colab.userdata": userdata}


def _kaggle(secret: str) -> types.ModuleType:
    module = types.ModuleType("kaggle_secrets")

    class UserSecretsClient:
        def get_secret(self, label: str) -> str:
            assert label == "HF_TOKEN"
            if secret.startswith("hf_"):
                return secret
            raise _failing(secret)("no")

    module.UserSecretsClient = UserSecretsClient
    return module
