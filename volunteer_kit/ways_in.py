"""The ways into a hosted run: which of them work, and the lines to copy for each.

A host knows its address, the wheel and the notebook that it serves, and whether they are on the Hub: an Offer. From
it alone `ways_in` decides what a person may be told. The terminal, the dashboard, the landing page and the model card
show what it returns and decide nothing themselves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, urlsplit

from volunteer_kit.addressing import is_private_name
from volunteer_kit.data.addresses import as_address
from volunteer_kit.storage import DamagedFile, read_json, write_whole

HUB = "https://huggingface.co"
COLAB = "https://colab.research.google.com/#fileId="
NOTEBOOK = "join.ipynb"
OFFER, PUSHED = "way_in.json", "pushed.json"  # in the host's folder: what the host offers, what the Hub has of it
# Debian, Ubuntu and macOS have no `python` outside of an environment, or let pip change nothing there (PEP 668).
ENVIRONMENT = "python3 -m venv ~/volunteer && . ~/volunteer/bin/activate"
CPU_TORCH = "python -m pip install torch --index-url https://download.pytorch.org/whl/cpu"
_WITHOUT_CARD = (
    f"Without an NVIDIA card, type this after the first line, or pip brings gigabytes of CUDA along: {CPU_TORCH}"
)
Kind = Literal["colab", "kaggle", "notebook", "terminal", "trainer"]


class Way(NamedTuple):
    """One way to take part.

    :param note: a sentence for people
    :param link: an address to open, if there is one
    :param lines: to copy into a terminal, or into Python for the kind "trainer"
    """

    kind: Kind
    title: str
    note: str
    link: str = ""
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Offer:
    """The things that a host gives to those who want to join.

    :param url: of the host, as volunteers reach it, without a slash at its end; also the run's link
    :param draws: a run that trains a model to draw; others are fine-tunes, whose members bring data of their own
    :param wheel: file name of the kit's wheel under URL/kit/; "" if the host serves none
    :param sha256: of the wheel, hexadecimal
    :param notebook_sha256: of URL/join.ipynb; "" if the host serves none
    :param push_to: ORG/NAME on the Hub to which both are to be brought; "" for none
    :param repo: ORG/NAME on the Hub where exactly these two are, for everybody; "" while they are not
    :param hub: the Hub's address
    :param dashboard: address of the dashboard, if it is not URL/dashboard/
    """

    url: str
    draws: bool = True
    wheel: str = ""
    sha256: str = ""
    notebook_sha256: str = ""
    push_to: str = ""
    repo: str = ""
    hub: str = HUB
    dashboard: str = ""

    @property
    def dashboard_url(self) -> str:
        return self.dashboard or f"{self.url}/dashboard/"

    @property
    def wheel_urls(self) -> list[str]:
        """Where the wheel can be fetched, the host first; the Hub's copy may still be under way."""
        if not self.wheel:
            return []
        on_hub = [f"{self.hub}/{self.push_to}/resolve/main/kit/{self.wheel}"] if self.push_to else []
        return [f"{self.url}/kit/{self.wheel}", *on_hub]


def ways_in(offer: Offer) -> list[Way]:
    """The ways that work, the easiest first. A machine that others cannot reach gets no link to a platform."""
    if not offer.draws:
        return _for_trainers(offer)
    is_public = is_reachable(offer.url)
    ways = []
    if offer.notebook_sha256 and is_public and offer.repo and offer.hub == HUB:
        ways.append(
            Way(
                "colab",
                "Google Colab",
                "Opens the notebook of this run. Runtime, Run all; then press Start. Its terms ask for paid compute "
                "units.",
                colab_link(offer.repo),
            )
        )
    if offer.notebook_sha256 and is_public:
        ways.append(
            Way(
                "kaggle",
                "Kaggle",
                "Download join.ipynb. On kaggle.com: Create, New Notebook; File, Import Notebook; upload it. "
                "Then Settings: Accelerator GPU T4 x2, Internet on.",
                f"{offer.url}/{NOTEBOOK}",
            )
        )
    if offer.notebook_sha256:
        ways.append(
            Way(
                "notebook",
                "Jupyter",
                f"Download join.ipynb, open it in {'your own Jupyter' if is_public else 'a Jupyter here'}, and run all "
                "cells.",
                f"{offer.url}/{NOTEBOOK}",
            )
        )
    ways.append(
        Way(
            "terminal",
            "Terminal",
            f"Python 3.10 to 3.13. {_WITHOUT_CARD if offer.wheel else ''}".rstrip(),
            lines=(*_install(offer), f"volunteer-kit join {offer.url}"),
        )
    )
    return ways


