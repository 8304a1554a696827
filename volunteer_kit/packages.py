"""Which packages the kit needs for what, which of them this Python lacks, and the line that installs them.

Nothing that is looked for is imported, so a look takes milliseconds and a broken package breaks nothing. This module
itself needs the standard library alone (and for versions `packaging`, its own or pip's): it has to work where
everything else is missing.

The lists are those of the kit's own metadata (requirements.txt and setup.cfg in a checkout). dalle-pytorch and
taming-transformers-rom1504 cannot be on them, since their own requirements no longer install: UPSTREAM_LINE adds them,
and `volunteer-kit setup` runs it.
"""

from __future__ import annotations

import configparser
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import shutil
import site
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

KIT = "volunteer-kit"
ROOT = Path(__file__).resolve().parents[1]  # a checkout, or the site-packages that the kit is installed in
UPSTREAM = ("dalle-pytorch==1.6.6", "taming-transformers-rom1504==0.0.6")
UPSTREAM_LINE = f"pip install --no-deps {' '.join(UPSTREAM)}"
EXIT_CODE = 78  # of a process that lacks a package (EX_CONFIG of sysexits.h): a new start does not mend that

# Purpose -> the extra of the kit's metadata that it takes beside the kit's own requirements.
EXTRAS = {
    "train": "", "demo": "", "notebook": "", "encode": "", "host": "server", "postgresql": "server", "finetune": "hf",
    "4bit": "hf", "metrics": "monitor", "tpu": "tpu",
}  # fmt: skip
WITH_UPSTREAM = ("train", "demo", "notebook")
# Requirements that only these purposes cannot do without.
ONLY_FOR = {
    "ipywidgets": ("notebook",), "matplotlib": ("demo", "host"), "psycopg": ("postgresql",), "bitsandbytes": ("4bit",),
}  # fmt: skip
# Where the name that is imported is not the package's own with "_" for "-".
MODULES = {
    "axial-positional-embedding": "axial_positional_embedding",
    "dalle-pytorch": "dalle_pytorch",
    "pillow": "PIL",
    "protobuf": "google.protobuf",
    "python-multipart": "python_multipart",
    "pyyaml": "yaml",
    "taming-transformers-rom1504": "taming",
}


class MissingDependency(ImportError):
    """A package is not installed; the message has the line that installs it."""


class Lack(NamedTuple):
    """A package that is absent, or there in a version that the kit cannot use.

    :param line: as pip takes it, `hivemind<1.1.13,>=1.1.12`
    :param found: the version that is there; None: the package is absent
    """

    name: str
    line: str
    found: str | None = None

    @property
    def is_upstream(self) -> bool:
        return self.line in UPSTREAM


# --- the lists ---


def requirements(extra: str = "") -> list[str]:
    """The lines of the kit's requirements, or those of one extra; [] where neither checkout nor metadata are there."""
    if is_checkout():
        lines, extra = _listed(_of_checkout(extra)), ""
    else:
        try:
            lines = importlib.metadata.requires(KIT) or []
        except importlib.metadata.PackageNotFoundError:
            return []
    return [line.partition(";")[0].strip() for line in lines if _belongs(line, extra)]


def is_checkout() -> bool:
    """Whether the kit runs from its repository, whose files are newer than the metadata of an editable install."""
    with suppress(OSError):
        return f"name = {KIT}" in (ROOT / "setup.cfg").read_text() and (ROOT / "requirements.txt").is_file()
    return False


def _of_checkout(extra: str) -> str:
    if not extra:
        return (ROOT / "requirements.txt").read_text()
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    return config.get("options.extras_require", extra, fallback="")


