"""A code shard in the making: a tar that grows, and a journal that says how far it is good.

After each batch the tar is written first, then one line of the journal. Whatever moment a process is killed at, the
lines that are whole and agree with the tar are kept, and the rest is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from volunteer_kit.data.code_shards import (
    END,
    MAX_RECORDS,
    NAME,
    CodeIndex,
    MadeFrom,
    checksum,
    dump_index,
    pack_record,
    unpack_record,
)
from volunteer_kit.data.errors import DataError
from volunteer_kit.encode.folder import Target, other_input
from volunteer_kit.encode.settings import Settings
from volunteer_kit.storage import flush, write_whole

logger = logging.getLogger(__name__)


class Fault(NamedTuple):
    """A record of the input that is left out."""

    index: int
    key: str
    cause: str


class Part:
    """The unfinished shard `target`, gone on with where it stopped. `next` is the first record of the input that is
    not in it yet. Raises DataError if it was begun with other settings or of another input; OSError."""

    def __init__(self, target: Target, settings: Settings, made_from: MadeFrom) -> None:
        self.next, self.records = 0, 0
        self.faults: list[Fault] = []
        self._target, self._settings, self._made_from = target, settings, made_from
        self._offsets: list[int] = [0]
        self._crc32: list[int] = []
        self._keys: set[str] = set()
        self._sha256 = hashlib.sha256()
        self._batch: list[bytes] = []
        if target.tar.exists() and not target.part.exists():  # killed between its last two names
            target.tar.rename(target.part)
        self._tar = _open(target.part)
        self._journal = _open(target.journal)
        self._go_on({"settings": settings.fingerprint, "made_from": made_from.model_dump()})

    def add(self, index: int, key: str, codes: Sequence[int], meta: dict[str, Any]) -> None:
        """Append a record of the input; it is written with the batch. The key that webdataset will see is its own,
        where that is plain and not taken."""
        name = key.rpartition("/")[2]
        if not re.fullmatch(NAME, name) or name in self._keys:
            name = f"{index:09d}"
        while name in self._keys:
            name = f"{name}-"
        self._batch.append(pack_record(name, codes, meta))
        self._note(self._batch[-1], name)

    def commit(self, faults: list[Fault], next_index: int) -> None:
        """Write the batch that was added, up to the input's record `next_index`."""
        if self.records > MAX_RECORDS:
            raise DataError(
                f"{self._made_from.name} has more than {MAX_RECORDS} records.\n"
                "1. Make smaller shards: img2dataset --number_sample_per_shard 10000"
            )
        self._tar.write(b"".join(self._batch))
        self._tar.flush()
        sizes, crc32 = [len(record) for record in self._batch], [checksum(record) for record in self._batch]
        self._journal.write(_line({"next": next_index, "sizes": sizes, "crc32": crc32, "faults": faults}))
        self._journal.flush()
        self.faults += faults
        self.next, self._batch = next_index, []

    def finish(self, counts: dict[str, int], ended_early: str | None) -> dict[str, Any]:
        """Give the shard its names: report, then tar, then index, so that an index has its whole tar beside it.
        Returns the report. `counts` are faults that are no single record's."""
        self._tar.write(END)
        self._sha256.update(END)
        self._tar.flush()
        os.fsync(self._tar.fileno())
        report = self._report(counts, ended_early)
        write_whole(self._target.report, _report_text(report, self.faults))
        self._target.part.replace(self._target.tar)
        flush(self._target.folder)
        write_whole(self._target.index, dump_index(self._index()))
        self._target.journal.unlink()
        return report

    def close(self) -> None:
        """Leave it for the next attempt, if there is anything in it."""
        self._tar.close()
        self._journal.close()
        if not self.next:
            self._target.part.unlink(missing_ok=True)
            self._target.journal.unlink(missing_ok=True)

    def _go_on(self, header: dict[str, Any]) -> None:
        """Read what is good of an earlier attempt, and cut off the rest."""
        lines = _lines(self._journal)
        first, good = next(lines, (None, 0))
        if first is not None and not header.keys() <= first.keys():
            first, good = None, 0
        if first is None and os.fstat(self._tar.fileno()).st_size:
            logger.warning("%s is damaged, so the shard that was begun is made anew.", self._target.journal)
        if first is not None and first != header:
            same = first["settings"] == header["settings"]
            raise other_input(self._target) if same else _other_settings(self._target)
        for entry, end in lines if first is not None else ():
            batch = [self._tar.read(size) for size in entry["sizes"]]
            if [checksum(record) for record in batch] != entry["crc32"]:
                break
            for record in batch:
                self._note(record, unpack_record(record).key)
            self.faults += [Fault(*fault) for fault in entry["faults"]]
            self.next, good = entry["next"], end
        for file, length in ((self._tar, self._offsets[-1]), (self._journal, good)):
            file.truncate(length)
            file.seek(length)
        if first is None:
            self._journal.write(_line(header))
            self._journal.flush()

    def _note(self, record: bytes, key: str) -> None:
        self.records += 1
        self._offsets.append(self._offsets[-1] + len(record))
        self._crc32.append(checksum(record))
        self._sha256.update(record)
        self._keys.add(key)

    def _report(self, counts: dict[str, int], ended_early: str | None) -> dict[str, Any]:
        total = dict(counts)
        for fault in self.faults:
            total[fault.cause] = total.get(fault.cause, 0) + 1
        return {
            "shard": self._target.name,
            "records": self.records,
            "counts": dict(sorted(total.items())),
            "ended_early": ended_early,
            "sha256": self._sha256.hexdigest(),
            "made_from": self._made_from.model_dump(),
            "settings": self._settings.fingerprint,
        }

    def _index(self) -> CodeIndex:
        return CodeIndex(
            records=self.records,
            offsets=self._offsets,
            size=self._offsets[-1] + len(END),
            crc32=self._crc32,
            sha256=self._sha256.hexdigest(),
            image_tokenizer=self._settings.tokenizer_name,
            codes_per_record=self._settings.codes,
            num_codes=self._settings.num_codes,
            settings=self._settings.fingerprint,
            made_from=self._made_from,
        )


def _open(path: Any) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")


def _other_settings(target: Target) -> DataError:
    return DataError(
        f"{target.part} was begun with other settings than this run's.\n"
        "1. Name the run that it was begun with: --run RUN\n"
        f"2. Or begin it anew: rm {target.part} {target.journal}\n"
        "3. Or name another folder for the code shards."
    )


def _report_text(report: dict[str, Any], faults: list[Fault]) -> bytes:
    """Every record left out has a line of its own."""
    lines = ",\n".join(f"    {json.dumps(fault._asdict())}" for fault in faults)
    return (json.dumps(report, indent=2)[:-2] + ',\n  "faults": [\n' + lines + "\n  ]\n}\n").encode()


def _line(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _lines(journal: BinaryIO) -> Iterator[tuple[dict[str, Any], int]]:
    """The whole lines from the beginning, each with the place where it ends."""
    end = 0
    for line in journal:
        end += len(line)
        if not line.endswith(b"\n") or line[:9] != b"%08x " % zlib.crc32(line[9:-1]):
            return
        yield json.loads(line[9:]), end
