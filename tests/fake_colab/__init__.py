"""A stand-in for Colab: the environment of its kernels, and the part of google.colab that the kit asks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent


def environment(folder: Path, secrets: Mapping[str, str]) -> dict[str, str]:
    """For a process that should take itself for one on Colab. `secrets` go into a file in `folder`, not into the
    environment, which processes inherit."""
    path = folder / "colab-secrets.json"
    path.write_text(json.dumps(dict(secrets)))
    path.chmod(0o600)
    roots = [str(HERE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "COLAB_RELEASE_TAG": "release-colab_20250101-000000_RC00",
        "COLAB_GPU": "",
        "COLAB_JUPYTER_IP": "172.28.0.12",
        "FAKE_COLAB_SECRETS": str(path),
        "PYTHONPATH": os.pathsep.join(roots),
    }