def _listed(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def _belongs(line: str, extra: str) -> bool:
    """Of `torch>=2.5` and `fastapi>=0.110; extra == "server"`, as metadata has them."""
    marker = line.partition(";")[2].strip()
    if not marker:
        return not extra
    try:
        from packaging.markers import Marker
    except ImportError:  # good enough without it: of the lists that are read here none has another marker
        found = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        return (found[1] if found else "") == extra
    return Marker(marker).evaluate({"extra": extra}) and (not extra or "extra" in marker)


def name_of(line: str) -> str:
    """`psycopg[binary]>=3.1` -> `psycopg`, in the spelling that package indexes compare by."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0]).lower()


def module_of(name: str) -> str:
    """The name by which a package is imported."""
    return MODULES.get(name, name.replace("-", "_"))


# --- what is there ---


def lacking(*purposes: str, strict: bool = False) -> list[Lack]:
    """The packages that this Python lacks for `purposes` (keys of EXTRAS).

    :param strict: all that the lists name counts, and in the versions that they name; False: only what `purposes`
        cannot do without. A version above an upper bound counts in any case: the bound is there since newer ones
        change what peers compute together
    """
    lines = requirements()
    for purpose in purposes:
        lines += requirements(EXTRAS[purpose]) if EXTRAS[purpose] else ()
        lines += UPSTREAM if purpose in WITH_UPSTREAM else ()
    wanted = [line for line in dict.fromkeys(lines) if strict or _is_for(name_of(line), purposes)]
    return [lack for line in wanted if (lack := _lack(line, strict)) is not None]


def lacking_upstream() -> list[Lack]:
    """Of dalle-pytorch and taming-transformers-rom1504 those that are not there."""
    return [lack for line in UPSTREAM if (lack := _lack(line, False)) is not None]


def require_upstream() -> None:
    """Raises MissingDependency where dalle-pytorch or taming-transformers-rom1504 is lacking."""
    if lacks := lacking_upstream():
        raise MissingDependency(in_words(lacks))


def require(*purposes: str) -> None:
    """Raises MissingDependency, in words for a person, where something is lacking."""
    if lacks := lacking(*purposes):
        raise MissingDependency(in_words(lacks, purposes))


def require_tracker(name: str) -> None:
    """:param name: trackio, which is of an extra of the kit, or wandb, which is not. Raises MissingDependency."""
    if not _is_there(name):
        line = setup_command(["metrics"]) if name == "trackio" else f"python -m pip install {name}"
        raise MissingDependency(
            f"The package {name!r} is not installed.\n1. Run: {line}\n"
            f"2. Or leave --{name} out; metrics are in the journal anyway."
        )


def version_of(name: str) -> str | None:
    """As the package's metadata say; None: there are none, or they cannot be read."""
    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, UnicodeDecodeError):
        return None


def folders_changed() -> tuple[int, ...]:
    """When the folders that Python imports from were last changed: another tuple after a package came or went."""
    return tuple(_changed(Path(folder)) for folder in sys.path)


