"""Where a token may lie already, in the order in which they are tried."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from volunteer_kit.platforms import platform_name

SECRET = "HF_TOKEN"  # its name in Colab's and Kaggle's secrets and in the environment


class Found(NamedTuple):
    """A token, or why there is none where one could be."""

    where: str
    token: str | None
    note: str = ""


def look(explicit: str | None = None) -> Iterator[Found]:
    """Each place that has a token, or has something to say; lazily, since asking a platform may show a dialog."""
    if explicit:
        yield Found("the token you gave", explicit)
    for source in (_machine, _platform, _environment):
        found = source()
        if found is not None and (found.token or found.note):
            yield found


def _machine() -> Found | None:
    """The file that `hf auth login` writes; a browser login in it is renewed by the client when it is about to end."""
    try:
        from huggingface_hub import constants
        from huggingface_hub.utils import _auth
    except ImportError:
        return None
    where = "the login on this machine"
    read: Callable[[], str | None] = getattr(_auth, "_get_token_from_file_refreshed", None) or (
        lambda: Path(constants.HF_TOKEN_PATH).read_text(encoding="utf-8").strip()
    )
    try:
        return Found(where, read())
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        return Found(where, None, f"{where} could not be read")


def _platform() -> Found | None:
    """The secrets of the platform that this is; the other's would wait for a dialog that never comes."""
    secrets_of = {"colab": _colab, "kaggle": _kaggle}
    return secrets_of.get(platform_name(), lambda: None)()


def _colab() -> Found | None:
    """Raises nothing: not granted, not there, no answer in time are told in the note."""
    where = "Colab's secrets"
    try:
        userdata = importlib.import_module("google.colab.userdata")
    except ImportError:
        return None
    try:
        return Found(where, userdata.get(SECRET))
    except Exception as error:  # its classes differ between Colab's versions; their names do not
        name = type(error).__name__
        if "NotFound" in name:
            return None
        if "Access" in name:
            return Found(where, None, f"{where}: this notebook may not read {SECRET} (key icon on the left, switch on)")
        if "Timeout" in name:
            return Found(where, None, f"{where} did not answer in time")
        return Found(where, None, f"{where} could not be read ({name})")


def _kaggle() -> Found | None:
    where = "Kaggle's secrets"
    try:
        client = importlib.import_module("kaggle_secrets").UserSecretsClient
    except (ImportError, AttributeError):
        return None
    try:
        return Found(where, client().get_secret(SECRET))
    except Exception as error:
        name = type(error).__name__
        if "NotFound" in name or "No user secrets exist" in str(error):
            return None
        if "Connection" in name or "Backend" in name:
            return Found(where, None, f"{where} did not answer (is the notebook's internet switched on?)")
        return Found(where, None, f"{where} could not be read ({name}; Add-ons > Secrets attaches {SECRET})")


def _environment() -> Found | None:
    return Found(SECRET, os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"))
