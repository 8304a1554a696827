"""Brings the host's notebook and its kit to the Hub, and asks later whether everybody can read them there:
`python -m volunteer_kit.monitor.push_way_in`, see chore.py.

In: run, host (the folder of the host's offer), token. Out: repo, is_private (or gated), is_news.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from volunteer_kit.monitor.chore import do_chore
from volunteer_kit.ways_in import NOTEBOOK, Offer, is_pushed, note_pushed, read_offer

PINNED = re.compile(r"kit/volunteer_kit-[A-Za-z0-9.+!_]+-py3-none-any\.whl#sha256=[0-9a-f]{64}")


def push_way_in(task: dict[str, Any]) -> dict[str, Any]:
    """One commit with notebook, wheel and model card; remembers in the host's folder that the Hub has them. Where it
    has them already, its owner may have made the repository public or private meanwhile: then this is remembered."""
    folder = Path(task["host"])
    offer = read_offer(folder)
    if offer is None or not offer.push_to:
        return {"error": f"the host offers nothing in {folder}"}
    if is_pushed(folder, offer):
        repo, is_private = offer.push_to, not _is_for_everybody(offer.push_to)
        is_news = is_private is bool(offer.repo)
    else:
        repo, is_private = _bring(task, folder, offer)
        is_news = True
    if is_news:
        note_pushed(folder, offer, is_private=is_private)
    return {"repo": repo, "is_private": is_private, "is_news": is_news}


def _is_for_everybody(repo: str) -> bool:
    """Asked as the readers of the link are: without a login. Raises what the client raises where the Hub is away."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        about = HfApi(token=False).model_info(repo)
    except RepositoryNotFoundError:  # so the Hub answers strangers who ask for a private one, too
        return False
    return not about.private and not about.gated


def _bring(task: dict[str, Any], folder: Path, offer: Offer) -> tuple[str, bool]:
    """The repository's name, and whether it is private or gated."""
    from huggingface_hub import CommitOperationAdd, HfApi

    from volunteer_kit.monitor.card import model_card
    from volunteer_kit.runs import load_run

    api = HfApi(token=task["token"] or None)
    repo = api.create_repo(offer.push_to, exist_ok=True).repo_id
    about = api.model_info(repo)
    is_private = bool(about.private or about.gated)
    files = {f"kit/{offer.wheel}": _exactly(folder / "kit" / offer.wheel, offer.sha256)}
    if offer.notebook_sha256:
        files[NOTEBOOK] = _exactly(folder / NOTEBOOK, offer.notebook_sha256)
    if any(file.rfilename == "README.md" for file in about.siblings or ()):
        files |= _renewed(api, repo, f"kit/{offer.wheel}#sha256={offer.sha256}")
    else:
        known = replace(offer, repo="" if is_private else repo)
        files["README.md"] = model_card(load_run(task["run"]), repo, None, [], [], offer=known).encode()
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    api.create_commit(repo, operations, commit_message="The way in: notebook and kit")
    return repo, is_private


def _renewed(api: Any, repo: str, pinned: str) -> dict[str, bytes]:
    """The card that is there, where it names another wheel: what it says of the model stays."""
    with tempfile.TemporaryDirectory(prefix="volunteer-kit-card-") as scratch:
        before = Path(api.hf_hub_download(repo, "README.md", local_dir=scratch)).read_text(encoding="utf-8")
    after = PINNED.sub(lambda _: pinned, before)
    return {"README.md": after.encode()} if after != before else {}


def _exactly(path: Path, sha256: str) -> bytes:
    """Raises OSError if it is another file than the host has pinned."""
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise OSError(f"{path} has changed since the host began; it is made anew when the host starts again")
    return content


if __name__ == "__main__":
    sys.exit(do_chore(push_way_in))
