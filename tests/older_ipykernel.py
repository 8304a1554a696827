"""ipykernel 6 beside the installed one, for a kernel that is started with `PYTHONPATH=FOLDER`.

`python tests/older_ipykernel.py` fetches it into the cache folder and prints where it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "6.31.0"


def folder() -> Path:
    """Of ipykernel 6 (VOLUNTEER_KIT_IPYKERNEL6, or the user's cache); it is fetched by pip if it is not there."""
    home = Path(os.environ.get("VOLUNTEER_KIT_IPYKERNEL6") or Path.home() / ".cache/volunteer_kit/ipykernel-6")
    if (home / "ipykernel").is_dir():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as fresh:
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", fresh]
        subprocess.run([*install, f"ipykernel=={VERSION}", "nest-asyncio"], check=True, timeout=300)
        os.chmod(fresh, 0o755)
        try:
            os.rename(fresh, home)
        except OSError:  # another process was first
            if not (home / "ipykernel").is_dir():
                raise
        else:
            os.mkdir(fresh)  # for the context manager to remove
    return home


if __name__ == "__main__":
    print(folder())
