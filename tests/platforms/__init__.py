"""Environments with the packages of the platforms that volunteers use: Colab, Kaggle, a plain Python.

    python -m tests.platforms colab          makes one for good, and prints its Python
    python -m tests.platforms --fits colab   says by its exit code whether its Python and the disk space are here

Each list beside this file names its date and its Python. uv keeps what it downloaded in a cache and links files from
there, so a second environment takes seconds and next to no disk. Another place: VOLUNTEER_KIT_PLATFORMS.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
NEEDED_GB = 12  # to download a platform's torch with CUDA's libraries; 6 stay, most of them shared with the others
COLAB_VARIABLES = {"COLAB_RELEASE_TAG": "release-colab_20261112", "COLAB_GPU": "1", "COLAB_BACKEND_VERSION": "next"}


class NoPlatform(Exception):
    """Why an environment cannot be made here, and what helps."""


@dataclass(frozen=True)
class Platform:
    """One platform: what its list says, and the environment variables that programs find there."""

    name: str
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The beginning of a benchmark's keys."""
        return re.sub(r"\W+", "_", self.name)

    @property
    def list(self) -> Path:
        return HERE / f"{self.name}.txt"

    @property
    def python(self) -> str:
        """Its version of Python, as in "3.13"."""
        return re.search(r"^# python (\d+\.\d+)$", self.list.read_text(), re.MULTILINE).group(1)


# Kaggle's image is built on Colab's and keeps Colab's variables.
KAGGLE_VARIABLES = COLAB_VARIABLES | {
    "KAGGLE_KERNEL_RUN_TYPE": "Interactive",
    "KAGGLE_URL_BASE": "https://www.kaggle.com",
}
PLATFORMS = {
    platform.name: platform
    for platform in (
        Platform("colab", COLAB_VARIABLES),
        Platform("colab-2026.07", COLAB_VARIABLES),
        Platform("kaggle", KAGGLE_VARIABLES),
        Platform("plain-3.10"),
        Platform("plain-3.11"),
    )
}


def make_environment(platform: Platform, folder: Path, packages: Sequence[str] = ()) -> Path:
    """A fresh virtual environment of the platform's packages, and the Python in it.

    :param folder: where it is made; what is there is replaced
    :param packages: to be installed beside the platform's own, which they may not change
    Raises NoPlatform.
    """
    python = find_python(platform.python)
    check_disk(platform)
    cache = cache_folder()
    with locked(cache / f"{platform.name}.lock"):  # of two runs one downloads
        _uv("venv", "--quiet", "--clear", "--seed", "--python", python, folder)
        links = [part for place in os.environ.get("PIP_FIND_LINKS", "").split() for part in ("--find-links", place)]
        _uv("pip", "install", "--quiet", "--python", folder / "bin/python", *links, "-r", platform.list, *packages)
        _marker(platform).touch()
    return folder / "bin/python"


def cache_folder() -> Path:
    folder = Path(os.environ.get("VOLUNTEER_KIT_PLATFORMS") or Path.home() / ".cache/volunteer_kit/platforms")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_disk(platform: Platform) -> None:
    """Raises NoPlatform where the disk has no room for what is still to be downloaded."""
    folder = cache_folder()
    free_gb = shutil.disk_usage(folder).free / 2**30
    if not _marker(platform).exists() and free_gb < NEEDED_GB:
        raise NoPlatform(
            f"{platform.name} needs {NEEDED_GB} GB of disk for torch, and {folder} has {free_gb:.0f} GB free. "
            "Free some, or name another place: VOLUNTEER_KIT_PLATFORMS=/path"
        )


def find_python(version: str) -> str:
    """An interpreter of this version. Raises NoPlatform."""
    done = subprocess.run([*_UV, "python", "find", "--no-python-downloads", version], capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout.strip()
    for found in sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")):
        return str(found)
    raise NoPlatform(f"Python {version} is not on this machine. Install it so that `python{version}` is found.")


def _marker(platform: Platform) -> Path:
    digest = hashlib.sha256(platform.list.read_bytes()).hexdigest()[:12]
    return cache_folder() / f"{platform.name}-{digest}.complete"


_UV = (sys.executable, "-m", "uv")


def _uv(*arguments: str | Path) -> None:
    variables = {"UV_CACHE_DIR": str(cache_folder() / "uv"), "UV_LINK_MODE": "hardlink"}
    done = subprocess.run(
        [*_UV, *map(str, arguments)], env=os.environ | variables, capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        raise NoPlatform(f"uv {' '.join(map(str, arguments))}\n{done.stderr.strip()}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
