"""The kit as an installed wheel, in environments that lack chosen packages; what they have are links to the tests' own.

Real venvs, a real pip, the real wheel: nothing is patched. pip finds no index, only what a test lays before it.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SITE = Path(sysconfig.get_path("purelib"))
NOT_OF_A_SOURCE = (".git", ".venv*", "*.egg-info", "__pycache__", "build", "dist", "demo-out", "results", "corpus",
                   ".hypothesis", ".*_cache")  # fmt: skip
UPSTREAM = {"dalle-pytorch": ("1.6.6", "dalle_pytorch"), "taming-transformers-rom1504": ("0.0.6", "taming")}


def name_of(line: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9_.-]+", line)[0]).lower()


def build_wheel(folder: Path) -> Path:
    """The kit's wheel, of a copy of the checkout, so that nothing is left in it."""
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*NOT_OF_A_SOURCE))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source],
        check=True, timeout=280, env=environment(),
    )  # fmt: skip
    shutil.rmtree(source)
    return next(folder.glob("volunteer_kit-*.whl"))


def stand_ins(folder: Path, **more: str) -> Path:
    """A folder with wheels that have the names and versions of upstream's, and next to nothing in them.

    :param more: others, version by name
    """
    folder.mkdir(exist_ok=True)
    for name, (version, module) in {**UPSTREAM, **{name: (version, name) for name, version in more.items()}}.items():
        stand_in(folder, name, version, module)
    return folder


def stand_in(folder: Path, name: str, version: str, module: str, *requires: str) -> Path:
    """A wheel with a name, a version, what it requires, and one empty module."""
    stem = f"{name.replace('-', '_')}-{version}"
    about = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    path = f"{module.replace('.', '/')}/__init__.py"
    files = {
        path: "",
        f"{stem}.dist-info/METADATA": "\n".join([*about, ""]),
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{stem}.dist-info/RECORD"] = "".join(f"{name},,\n" for name in files)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
    return folder / f"{stem}-py3-none-any.whl"


def environment(**more: str) -> dict[str, str]:
    """For a child: neither this checkout nor an index of packages."""
    taken = ("PYTHONPATH", "PYTHONHOME", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "VIRTUAL_ENV")
    own = {name: value for name, value in os.environ.items() if name not in taken}
    return {
        **own, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:1", "COLUMNS": "200", "OMP_NUM_THREADS": "1", **more,
    }  # fmt: skip


def with_what_they_need(*names: str) -> set[str]:
    """These packages, and all that they need in turn."""
    found, todo = set(), [*names]
    while todo:
        name = name_of(todo.pop())
        if name in found:
            continue
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # for another Python or system
            continue
        found.add(name)
        todo += [line for line in lines if "extra ==" not in line]
    return found


def link_packages(target: Path, *, without: Iterable[str] = (), only: Iterable[str] | None = None) -> None:
    """Links in `target` to the packages of this Python. :param without, only: names of distributions"""
    target.mkdir(parents=True, exist_ok=True)
    tops = {}  # distribution -> its entries in site-packages
    for distribution in importlib.metadata.distributions(path=[str(SITE)]):
        parts = {file.parts[0] for file in distribution.files or ()}
        tops[name_of(distribution.metadata["Name"])] = parts - {"..", "__pycache__"}
    away = {"volunteer-kit", *(without if only is None else {*tops} - {*only})}
    kept = set().union(*(parts for name, parts in tops.items() if name not in away))
    hidden = set().union(*(parts for name, parts in tops.items() if name in away)) - kept
    for entry in SITE.iterdir():
        is_own = "volunteer_kit" in entry.name or entry.name.startswith("__editable__")
        listed = entry.name in kept or (only is None and entry.name not in hidden)
        if listed and not is_own and not (target / entry.name).exists():
            (target / entry.name).symlink_to(entry)


class Installed:
    """A Python that the kit's wheel is installed in.

    :param only, without: the other packages in it, as link_packages() takes them; None: none but pip
    :param base: False: a virtual environment. True: a Python that is none, as a system's, its standard library a
        folder of links, so that a test can mark it as the system's own
    :param user: the kit is installed with --user, and the site-packages hold the rest
    """

    def __init__(
        self, folder: Path, wheel: Path, *, without: Iterable[str] = (), only: Iterable[str] | None = None,
        base: bool = False, user: bool = False,
    ):  # fmt: skip
        self.folder = folder
        self.more = {"PYTHONUSERBASE": str(folder / "user")}
        if base:
            self.stdlib = folder / "system" / "lib" / Path(sysconfig.get_path("stdlib")).name
            self._make_system()
            self.site = self.stdlib / "site-packages"
            self.python, bin_folder = Path(os.path.realpath(sys.executable)), folder / "system" / "bin"
        else:
            venv.EnvBuilder(symlinks=True).create(folder / "env")
            self.python, bin_folder = folder / "env" / "bin" / "python", folder / "env" / "bin"
            self.site = next((folder / "env" / "lib").glob("python*/site-packages"))
        link_packages(self.site, without=without, only=only)
        (folder / "cwd").mkdir()
        place = folder / "user" / "lib" / self.site.parent.name / "site-packages" if user else self.site
        self.script = (folder / "user" / "bin" if user else bin_folder) / "volunteer-kit"
        self._unpack(wheel, place)

    def _make_system(self) -> None:
        real = Path(sysconfig.get_path("stdlib"))
        self.stdlib.mkdir(parents=True)
        for entry in real.iterdir():
            if entry.name not in ("site-packages", "EXTERNALLY-MANAGED"):
                (self.stdlib / entry.name).symlink_to(entry)
        self.more["PYTHONHOME"] = str(self.folder / "system")

    def _unpack(self, wheel: Path, place: Path) -> None:
        """The same as pip does, in a tenth of the time; .ci/package has pip do it."""
        with zipfile.ZipFile(wheel) as content:
            content.extractall(place)
        self.script.parent.mkdir(parents=True, exist_ok=True)
        self.script.write_text(f"#!{self.python}\nfrom volunteer_kit.__main__ import main\nmain()\n")
        self.script.chmod(0o755)

    def mark_as_the_systems(self) -> None:
        (self.stdlib / "EXTERNALLY-MANAGED").write_text("[externally-managed]\nError=This one is Debian's.\n")

    def pip(self, *words: str) -> subprocess.CompletedProcess:
        return self._run(self.python, "-m", "pip", *words)

    def kit(self, *words: str, **more: str) -> subprocess.CompletedProcess:
        """`volunteer-kit WORDS`, in an empty folder."""
        return self._run(self.python, self.script, *words, **more)

    def code(self, text: str, **more: str) -> subprocess.CompletedProcess:
        return self._run(self.python, "-c", text, **more)

    def left(self) -> list[str]:
        """The files in the folder that commands ran in."""
        return sorted(path.name for path in (self.folder / "cwd").iterdir())

    def _run(self, *command: str | Path, **more: str) -> subprocess.CompletedProcess:
        path = {"PATH": f"{self.python.parent}:/usr/bin:/bin"}
        return subprocess.run(
            [*map(str, command)], capture_output=True, text=True, timeout=280, cwd=self.folder / "cwd",
            env=environment(**path, **self.more, **more),
        )  # fmt: skip
