"""A token for this process alone: its libraries find it, its children and its environment do not have it."""

from __future__ import annotations

import os
import tempfile

_kept: list[object] = []  # what must live as long as the process


def keep_token(token: str | None) -> None:
    """Let huggingface_hub and datasets in this process log in with `token`.

    They look into the environment, which every child inherits and `ps e` shows, or into a file. The file here is
    memory that ends with the process (Linux), or a private file that is deleted with it.
    """
    if not token:
        return
    from huggingface_hub import constants

    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("token", os.MFD_CLOEXEC)
        os.write(descriptor, token.encode())
        path = f"/proc/self/fd/{descriptor}"
    else:
        file = tempfile.NamedTemporaryFile()  # noqa: SIM115
        file.write(token.encode())
        file.flush()
        _kept.append(file)
        path = file.name
    constants.HF_TOKEN_PATH = path
