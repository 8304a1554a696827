"""What decides how a code shard looks, byte by byte."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from volunteer_kit.data.code_shards import ImageTokenizerName
from volunteer_kit.data.settings import Columns, Filters
from volunteer_kit.data.source import Limits

VERSION = 2  # raise it when the same input gives other bytes
# Records of the input between two lines of the journal: their images are encoded together, and always the same ones,
# since in another company an image's codes may be rounded otherwise. A VQGAN takes a minute for them on one core.
BATCH = 32


class Settings(NamedTuple):
    """What workers are given. Equal fingerprints give equal shards."""

    tokenizer: str  # of images: a name or a path on this machine
    identity: str  # the hash of its weights
    image_size: int  # pixels a side
    codes: int  # of a picture
    num_codes: int
    filters: Filters
    columns: Columns
    limits: Limits

    @property
    def tokenizer_name(self) -> ImageTokenizerName:
        """As shards name it: without the folders of this machine."""
        return ImageTokenizerName(name=Path(self.tokenizer).name, identity=self.identity)

    @property
    def shown(self) -> dict[str, Any]:
        """As a report tells them. Duplicates are marked, never left out: whoever reads the shards decides."""
        filters = self.filters._asdict()
        del filters["drop_duplicates"]
        return {
            "version": VERSION,
            "image_tokenizer": self.tokenizer_name.model_dump(),
            "codes_per_record": self.codes,
            "num_codes": self.num_codes,
            "batch": BATCH,
            "filters": filters,
            "columns": self.columns.model_dump(),
        }

    @property
    def fingerprint(self) -> str:
        """32 hex digits; a tokenizer's name is not in it."""
        text = json.dumps({**self.shown, "image_tokenizer": self.identity}, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
