"""Finding a run file and reading it so that every mistake in it is told with its line and its fix."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from volunteer_kit.run_origin import Origin
from volunteer_kit.storage.places import expanded, kit_folder

KeyPath = tuple[str | int, ...]

MAX_TOLD = 6  # mistakes told at once; more than these help nobody
MAX_RUN_FILE = 256 * 1024  # bytes; a run file from the Hub was written by a stranger
MAX_DEPTH = 16  # levels of nesting; a run file has three


RUN_FILES = Path(__file__).parent / "run_files"


class RunError(ValueError):
    """A run that cannot be used as it is written; the message names file, line, reason and fix."""


class Mistake(NamedTuple):
    """One thing wrong with a run, and the way out."""

    path: KeyPath  # the keys that lead to it; () is the file as a whole
    what: str
    fix: str


@dataclass(frozen=True)
class RunText:
    """A parsed run file: its values, and the line of each key."""

    source: str  # the file's path, as told in messages
    values: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int | None:
        """The line of a key, or of the nearest key above it that is in the file."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None

    def error(self, mistakes: list[Mistake]) -> RunError:
        """All mistakes as one RunError, in the order of their lines."""
        told = []
        for mistake in sorted(mistakes, key=lambda m: self.line(m.path) or 0)[:MAX_TOLD]:
            line = self.line(mistake.path)
            place = self.source if line is None else f"{self.source}, line {line}"
            told.append(f"{place}: {mistake.what}.\n  Fix: {mistake.fix}.")
        if len(mistakes) > MAX_TOLD:
            told.append(f"... and {len(mistakes) - MAX_TOLD} more of the kind.")
        return RunError("\n".join(told))


def impossible(path: str | KeyPath, what: str, fix: str) -> PydanticCustomError:
    """What a validator raises: `path` is relative to the model or field that is being validated."""
    keys = (path,) if isinstance(path, str) and path else tuple(path)
    return PydanticCustomError("impossible", "{what}", {"what": what, "fix": fix, "path": list(keys)})


class FoundRun(NamedTuple):
    """A run file on this machine, and where it came from."""

    path: Path
    origin: Origin


def find_run_file(name: str) -> Path:
    """The file that a name, a path or a Hub id means; downloads the Hub's. Raises RunError."""
    return find_run(name).path


