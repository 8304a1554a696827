"""The last transformers 4 beside the installed one, for programs that are started with `PYTHONPATH=FOLDER`.

`python -m tests.older_transformers` fetches it, and those of its requirements that it wants older than ours, into the
cache folder, and prints where they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("transformers==4.57.6", "huggingface_hub==0.36.2", "tokenizers==0.22.2", "datasets==4.8.5")


def folder() -> Path:
    """Of transformers 4 (VOLUNTEER_KIT_TRANSFORMERS4, or the user's cache); it is fetched by pip if it is not there."""
    home = Path(os.environ.get("VOLUNTEER_KIT_TRANSFORMERS4") or Path.home() / ".cache/volunteer_kit/transformers-4")
    if (home / "transformers").is_dir():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as fresh:
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", fresh]
        subprocess.run([*install, *PACKAGES], check=True, timeout=600, stdout=sys.stderr)
        os.chmod(fresh, 0o755)
        try:
            os.rename(fresh, home)
        except OSError:  # another process was first
            if not (home / "transformers").is_dir():
                raise
        else:
            os.mkdir(fresh)  # for the context manager to remove
    return home


if __name__ == "__main__":
    print(folder())
