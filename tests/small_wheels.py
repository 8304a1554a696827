"""Wheels of a few bytes, a folder of them as an index, and a platform that brings some packages: for pip, offline.

platform = Platform(tmp_path, {"numpy": "1.0", "torch": "2.11.0+cu128"})
make_wheel(platform.index, "numpy", "2.0")
done = platform.run(script)          # in the platform's own Python, with pip and without any network
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def make_wheel(
    folder: Path, name: str, version: str, requires: Sequence[str] = (), files: Mapping[str, str] | None = None
) -> Path:
    """A wheel that pip installs: one module of the package's name with its version in it, or the `files` given."""
    base = f"{name.replace('-', '_')}-{version}"
    lines = "".join(f"Requires-Dist: {line}\n" for line in requires)
    contents = {
        **(files or {f"{name.replace('-', '_')}.py": f"__version__ = {version!r}\n"}),
        f"{base}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}",
        f"{base}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},{_digest(text)},{len(text)}\n" for path, text in contents.items())
    contents[f"{base}.dist-info/RECORD"] = f"{record}{base}.dist-info/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{base}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            archive.writestr(zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0)), text)
    return wheel


def _digest(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


class Platform:
    """A Python of its own with pip, `brings` as installed packages, and `index`, the only place that pip looks at."""

    def __init__(self, folder: Path, brings: Mapping[str, str], requires: Mapping[str, Sequence[str]] | None = None):
        self.folder, self.index = folder / "python", folder / "index"
        self.index.mkdir(parents=True)
        shutil.copytree(_bare_python(), self.folder, symlinks=True)
        self.python = self.folder / "bin/python"
        self.site = next(self.folder.glob("lib/python3*/site-packages"))
        for name, version in brings.items():
            with zipfile.ZipFile(make_wheel(folder / "brought", name, version, (requires or {}).get(name, ()))) as it:
                it.extractall(self.site)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """Of the platform's Python, in an empty folder; the text that it printed is in stdout."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
        offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.index), "PIP_NO_CACHE_DIR": "1", **environment}
        with tempfile.TemporaryDirectory() as elsewhere:
            return subprocess.run(
                [str(self.python), *arguments], env=clean | offline, cwd=elsewhere, text=True, timeout=240,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def versions(self) -> dict[str, str]:
        """{name: version} of what is installed now, pip itself left out."""
        code = "import importlib.metadata as m; [print(d.metadata['Name'], d.version) for d in m.distributions()]"
        lines = [line.split() for line in self.run("-I", "-W", "ignore", "-c", code).stdout.splitlines()]
        return {name: version for name, version in lines if name not in ("pip", "setuptools")}


@functools.cache
def _bare_python() -> Path:
    """Made once a process; copies of it are cheap. Its interpreter is the real one, not that of an environment."""
    folder = Path(tempfile.mkdtemp(prefix="bare-python-"))
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=240)
    import atexit

    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
