"""Where a run's data come from, in words for the first screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from volunteer_kit.data.hosts import host_of
from volunteer_kit.data.shards import each_name, is_address
from volunteer_kit.data.sources import cache_folder
from volunteer_kit.http_client import proxy_for

if TYPE_CHECKING:
    from volunteer_kit.runs import RunConfig

MAX_NAMED = 4  # places; more are counted
MAX_LOOKED_AT = 100_000  # names of a pattern


def data_words(config: RunConfig) -> str:
    """Of a run that draws: who has the data, and what is kept of them here."""
    data = config.data
    if data.kind == "scenes":
        return "The program draws the pictures itself and reads none."
    if data.kind == "hub":
        return f"The data set {data.dataset} on the Hugging Face Hub. {_kept(config)}"
    places, first = _places(config)
    where = _listed(places)
    if config.origin.own_data:
        words = f"You named them: {where}"
    elif config.origin.is_foreign:
        words = f"Servers that the run's host named: {where}"
        if config.origin.allow_private_data:
            words += " (addresses of your own network are allowed)"
        elif config.origin.endpoint is not None:
            words += " (public addresses, and the server of the link itself)"
    else:
        words = f"As the run file says: {where}"
    if first is not None and (proxy := proxy_for(first)):
        name = proxy.address[0] if proxy.address else proxy.shown
        words += f", through the proxy {name}, which looks up the servers' names itself"
    return f"{words}. {_kept(config)}"


def _places(config: RunConfig) -> tuple[list[str], str | None]:
    """Hosts and paths, each once, and the first address."""
    shards = config.data.shards or []
    places: dict[str, None] = {}
    first = None
    for pattern in [shards] if isinstance(shards, str) else shards:
        if not is_address(pattern):
            places[pattern] = None
            continue
        for number, name in enumerate(each_name(pattern)):
            first = first or (name if name.lower().startswith("http") else None)
            places[host_of(name) or name] = None
            if number >= MAX_LOOKED_AT:
                break
    return list(places), first


def _listed(places: list[str]) -> str:
    more = len(places) - MAX_NAMED
    return ", ".join(place[:100] for place in places[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _kept(config: RunConfig) -> str:
    room = config.data.disk_cache_mb
    if not room:
        return "Nothing of them is kept on the disk."
    return f"Up to {room / 1000:.2g} GB of them, encoded, is kept in {cache_folder(config.data)}."
