"""What the pages of a parquet file say about themselves, checked before pyarrow believes it: a page of a few bytes may
claim gigabytes. The layout is https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift"""

from __future__ import annotations

from .source import ShardError
from .thrift import Fields, ThriftError, read_struct

MAX_HEADER = 64 * 2**10  # bytes of one page's header
MAX_PAGE = 256 * 2**20  # bytes; writers put up to a thousand images into one
# Bytes of a page whose values may be repeated in every row of a batch, where a batch has 64 rows. Writers stop at 1 MB
# of small values; of large ones (pictures) they look too late, and the whole row group becomes a dictionary.
MAX_SHARED = 8 * 2**20
MAX_PULLED = 512 * 2**20  # bytes of pages read for one batch of rows
MAX_PAGES = 100_000  # of one column in one row group
DELTA_BYTE_ARRAY = 7  # an encoding in which a value may begin like the one before
DICTIONARY = 2  # a type of page


class PageGuard:
    """Reads along while the pages of one column in one row group pass by. Raises ShardError where they are absurd."""

    def __init__(self, is_repeated: bool, max_shared: int = MAX_SHARED) -> None:
        self._is_repeated = is_repeated  # several values a row
        self._max_shared = max_shared  # bytes of a page whose values may be repeated
        self._begun = b""  # of a header that has not come whole
        self._skip = 0  # bytes left of a page
        self._pages = 0

    def pass_by(self, data: bytes) -> int:
        """The column's next bytes; gives how many bytes the pages that begin in them become."""
        place = pulled = 0
        while True:
            step = min(self._skip, len(data) - place)
            self._skip, place = self._skip - step, place + step
            if place == len(data):
                return pulled
            known = self._begun + data[place : place + MAX_HEADER]
            try:
                header, length = read_struct(known)
            except ThriftError:
                raise ShardError("bad_shard", "a damaged parquet file: a page's header cannot be read") from None
            except IndexError:
                if len(known) >= MAX_HEADER:
                    raise ShardError("bad_shard", "a damaged parquet file: a page without a header") from None
                self._begun = known
                return pulled
            pulled += self._check(header)
            place += length - len(self._begun)
            self._begun, self._skip = b"", header[3]

    def _check(self, header: Fields) -> int:
        """Bytes that the page becomes."""
        self._pages += 1
        size, packed = header.get(2), header.get(3)
        about = next((header[key] for key in (5, 7, 8) if isinstance(header.get(key), dict)), {})
        values = about.get(1, 0)
        if not all(isinstance(number, int) and number >= 0 for number in (size, packed, values)):
            raise ShardError("bad_shard", "a damaged parquet file: a page of no size")
        encoding = about.get(4 if 8 in header else 2)
        is_shared = header.get(1) == DICTIONARY or encoding == DELTA_BYTE_ARRAY
        most = min(self._max_shared, MAX_PAGE) if is_shared else MAX_PAGE
        if size > most or packed > MAX_PAGE or self._pages > MAX_PAGES:
            raise ShardError(
                "bad_shard",
                f"a page of a parquet file has {packed} bytes that become {size}: nothing sane is so large",
            )
        return size + (8 * values if self._is_repeated else 0)
