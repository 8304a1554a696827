"""Packages of another time beside the installed ones, for programs that are started with `PYTHONPATH=FOLDER`.

`python -m tests.older_packages NAME ...` fetches the sets of these names into the cache folder and prints where they
are, joined as PYTHONPATH wants them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

IPYTHON_7 = (
    "ipykernel==6.17.1", "ipython==7.34.0", "traitlets==5.7.1", "jupyter_client==7.4.9", "entrypoints==0.4",
    "backcall==0.2.0", "pickleshare==0.7.5", "ipython-genutils==0.2.0", "nest-asyncio==1.6.0", "decorator==4.4.2",
)  # fmt: skip
# Name -> (a package that has to be there, all of them). They are installed without their requirements.
SETS: dict[str, tuple[str, Sequence[str]]] = {
    # what Colab and Kaggle show a notebook with, November 2026 (tests/platforms has the whole lists)
    "colab-kernel": ("ipykernel", (*IPYTHON_7, "ipywidgets==7.7.1", "widgetsnbextension==3.6.10")),
    "kaggle-kernel": ("ipykernel", (*IPYTHON_7, "ipywidgets==8.1.5", "comm==0.2.3")),
    # what reads data and logs in on Kaggle
    "kaggle-data": ("pyarrow", ("pyarrow==18.1.0", "datasets==4.0.0", "huggingface_hub==1.11.0")),
    # the last transformers 4, and those of its requirements that it wants older than ours
    "transformers-4": (
        "transformers",
        ("transformers==4.57.6", "huggingface_hub==0.36.2", "tokenizers==0.22.2", "datasets==4.8.5"),
    ),
}


def folder(name: str) -> Path:
    """The folder of a set of packages; pip fetches it if it is not there."""
    there, packages = SETS[name]
    version = f"{name}-{sys.version_info[0]}.{sys.version_info[1]}"
    home = Path(os.environ.get("VOLUNTEER_KIT_OLDER") or Path.home() / ".cache/volunteer_kit/older") / version
    if (home / there).is_dir():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as fresh:
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", fresh]
        subprocess.run([*install, *packages], check=True, timeout=600, stdout=sys.stderr)
        os.chmod(fresh, 0o755)
        try:
            os.rename(fresh, home)
        except OSError:  # another process was first
            if not (home / there).is_dir():
                raise
        else:
            os.mkdir(fresh)  # for the context manager to remove
    return home


if __name__ == "__main__":
    print(os.pathsep.join(str(folder(name)) for name in sys.argv[1:]))
