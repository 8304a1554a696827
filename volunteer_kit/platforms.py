"""Which platform lends this machine. Every part of the kit that asks, asks here."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Mapping
from typing import Literal

PlatformName = Literal["kaggle", "colab", "binder", "own"]

# Kaggle first: its image is built on Colab's, and sets COLAB_RELEASE_TAG too. KAGGLE_USERNAME and KAGGLE_KEY are no
# sign of Kaggle: people set them anywhere, to download data from it.
SIGNS: tuple[tuple[PlatformName, tuple[str, ...], str], ...] = (
    ("kaggle", ("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE", "KAGGLE_CONTAINER_NAME"), "kaggle_secrets"),
    ("colab", ("COLAB_RELEASE_TAG",), "google.colab"),
    ("binder", ("BINDER_SERVICE_HOST", "BINDER_LAUNCH_HOST"), ""),
)


def platform_name(environment: Mapping[str, str] | None = None, modules: Container[str] | None = None) -> PlatformName:
    """The platform by the variables that it sets and the module that it loads into a notebook's kernel.

    :param environment: None: this process's
    :param modules: names of loaded modules; None: this process's
    """
    environment = os.environ if environment is None else environment
    modules = sys.modules if modules is None else modules
    for name, variables, module in SIGNS:
        if any(variable in environment for variable in variables) or module in modules:
            return name
    return "own"
