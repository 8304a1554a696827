"""One row a kind of data: which source reads it, and what is worth keeping of it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from volunteer_kit.storage.places import expanded, kit_folder

from .addresses import ANY_ADDRESS, AddressPolicy
from .cache import SampleCache
from .codes import CodeSource
from .errors import DataError
from .laion import LaionSource
from .scenes import SceneSource
from .settings import DataConfig
from .shards import expand_shards, is_address
from .source import LeftOut, Limits, Record, Source

READING = 2  # raise it when the same shards give other records or pixels: what is cached of them is not used then
FREE_SHARE = 4  # of the disk's free bytes, one in so many may be the cache's


def open_source(
    config: DataConfig,
    image_size: int,
    codes: int,
    num_codes: int,
    image_tokenizer: str,
    counts: Counter[str],
    addresses: AddressPolicy = ANY_ADDRESS,
) -> Source:
    """The source that section `data` names. Raises DataError."""
    if config.kind == "scenes":
        return SceneSource(config.level, image_size, config.range_length)
    about = {
        "filters": config.filters,
        "columns": config.columns,
        "limits": Limits(
            config.timeout, config.retries, int(config.max_member_mb * 2**20), addresses=addresses
        ),
        "counts": counts,
    }
    if config.kind == "shards":
        return LaionSource(expand_shards(config.shards or [], addresses), image_size=image_size, **about)
    about |= {"codes": codes, "range_length": config.range_length}
    if config.kind == "codes":
        return CodeSource(
            expand_shards(config.shards or [], addresses), num_codes=num_codes, tokenizer=image_tokenizer, **about
        )
    if config.dataset is None:
        raise DataError("The run reads a data set of the Hub and names none: add `dataset: org/name` to section data.")
    from .hub import HubSource  # datasets takes seconds to import

    about |= {"subset": config.subset, "split": config.split, "patience": config.patience}
    return HubSource(config.dataset, image_size=image_size, **about)


def usable_records(source: Source, shard: str, give_up_at: float) -> Iterator[Record]:
    """All usable records of a shard; what is left out is counted. Raises ShardError."""
    for raw in source.read(shard, 0, None, give_up_at):
        try:
            yield source.use(raw)
        except LeftOut as why:
            source.counts[str(why)] += 1


def open_caches(config: DataConfig, source: Source, image_tokenizer: str) -> list[SampleCache]:
    """Where encoded samples are kept for later epochs: in memory, then on disk. Scenes are drawn again, the encoder
    remembers their codes; and codes that lie on a disk here need no second one."""
    if config.kind == "scenes":
        return []
    caches = []
    if config.cache_mb:
        caches.append(SampleCache(None, int(config.cache_mb * 1e6)))
    is_here = config.kind == "codes" and not any(is_address(shard) for shard in source.shards)
    if config.disk_cache_mb and not is_here:
        about = [READING, source.catalogue, image_tokenizer, config.filters, config.columns.model_dump()]
        name = hashlib.blake2b(json.dumps(about).encode(), digest_size=12).hexdigest()
        file = cache_folder(config) / f"samples-{name}.sqlite"
        caches.append(SampleCache(file, room_on_disk(file, int(config.disk_cache_mb * 1e6))))
    return caches


def room_on_disk(file: Path, wanted: int) -> int:
    """Bytes for a cache: what is wanted, but at most a quarter of what the disk has free with that file away."""
    folder = next((folder for folder in file.parents if folder.is_dir()), Path("/"))
    try:
        has = file.stat().st_size if file.is_file() else 0
        return min(wanted, (shutil.disk_usage(folder).free + has) // FREE_SHARE)
    except OSError:
        return wanted  # the cache says itself what is wrong with its place


def cache_folder(config: DataConfig) -> Path:
    """The run's folder for encoded samples: as its section data says, else the user's cache."""
    if config.cache_dir:
        return expanded(config.cache_dir)
    return kit_folder()
