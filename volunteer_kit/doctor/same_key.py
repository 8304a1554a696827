"""Does another machine take part under this one's key? A cloned machine or a copied folder has the same."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from volunteer_kit.doctor import looks
from volunteer_kit.doctor.finding import Finding

CALL = 12.0  # s


async def ask(identity_path: str, addresses: Sequence[str]) -> dict:
    """In the probe's process: is the key's peer found through the peers at these addresses?"""
    from volunteer_kit.swarm.net.taken_identity import is_taken

    try:
        return {"taken": await is_taken(identity_path, addresses, CALL)}
    except Exception:  # none of them answers, or the file is damaged; both are told elsewhere
        return {"taken": False}


def same_key(identity: Path, addresses: Sequence[str], trains_here: bool, within: float) -> Finding:
    """:param identity: the file of this machine's key
    :param trains_here: a worker of this machine has it"""
    if not identity.is_file():
        return Finding("key", "ok", "none yet; one is made at the first start")
    if trains_here:
        return Finding("key", "ok", "a worker of this machine takes part under it now")
    if not addresses:
        return Finding("key", "ok", f"it is in {identity}; no peer is named who could know another one under it")
    try:
        taken = looks.probe(["key", str(identity), *addresses], within)["taken"]
    except (OSError, subprocess.TimeoutExpired):
        return Finding("key", "warning", "it could not be asked whether another machine has it", "Run it again.")
    return verdict(identity, taken)


def verdict(identity: Path, taken: bool) -> Finding:
    """:param taken: a peer under this key answers, and it is not this machine"""
    if not taken:
        return Finding("key", "ok", "no other machine was found that takes part under it")
    file = shlex.quote(str(identity))
    return Finding(
        "key", "warning",
        "another machine takes part under this one's key: a folder was copied, or a machine cloned",
        f"A worker that joins takes another key by itself. To do so now: mv {file} {file}.shared",
    )  # fmt: skip