def find_run(name: str, *, allow_http: bool = False) -> FoundRun:
    """As find_run_file, with where the file came from.

    :param allow_http: read a link's file from another machine by http:// too
    Raises RunError.
    """
    if re.match(r"https?://", name, re.IGNORECASE):
        return _linked_run_file(name, allow_http)
    path = expanded(name)
    if path.is_file():
        return FoundRun(path, origin_of(path))
    if path.is_dir() and (path / "run.yaml").is_file():
        return FoundRun(path / "run.yaml", origin_of(path / "run.yaml"))
    shipped = RUN_FILES / f"{name}.yaml"
    if "/" not in name and shipped.is_file():
        return FoundRun(shipped, Origin(kind="kit"))
    if name.startswith("hub:") or (name.count("/") == 1 and not name.endswith((".yaml", ".yml"))):
        return FoundRun(_download_run_file(name.removeprefix("hub:")), Origin(kind="hub"))
    known = sorted(file.stem for file in RUN_FILES.glob("*.yaml"))
    near = difflib.get_close_matches(Path(name).stem, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise RunError(
        f"There is no run {name!r}.{hint}\n"
        f"1. A run that comes with the kit: {', '.join(known)}.\n"
        "2. Your own: give the path of its YAML file.\n"
        "3. A run on the Hugging Face Hub: give its repository, as organization/name.\n"
        f"4. A run of somebody else: give its address, {_as_link(name)}."
    )


def _as_link(name: str) -> str:
    """A name that may be a host's, as its link."""
    is_host = re.fullmatch(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+(:\d+)?(/.*)?", name)
    return f"https://{name}" if is_host and not name.endswith((".yaml", ".yml")) else "https://..."


def origin_of(path: Path) -> Origin:
    """Of a file by where it lies: what the kit or the Hub's client keeps of links and repositories stays theirs, under
    whatever path it is opened."""
    places = {path.absolute(), path.resolve()}
    if any(place.is_relative_to(RUN_FILES) for place in places):
        return Origin(kind="kit")
    if any(place.is_relative_to(folder) for place in places for folder in _link_folders()):
        return Origin(kind="link")
    if any(place.is_relative_to(folder) for place in places for folder in _hub_folders()):
        return Origin(kind="hub")
    return Origin(kind="file")


def _link_folders() -> list[Path]:
    """Where files of links are kept."""
    cache = os.environ.get("VOLUNTEER_KIT_HOME")
    folders = [Path(cache) / "run_files"] if cache else []
    with suppress(RuntimeError):  # a user without a home folder
        folders.append(Path.home() / ".cache/volunteer_kit/run_files")
    return [form for folder in folders for form in (folder.absolute(), folder.resolve())]


def _hub_folders() -> list[Path]:
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    return [folder.absolute(), folder.resolve()]


def _linked_run_file(url: str, allow_http: bool) -> FoundRun:
    from volunteer_kit.run_link import InsecureLink, LinkError, fetch_run_file

    try:
        found = fetch_run_file(url, kit_folder().absolute() / "run_files", allow_http=allow_http)
    except InsecureLink as reason:
        raise RunError(
            f"The run behind {url[:300]} was not read: {reason}.\n"
            "1. Ask the host for a link that begins with https://\n"
            "2. In a network that you trust, as at home, allow it: volunteer-kit join --allow-http "
            f"{shlex.quote(url[:300])}\n"
            "   or join_swarm(..., allow_http=True)\n"
            f"3. Or look at the file first, and give its path: curl -o run.yaml {shlex.quote(url[:300])}"
        ) from None
    except LinkError as reason:
        raise RunError(
            f"The run behind {url[:300]} could not be read: {reason}.\n"
            "1. Open the link in a browser: it should show the run's page, or lines of `key: value`.\n"
            "2. Ask the host for the right one."
        ) from None
    return FoundRun(found.path, Origin(kind="link", endpoint=found.endpoint))


def _download_run_file(repository: str) -> Path:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    from volunteer_kit.data.errors import DataError
    from volunteer_kit.data.hub_client import require_size
    from volunteer_kit.http_client import blamed_on_proxy

    try:
        require_size(repository, "run.yaml", None, MAX_RUN_FILE)
        return Path(hf_hub_download(repository, "run.yaml", etag_timeout=10))
    except DataError as error:
        reason = str(error).splitlines()[0].rstrip(".")
    except LocalEntryNotFoundError as error:
        trouble = blamed_on_proxy(constants.ENDPOINT, error.__cause__)
        reason = trouble.in_a_line if trouble else _NO_HUB
    except EntryNotFoundError:
        reason = "that repository has no file run.yaml, so it is no run; check the name"
    except GatedRepoError:
        reason = "its owners let in only people they know: ask them on its page, then run: hf auth login"
    except RepositoryNotFoundError:
        reason = "the Hub has no such repository, or it is private: check the name, or run: hf auth login"
    except HfHubHTTPError as error:
        reason = f"the Hub answered: {str(error).splitlines()[0][:200]}"
    except OSError as error:  # no DNS, a proxy's refusal, a full disk
        trouble = blamed_on_proxy(constants.ENDPOINT, error)
        reason = trouble.in_a_line if trouble else f"{_NO_HUB} ({type(error).__name__})"
    except ValueError as error:  # not the name of a repository
        reason = str(error).splitlines()[0][:200]
    raise RunError(f"The run {repository!r} could not be read from the Hugging Face Hub: {reason}.")


_NO_HUB = (
    "the Hub could not be reached and no earlier copy is here. Check the network, or get the repository's "
    "run.yaml another way and give its path"
)


def read_small(path: Path) -> str:
    """The text of a run file. Raises RunError: unreadable, no text, or too large to be one."""
    try:
        if path.exists() and not path.is_file():
            raise RunError(f"{path} is not a regular file, so it is no run file.")
        if (size := path.stat().st_size) > MAX_RUN_FILE:
            raise RunError(f"{path} has {size} bytes; a run file at most {MAX_RUN_FILE}: is it that?")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RunError(f"{path} is no text file in UTF-8, so it is no run file.") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}.") from None


def read_yaml(text: str, source: str) -> RunText:
    """YAML text -> values with their lines. Raises RunError: syntax, doubled keys, aliases, nesting."""
    try:
        _refuse_traps(text, source)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        run = RunText(source, {})
        if not isinstance(root, yaml.MappingNode):
            raise RunError(
                f"{source}: this is no run file: it should be lines of `key: value`.\n"
                "  Fix: start from volunteer_kit/run_files/demo.yaml."
            )
        _note_lines(root, (), run)
        run.values.update(yaml.safe_load(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = source if mark is None else f"{source}, line {mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise RunError(
            f"{place}: this is not valid YAML: {problem}.\n"
            "  Fix: look at that line and the one above it for a missing colon, quote or space."
        ) from None
    return run


def _refuse_traps(text: str, source: str) -> None:
    """A stranger's few bytes must not become much work: no aliases that multiply, no deep nesting."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise RunError(f"{source}: a run file may not use YAML aliases.\n  Fix: write the value out.")
        if depth > MAX_DEPTH:
            raise RunError(f"{source}: the file is nested more than {MAX_DEPTH} levels deep; a run has three.")


def _note_lines(node: yaml.Node, path: KeyPath, run: RunText) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value))
            line = key.start_mark.line + 1
            if inner in run.lines:
                raise RunError(
                    f"{run.source}, line {line}: {key.value!r} stands in line {run.lines[inner]} too.\n"
                    "  Fix: remove one of the two."
                )
            run.lines[inner] = line
            _note_lines(value, inner, run)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            run.lines[(*path, index)] = value.start_mark.line + 1
            _note_lines(value, (*path, index), run)


def explain(error: ValidationError, run: RunText, root: type[BaseModel]) -> RunError:
    """pydantic's errors -> one RunError in plain words, with lines, nearest right keys and fixes."""
    found = error.errors(include_url=False)
    unknown = [tuple(details["loc"]) for details in found if details["type"] == "extra_forbidden"]
    misspelt = {(*path[:-1], _nearest(str(path[-1]), _fields_at(root, path[:-1]))) for path in unknown}
    told = [each for each in found if each["type"] != "missing" or tuple(each["loc"]) not in misspelt]
    mistakes = [_mistake(details, root) for details in told]
    unique = {(mistake.path, mistake.what): mistake for mistake in mistakes}
    return run.error(list(unique.values()))


def _nearest(key: str, known: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.6)), None)


