"""Environments of a new host and of a volunteer: Python with this one's packages, and neither the kit nor a checkout.

The packages are links in a folder that a .pth file names; files ending in .pth are not read there, so an editable
installation of the kit in this environment stays unknown.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import venv
from pathlib import Path

OURS = ("volunteer_kit", "volunteer-kit", "__editable__")


class OwnPython:
    """A virtual environment in `folder`; `site` is its site-packages."""

    def __init__(self, folder: Path, packages: Path):
        venv.create(folder, with_pip=True)
        self.folder, self.bin = folder, folder / "bin"
        self.python = self.bin / "python"
        (self.site,) = folder.glob("lib/*/site-packages")
        for path in self.site.glob("*"):
            if path.name.startswith(("setuptools", "_distutils_hack", "pkg_resources", "distutils-")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()  # an old one, before Python 3.12
        (self.site / "packages.pth").write_text(f"{packages}\n")

    def install(self, pinned: str) -> None:
        """One wheel by its address, without an index."""
        command = [self.python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", pinned]
        subprocess.run(command, check=True, timeout=300, env=self.environment())

    def environment(self, **more: str) -> dict[str, str]:
        """Of a process that uses it, with nothing of a checkout."""
        left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        kept = {key: value for key, value in os.environ.items() if key not in left_out}
        return kept | {"PATH": f"{self.bin}:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"} | more

    def place_of_the_kit(self, folder: Path) -> Path | None:
        """Where `import volunteer_kit` finds it, in this folder; None: nowhere."""
        code = "import importlib.util as u; s = u.find_spec('volunteer_kit'); print(s.origin if s else '')"
        done = subprocess.run(
            [self.python, "-c", code], capture_output=True, text=True, check=True, cwd=folder, env=self.environment()
        )
        return Path(done.stdout.strip()) if done.stdout.strip() else None


def links_to_our_packages(folder: Path) -> Path:
    """A folder with links to all packages of this environment but the kit."""
    folder.mkdir()
    for place in site.getsitepackages():
        for path in Path(place).iterdir():
            if not path.name.startswith(OURS) and path.suffix != ".pth" and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
    return folder
