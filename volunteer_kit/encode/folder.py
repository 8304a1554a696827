"""OUT: the names of what lies in it, who may write there, and the report of it all."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from volunteer_kit.data.causes import FILES
from volunteer_kit.data.code_shards import CodeIndex, MadeFrom, parse_index
from volunteer_kit.data.errors import DataError
from volunteer_kit.data.shards import shown
from volunteer_kit.encode.settings import Settings
from volunteer_kit.storage import DamagedFile, read_json, write_whole
from volunteer_kit.storage.locks import LockFile, who_holds

LOCK = ".lock"
LARGEST_REPORT = 2**28  # bytes; it names every record that was left out
MOST = 2**53  # of anything that is counted
ORPHANS = 5.0  # s; workers whose parent was killed end at once, but not in the same moment


class Target(NamedTuple):
    """Where a shard's files lie. Those that begin with a dot are gone once it is finished."""

    folder: Path
    name: str

    @classmethod
    def of(cls, shard: str, folder: Path) -> Target:
        """The target of an input shard. Raises DataError for one whose name cannot be a file's."""
        name = shard.split("?")[0].rstrip("/").rsplit("/", 1)[-1].removesuffix(".tar")
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", name):
            raise DataError(
                f"The shard {shown(shard)!r} has a name that cannot be taken over.\n"
                "1. Call it by letters, digits, dots, - and _ only: 00000.tar"
            )
        return cls(folder, name)

    @property
    def tar(self) -> Path:
        return self.folder / f"{self.name}.tar"

    @property
    def index(self) -> Path:
        return self.folder / f"{self.name}.index.json"

    @property
    def report(self) -> Path:
        return self.folder / f"{self.name}.report.json"

    @property
    def part(self) -> Path:
        return self.folder / f".{self.name}.tar.part"

    @property
    def journal(self) -> Path:
        return self.folder / f".{self.name}.journal"


class Summary(NamedTuple):
    """What became of a shard."""

    name: str
    records: int
    counts: dict[str, int]  # by cause; records left out, and faults of the shard itself
    ended_early: str | None  # the cause, where the shard is damaged before its end

    @property
    def seen(self) -> int:
        """Records of the input, about: faults of the shard itself count too."""
        return self.records + sum(number for cause, number in self.counts.items() if cause not in FILES)


def targets(shards: list[str], folder: Path) -> dict[str, Target]:
    """Where each shard goes. Raises DataError when two would be one file, or one would write over itself."""
    found: dict[str, Target] = {}
    taken: dict[str, str] = {}
    for shard in shards:
        target = Target.of(shard, folder)
        if target.name in taken:
            raise DataError(
                f"{shown(taken[target.name])} and {shown(shard)} would both become {target.tar}.\n"
                "1. Encode them into two folders, with two commands."
            )
        if target.tar.exists() and Path(shard).exists() and target.tar.samefile(shard):
            raise DataError(f"{target.tar} would be written over itself.\n1. Name another folder for the code shards.")
        taken[target.name] = shard
        found[shard] = target
    return found


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Only one encoder at a time in a folder, which is made if it is not there. Gives the lock's file descriptor:
    workers hold it too, so that one which outlives its parent for a moment keeps others out. Raises DataError."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file, not a folder.\n1. Name the folder for the code shards last.")
    folder.mkdir(parents=True, exist_ok=True)
    lock, deadline = LockFile(folder / LOCK, mode=0o644), time.monotonic() + ORPHANS
    while not lock.acquire():
        if time.monotonic() > deadline:
            holder = who_holds(lock.path)
            raise DataError(
                f"Another encoder is at work in {folder}.\n"
                "1. Wait for it, or stop it.\n2. Or name another folder, for other shards."
                + (f"\n3. {holder}" if holder else "")
            )
        time.sleep(0.05)
    try:
        yield lock.descriptor
    finally:
        lock.path.unlink(missing_ok=True)
        lock.release()


def refuse_other_settings(folder: Path, settings: Settings) -> None:
    """Raises DataError if the folder holds shards that were made with other settings. One is looked at: all that are
    there passed the same question."""
    for path in sorted(folder.glob("*.index.json"))[:1]:
        require_settings(_index(path), path, settings)