def _mistake(details: ErrorDetails, root: type[BaseModel]) -> Mistake:
    path: KeyPath = tuple(details["loc"])
    name = ".".join(str(key) for key in path)
    context: Mapping[str, Any] = details.get("ctx") or {}
    kind = details["type"]
    if kind == "impossible":
        return Mistake((*path, *context["path"]), context["what"], context["fix"])
    if kind == "extra_forbidden":
        return _unknown_key(path, _fields_at(root, path[:-1]))
    if kind == "missing":
        return Mistake(path[:-1], f"{name!r} is missing", f"add a line `{path[-1]}: ...`")
    if kind == "value_error":  # a ValueError of another room's validator
        reason = str(context.get("error", details["msg"])).rstrip(".")
        named = [key for key in re.findall(r"\w+", reason) if key in _fields_at(root, path)]
        return Mistake((*path, *named[:1]), reason, f"change {' or '.join(dict.fromkeys(named)) or name}")
    message = details["msg"]
    what = f"{name} is {_shown(details['input'])}, but {message[:1].lower()}{message[1:]}"
    return Mistake(path, what, f"give {name} a value of that kind")


def _unknown_key(path: KeyPath, known: list[str]) -> Mistake:
    key, section = str(path[-1]), ".".join(str(part) for part in path[:-1])
    where = f"in section {section!r}" if section else "of a run"
    if near := _nearest(key, known):
        what = f"{key!r} is no setting {where}; the nearest is {near!r}"
        return Mistake(path, what, f"write {near} instead, or remove it")
    return Mistake(path, f"{key!r} is no setting {where}", f"remove it; settings there: {', '.join(known)}")


def _fields_at(root: type[BaseModel], path: KeyPath) -> list[str]:
    """The keys that the section at `path` may have."""
    model: Any = root
    for key in path:
        info = getattr(model, "model_fields", {}).get(key)
        if info is None:
            continue  # pydantic names union branches in its paths as well
        options = [info.annotation, *getattr(info.annotation, "__args__", ())]
        models = (kind for kind in options if isinstance(kind, type) and issubclass(kind, BaseModel))
        model = next(models, None)
    return sorted(getattr(model, "model_fields", {}))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
