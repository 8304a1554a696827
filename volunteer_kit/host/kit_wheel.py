"""The running kit as a wheel, so that a run's volunteers install exactly its host's version.

The wheel holds the files that belong to the package and no others, since everybody can download it: of a checkout its
modules and the data that setup.cfg names, of an installation the files that its RECORD names. Equal files give equal
bytes, so a wheel's sha256 is the same from start to start.
"""

from __future__ import annotations

import base64
import configparser
import csv
import hashlib
import importlib.metadata
import io
import os
import zipfile
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import volunteer_kit
from volunteer_kit.host.settings import HostError
from volunteer_kit.storage import write_whole

NAME = "volunteer_kit"
PROJECT = "volunteer-kit"
PACKAGE = Path(volunteer_kit.__file__).resolve().parent
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip file can hold
WHEEL = "Wheel-Version: 1.0\nGenerator: volunteer-kit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


class _Kit(NamedTuple):
    """`metadata`: name in the wheel's dist-info -> content; `files`: of the package, as they lie on the disk."""

    metadata: dict[str, bytes]
    files: list[Path]


class KitWheel(NamedTuple):
    """A wheel on the disk. `sha256`: hexadecimal."""

    path: Path
    sha256: str
    version: str


def make_wheel(folder: Path) -> KitWheel:
    """Write the running kit's wheel into `folder`, unless it is there already.

    Raises HostError if the package's metadata cannot be found, OSError.
    """
    version = volunteer_kit.__version__
    members = _members(_of_checkout() or _of_installation(), version)
    record = _record(members, version)
    path = folder / f"{NAME}-{version}-py3-none-any.whl"
    if _record_of(path, version) != record:  # another zlib packs the same files into other bytes
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, _zipped({**members, f"{_info(version)}/RECORD": record}))
    return KitWheel(path, hashlib.sha256(path.read_bytes()).hexdigest(), version)


def _info(version: str) -> str:
    return f"{NAME}-{version}.dist-info"


def _members(kit: _Kit, version: str) -> dict[str, bytes]:
    """Name in the wheel -> content, of all but RECORD."""
    members = {}
    for path in kit.files:
        members[f"{NAME}/{path.relative_to(PACKAGE).as_posix()}"] = path.read_bytes()
    info = _info(version)
    members |= {f"{info}/{name}": content for name, content in kit.metadata.items()}
    members[f"{info}/WHEEL"] = WHEEL.encode()
    members[f"{info}/top_level.txt"] = f"{NAME}\n".encode()
    return members


def _record(members: dict[str, bytes], version: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for name in sorted(members):
        digest = base64.urlsafe_b64encode(hashlib.sha256(members[name]).digest()).rstrip(b"=").decode()
        writer.writerow((name, f"sha256={digest}", len(members[name])))
    writer.writerow((f"{_info(version)}/RECORD", "", ""))
    return text.getvalue().encode()


def _record_of(path: Path, version: str) -> bytes | None:
    try:
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(f"{_info(version)}/RECORD") if wheel.testzip() is None else None
    except (OSError, KeyError, zipfile.BadZipFile):
        return None


def _zipped(members: dict[str, bytes]) -> bytes:
    """Sorted, without times; the metadata last, as PEP 427 recommends."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for name in sorted(members, key=lambda name: (".dist-info/" in name, name.endswith("/RECORD"), name)):
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.external_attr = 0o100644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, on every system
            wheel.writestr(entry, members[name])
    return out.getvalue()


# --- the running kit ---


def _of_checkout() -> _Kit | None:
    """Look for a checkout around the package. It goes first, since an editable installation may be older."""
    setup = PACKAGE.parent / "setup.cfg"
    config = configparser.ConfigParser(interpolation=None)
    config.read(setup, encoding="utf-8")
    if config.get("metadata", "name", fallback="") != PROJECT:
        return None
    files = {Path(folder, name) for folder, _, names in os.walk(PACKAGE) for name in names if name.endswith(".py")}
    for package, patterns in config["options.package_data"].items():
        folder = PACKAGE.parent.joinpath(*package.split("."))
        for pattern in patterns.split(","):
            files |= {path for path in folder.glob(pattern.strip()) if path.is_file()}
    return _Kit(_written(config, setup.parent), sorted(files))


def _of_installation() -> _Kit:
    """Raises HostError."""
    for found in importlib.metadata.distributions(name=PROJECT):
        text = found.read_text("METADATA")
        if text is None or Path(str(found.locate_file(NAME))).resolve() != PACKAGE:
            continue  # of another copy of the kit
        metadata = {"METADATA": text.encode(), "entry_points.txt": (found.read_text("entry_points.txt") or "").encode()}
        for name in ("licenses/LICENSE", "LICENSE"):
            if licence := found.read_text(name):
                metadata["licenses/LICENSE"] = licence.encode()
                break
        named = [name for name in found.files or () if name.parts[0] == NAME and name.suffix != ".pyc"]
        return _Kit(metadata, sorted(PACKAGE.joinpath(*name.parts[1:]) for name in named))
    raise HostError(
        f"The kit in {PACKAGE} has no metadata, so no wheel can be made of it for the volunteers.\n"
        "1. Install the kit, and start the host again: python -m pip install PATH-OF-THE-CHECKOUT-OR-WHEEL"
    )


def _written(config: configparser.ConfigParser, folder: Path) -> dict[str, bytes]:
    """METADATA, entry_points.txt and the licence, as setup.cfg has them."""
    metadata, options = config["metadata"], config["options"]
    headers = Message()
    headers["Metadata-Version"] = "2.1"  # every pip of today reads it
    headers["Name"] = PROJECT
    headers["Version"] = volunteer_kit.__version__
    headers["Summary"] = metadata.get("description", "")
    for name in ("author", "keywords"):
        if name in metadata:
            headers[name.capitalize()] = metadata[name]
    headers["License"] = metadata.get("license_expression") or metadata.get("license", "")
    for classifier in _lines(metadata.get("classifiers", "")):
        headers["Classifier"] = classifier
    headers["Requires-Python"] = options["python_requires"]
    headers["Description-Content-Type"] = "text/markdown"
    for requirement in _requirements(options["install_requires"], folder):
        headers["Requires-Dist"] = requirement
    extras = config["options.extras_require"] if config.has_section("options.extras_require") else {}
    for extra, text in extras.items():
        headers["Provides-Extra"] = extra
        for requirement in _requirements(text, folder):
            name, _, marker = requirement.partition(";")
            condition = f"({marker.strip()}) and " if marker else ""
            headers["Requires-Dist"] = f'{name.strip()}; {condition}extra == "{extra}"'
    about = f"{metadata.get('description', '')}.\n\nPacked by `volunteer-kit host` for the volunteers of its run.\n"
    files = {"METADATA": f"{headers.as_string()}{about}".encode()}
    scripts = _lines(config.get("options.entry_points", "console_scripts", fallback=""))
    files["entry_points.txt"] = "\n".join(["[console_scripts]", *scripts, ""]).encode()
    if (folder / "LICENSE").is_file():
        files["licenses/LICENSE"] = (folder / "LICENSE").read_bytes()
    return files


def _requirements(text: str, folder: Path) -> list[str]:
    """Of a list, or of the file that is named in its place."""
    if text.strip().startswith("file:"):
        text = (folder / text.strip().removeprefix("file:").strip()).read_text(encoding="utf-8")
    stripped = [line.partition(" #")[0].strip() for line in _lines(text)]
    return [line for line in stripped if line and not line.startswith("#")]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]