def require_settings(index: CodeIndex, path: Path, settings: Settings) -> None:
    """Raises DataError if a shard was made with other settings."""
    if index.settings == settings.fingerprint:
        return
    theirs = index.image_tokenizer
    other = "" if theirs == settings.tokenizer_name else f" (image tokenizer {theirs.name!r}, {theirs.identity})"
    raise DataError(
        f"{path} was made with other settings{other} than this run's: image tokenizer "
        f"{settings.tokenizer_name.name!r} ({settings.identity}), filters and columns of its section `data`; or by an "
        "older kit, which read some pictures and names otherwise.\n"
        "1. Name another folder for the code shards.\n2. Or name the run that these shards were made for: --run RUN"
    )


def finished(target: Target, settings: Settings, made_from: MadeFrom | None) -> Summary | None:
    """The summary of a shard that is there already; `made_from` is None if its input is gone, which is nobody's fault
    then. Raises DataError if what is there is something else."""
    if not target.index.exists():
        if target.tar.exists() and not target.journal.exists():
            raise DataError(
                f"{target.tar} is there without {target.index.name}, so this command did not make it.\n"
                "1. Name another folder for the code shards, or move that file away."
            )
        return None
    index = _index(target.index)
    require_settings(index, target.index, settings)
    if made_from is not None and index.made_from != made_from:
        raise other_input(target)
    if not target.tar.is_file() or target.tar.stat().st_size != index.size or not target.report.is_file():
        raise DataError(f"{target.tar} is not what {target.index.name} says. {_anew(target)}")
    target.journal.unlink(missing_ok=True)  # a kill came in between
    return summary_of(read_report(target.report))


def other_input(target: Target) -> DataError:
    """For a shard whose input is no longer what it was made of."""
    return DataError(
        f"{target.tar} was made, or begun, of another {target.name}.tar than the one that is named now. {_anew(target)}"
    )


def summary_of(report: dict[str, Any]) -> Summary:
    return Summary(report["shard"], report["records"], report["counts"], report["ended_early"])


def read_report(path: Path) -> dict[str, Any]:
    """NAME.report.json. Raises DataError."""
    try:
        return read_json(path, _report_of, LARGEST_REPORT)
    except (OSError, DamagedFile):
        target = Target(path.parent, path.name.removesuffix(".report.json"))
        raise DataError(f"{path} is damaged. {_anew(target)}") from None


def _report_of(report: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError, KeyError, TypeError, AttributeError."""
    found = {key: report[key] for key in ("shard", "records", "counts", "ended_early", "sha256", "settings")}
    numbers = [found["records"], *found["counts"].values()]
    if any(type(number) is not int or not 0 <= number <= MOST for number in numbers):
        raise ValueError("no counts")
    return found


def write_report(folder: Path, settings: Settings) -> None:
    """report.json: everything that is finished in the folder, by whatever command."""
    counts: Counter[str] = Counter()
    shards = []
    for path in sorted(folder.glob("*.report.json")):
        if not Target(folder, path.name.removesuffix(".report.json")).index.exists():
            continue  # a shard that is not finished yet
        report = read_report(path)
        counts.update(report["counts"])
        shards.append({key: report[key] for key in ("shard", "records", "sha256", "counts", "ended_early")})
    records = sum(shard["records"] for shard in shards)
    lines = [f"    {json.dumps(shard)}" for shard in shards]
    head = {"settings": settings.shown, "records": records, "counts": dict(sorted(counts.items()))}
    text = json.dumps(head, indent=2)[:-2] + ',\n  "shards": [\n' + ",\n".join(lines) + "\n  ]\n}\n"
    write_whole(folder / "report.json", text.encode())


def _index(path: Path) -> CodeIndex:
    try:
        return parse_index(path.read_bytes())
    except (OSError, ValueError) as error:
        target = Target(path.parent, path.name.removesuffix(".index.json"))
        raise DataError(f"{path} is damaged ({error}). {_anew(target)}") from None


def _anew(target: Target) -> str:
    files = f"{target.folder}/{target.name}.{{tar,index.json,report.json}} {target.part} {target.journal}"
    return f"\n1. Make it anew: rm -f {files}\n   and run the same command again.\n2. Or name another folder."