def colab_link(repo: str) -> str:
    """The address that opens the notebook of a Hub repository in Colab."""
    return f"{COLAB}https%3A//huggingface.co/{quote(repo)}/blob/main/{NOTEBOOK}"


def is_reachable(url: str) -> bool:
    """Whether the internet can reach an address, as far as its name tells."""
    host = urlsplit(url).hostname or ""
    address = as_address(host)
    if address is None:
        return not is_private_name(host)
    return address.is_global and not address.is_multicast


def install_line(urls: Sequence[str], sha256: str) -> str:
    """The pip command for the first of these wheels; pip refuses other bytes."""
    return f'python -m pip install "{urls[0]}#sha256={sha256}"'


def _install(offer: Offer) -> list[str]:
    if not offer.wheel:
        return []
    return [ENVIRONMENT, install_line(offer.wheel_urls, offer.sha256), "volunteer-kit setup"]


def _for_trainers(offer: Offer) -> list[Way]:
    ways = []
    if offer.wheel:
        install = f'python -m pip install "volunteer-kit[hf] @ {offer.wheel_urls[0]}#sha256={offer.sha256}"'
        ways.append(Way("terminal", "Terminal", f"Once. {_WITHOUT_CARD}", lines=(ENVIRONMENT, install)))
    lines = ("from volunteer_kit import swarm_trainer", f'swarm_trainer("{offer.url}", train_dataset=...).train()')
    return [*ways, Way("trainer", "Python", "With data of your own.", lines=lines)]


# --- what the host's processes tell each other ---


def save_offer(folder: Path, offer: Offer) -> None:
    """Write the host's offer into its folder. Raises OSError."""
    write_whole(folder / OFFER, json.dumps(asdict(offer), indent=1) + "\n")


def note_pushed(folder: Path, offer: Offer, *, is_private: bool) -> None:
    """Remember that the Hub has this notebook and wheel. Raises OSError."""
    has = {"repo": offer.push_to, "hub": offer.hub, "notebook_sha256": offer.notebook_sha256, "sha256": offer.sha256}
    write_whole(folder / PUSHED, json.dumps({**has, "is_private": is_private}, indent=1) + "\n")


def is_pushed(folder: Path, offer: Offer) -> bool:
    """Whether the Hub has exactly this notebook and wheel, in a public or private repository."""
    return _same(_read(folder / PUSHED), offer)


def read_offer(folder: Path) -> Offer | None:
    """The current offer of the host of this folder; None if it is absent or damaged."""
    saved = _read(folder / OFFER)
    kinds = {field.name: type(field.default) if field.name != "url" else str for field in fields(Offer)}
    if any(not isinstance(saved.get(name), kind) for name, kind in kinds.items()):
        return None
    offer = Offer(**{name: saved[name] for name in kinds})
    pushed = _read(folder / PUSHED)
    is_public = _same(pushed, offer) and pushed.get("is_private") is False
    return replace(offer, repo=offer.push_to if is_public else "")


def _same(pushed: dict[str, Any], offer: Offer) -> bool:
    wanted = (offer.push_to, offer.hub, offer.notebook_sha256, offer.sha256)
    return bool(offer.push_to) and wanted == tuple(
        pushed.get(name) for name in ("repo", "hub", "notebook_sha256", "sha256")
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, DamagedFile):
        return {}
    return found if isinstance(found, dict) else {}