def _changed(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _is_for(name: str, purposes: Sequence[str]) -> bool:
    return name not in ONLY_FOR or bool({*purposes} & {*ONLY_FOR[name]})


def _lack(line: str, strict: bool) -> Lack | None:
    name = name_of(line)
    if not _is_there(module_of(name), may_be_bare=line in UPSTREAM):
        return Lack(name, line)
    found = version_of(name)
    bounds = re.sub(r"^[A-Za-z0-9_.-]+(\[[^]]*\])?", "", line)
    if not strict:
        bounds = ",".join(bound for bound in bounds.split(",") if not bound.strip().startswith((">", "!")))
    return None if found is None or _fits(found, bounds) else Lack(name, line, found)


def _is_there(module: str, may_be_bare: bool = False) -> bool:
    """`may_be_bare`: a folder without an __init__.py, which any folder of that name in the current one is, too."""
    try:
        if may_be_bare:  # as model/upstream.py looks for it
            spec = importlib.machinery.PathFinder.find_spec(module)
            return spec is not None and spec.submodule_search_locations is not None
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # its parent is absent; None in sys.modules
        return False
    return spec is not None and spec.origin is not None


def _fits(found: str, bounds: str) -> bool:
    """Where nobody can compare them, they do."""
    for home in ("packaging", "pip._vendor.packaging"):
        with suppress(ImportError):
            specifiers = importlib.import_module(f"{home}.specifiers")
            version = importlib.import_module(f"{home}.version")
            try:
                return specifiers.SpecifierSet(bounds).contains(version.Version(found), prereleases=True)
            except version.InvalidVersion:
                return True
    return True


# --- in words ---


def in_words(lacks: Sequence[Lack], purposes: Iterable[str] = ()) -> str:
    """The names of what is lacking, and the command that installs it."""
    absent = [lack.name for lack in lacks if lack.found is None]
    parts = []
    if absent:
        named = ", ".join(repr(name) for name in absent)
        parts.append(
            f"The package {named} is not installed." if len(absent) == 1 else f"Packages are not installed: {named}."
        )
    for lack in lacks:
        if lack.found is not None:
            parts.append(f"The package {lack.name!r} is there as {lack.found}, and the kit needs {lack.line}.")
    return "\n".join([" ".join(parts), *(f"{number}. {step}" for number, step in enumerate(steps(lacks, purposes), 1))])


def steps(lacks: Sequence[Lack], purposes: Iterable[str] = ()) -> Iterator[str]:
    """The lines to type."""
    yield f"Run in your terminal, or with “!” before it in a notebook: {setup_command(purposes)}"
    if any(lack.is_upstream for lack in lacks):
        what = "The same" if all(lack.is_upstream for lack in lacks) else "Of these, dalle-pytorch and taming"
        yield f"{what} by hand: python -m {UPSTREAM_LINE}"


def setup_command(purposes: Iterable[str] = ()) -> str:
    """`volunteer-kit setup ...` as it works here: beside a Python whose scripts are not on the PATH, both forms."""
    by_extra = {extra: purpose for purpose, extra in reversed(EXTRAS.items())}  # the first of each
    extra = [by_extra[one] for one in dict.fromkeys(EXTRAS[purpose] for purpose in purposes) if one]
    command = " ".join([KIT, "setup", *extra])
    script = shutil.which(KIT)
    if script and Path(script).parent == Path(sys.executable).parent:
        return command
    return f"{command}   (or: {sys.executable} -m volunteer_kit {' '.join(['setup', *extra])})"


def explained(error: ImportError) -> str | None:
    """The text for a person who met `error`; None where no package is missing, or the kit's own modules are incomplete:
    that is a bug."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    module = (error.name or "").partition(".")[0]
    if not module or module == __name__.partition(".")[0]:
        return None
    for purpose, extra in EXTRAS.items():
        for line in [*requirements(extra), *UPSTREAM]:
            if module_of(name_of(line)).partition(".")[0] == module:
                lack, all_lacks = Lack(name_of(line), line), lacking(purpose)
                return in_words(all_lacks if lack in all_lacks else [lack], [purpose])
    return (
        f"The package {module!r} is not installed, and another package needs it.\n"
        f"1. See what else is lacking: {KIT} doctor\n"
        "2. Let pip look for what does not fit together: python -m pip check\n"
        "3. Or install the kit again, in a new environment: python3 -m venv NAME"
    )


def update_lines(first: int = 1) -> str:
    """How to come by the version that a run's host has. No package index has the kit under a name of its own, and
    anybody could register one there: so no line ever asks an index for it."""
    return (
        f"{first}. Install the version of the run's host: open the run's link in a browser, its page has the line.\n"
        f"{first + 1}. In a checkout: git pull && make install"
    )


def with_kit_path(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for a child that must find this very kit. An installed kit it finds by itself: in PYTHONPATH, its
    site-packages would come before the standard library, and hide modules of it."""
    given = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    if str(ROOT) in (*_site_folders(), *given):
        return dict(environment)
    return {**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), *given])}


def _site_folders() -> set[str]:
    folders = {*site.getsitepackages(), site.getusersitepackages()}
    return {str(Path(folder).resolve()) for folder in folders}
