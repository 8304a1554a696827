"""A host puts these into its folder for volunteers: the kit's wheel, the run's notebook, and the offer that
says where they are."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from volunteer_kit.host.settings import HostError, HostSettings, dashboard_address
from volunteer_kit.storage import write_whole
from volunteer_kit.ways_in import HUB, NOTEBOOK, Offer, save_offer

if TYPE_CHECKING:
    from volunteer_kit.runs import RunConfig


def make_offer(folder: Path, url: str, settings: HostSettings, config: RunConfig) -> Offer:
    """Write FOLDER/kit/WHEEL, FOLDER/join.ipynb and FOLDER/way_in.json. A fine-tune has no notebook: its members bring
    data, and a Trainer, of their own.

    :param url: of the host, as volunteers reach it
    Raises HostError.
    """
    from volunteer_kit.host.join_notebook import join_notebook
    from volunteer_kit.host.kit_wheel import make_wheel

    try:
        wheel = make_wheel(folder / "kit")
        offer = Offer(
            url,
            config.draws,
            wheel=wheel.path.name,
            sha256=wheel.sha256,
            push_to=settings.push_to or "",
            hub=os.environ.get("HF_ENDPOINT", "").rstrip("/") or HUB,
            dashboard=dashboard_address(settings),
        )
        if config.draws:
            about = config.description
            notebook = join_notebook(
                config.run_id, url, offer.wheel_urls, wheel.sha256, wheel.version, description=about
            )
            write_whole(folder / NOTEBOOK, notebook)
            offer = Offer(**{**vars(offer), "notebook_sha256": hashlib.sha256(notebook).hexdigest()})
        save_offer(folder, offer)
    except OSError as error:
        if isinstance(error, HostError):
            raise
        raise HostError(
            f"The way in for volunteers cannot be written into {folder}: {error.strerror or error}.\n"
            "1. Make room there, or name another folder: --folder PATH"
        ) from None
    return offer
