"""The Hugging Face Hub asked by its own clients: which parquet files a data set has and where they lie, with patience
for what passes, and words for what does not."""

from __future__ import annotations

import itertools
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import yaml

from volunteer_kit.http_client import blamed_on_proxy

from .errors import DataError
from .shards import MAX_SHARDS
from .source import Limits, ShardError

T = TypeVar("T")
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
LAST_ATTEMPT = 5.0  # s for the one that is on its way when time is up
MAX_WAIT = 300.0  # s that the Hub may ask for; it counts requests in windows of five minutes
MAX_CARD = 4 * 2**20  # bytes of a data set's README.md or .huggingface.yaml
CONVERTED = "refs/convert/parquet"  # the branch where the Hub keeps most data sets as parquet files


class Listing(NamedTuple):
    """The parquet files of one split."""

    commit: str
    subset: str
    shards: list[str]  # paths in the repository


class Place(NamedTuple):
    """Where a file can be read now: the Hub signs addresses for about an hour."""

    url: str
    size: int  # bytes


def list_parquet(dataset: str, subset: str | None, split: str, give_up_at: float) -> Listing:
    """The files of a data set "org/name" or "org/name@revision"; no attempt begins after `give_up_at`
    (time.monotonic()). Raises DataError."""
    repo, _, revision = dataset.partition("@")
    if Path(repo).exists():
        raise DataError(
            f"There is a folder {repo} in {Path.cwd()}, which the Hub's client would take for the data set.\n"
            "1. Start in another folder, or rename that one."
        )
    try:
        return _within(give_up_at, lambda: patiently(lambda: _list(repo, revision, subset, split), give_up_at, 8))
    except DataError:
        raise
    except Exception as error:  # huggingface_hub, datasets and their HTTP client each have their own
        raise DataError(explain(error, repo, revision)) from None


def _list(repo: str, revision: str, subset: str | None, split: str) -> Listing:
    from huggingface_hub import HfApi

    api = HfApi()
    commit = api.dataset_info(repo, revision=revision or None, timeout=20).sha
    api.auth_check(repo, repo_type="dataset")  # what is gated can be seen by everybody, and read by few
    _check_card(repo, commit)
    subset, files = _resolve(repo, commit, subset)
    if split not in files:
        raise DataError(f"The data set {repo} has no split {split!r}.\n1. Set `split` to one of: {_names(files)}.")
    begin = f"hf://datasets/{repo}@{commit}/"
    shards = sorted({str(file) for file in files[split]})
    if not shards or len(shards) > MAX_SHARDS or not all(shard.startswith(begin) for shard in shards):
        raise DataError(
            f"The split {split!r} of the data set {repo} has {len(shards)} files, some of them not in its repository.\n"
            "1. Take a data set that keeps its parquet files with it."
        )
    return Listing(commit, subset, [shard.removeprefix(begin) for shard in shards])


def _resolve(repo: str, commit: str, subset: str | None) -> tuple[str, dict[str, list[str]]]:
    """A subset's name, and the files of its splits, by `datasets`, which runs no code of repositories (since 4.0)."""
    import datasets

    datasets.disable_progress_bars()
    try:
        builder = datasets.load_dataset_builder(repo, subset, revision=commit)
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError):
        raise
    except ValueError as error:
        if not any(word in str(error) for word in ("BuilderConfig", "Config name")):
            raise DataError(_no_tables(repo, "nothing that could be told apart")) from None
        names = datasets.get_dataset_config_names(repo, revision=commit)
        raise DataError(
            f"The data set {repo} has {'no subset ' + repr(subset) if subset else 'several subsets'}.\n"
            f"1. Set `subset` to one of: {_names(names)}."
        ) from None
    except RuntimeError as error:
        if "scripts" not in str(error):
            raise
        raise DataError(_no_tables(repo, "a program, and programs of others are never run here")) from None
    except (datasets.exceptions.DataFilesNotFoundError, datasets.data_files.EmptyDatasetError):
        raise DataError(_no_tables(repo, "no data files")) from None
    kind = type(builder).__module__.rpartition(".")[2]
    if kind != "parquet" or not builder.config.data_files:
        raise DataError(_no_tables(repo, f"files of the kind {kind}"))
    return str(builder.config.name), {str(name): list(files) for name, files in builder.config.data_files.items()}


def _check_card(repo: str, commit: str) -> None:
    """A data set's card may say where its files are, and `datasets` would look at any place: folders of this machine,
    servers of its network. Only files of the repository itself may be named. Raises DataError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    for name in ("README.md", ".huggingface.yaml"):
        require_size(repo, name, commit, MAX_CARD, repo_type="dataset")
        try:
            path = hf_hub_download(repo, name, repo_type="dataset", revision=commit)
        except EntryNotFoundError:
            continue
        text = Path(path).read_text(encoding="utf-8-sig", errors="replace")
        if name == "README.md":
            _, _, rest = text.partition("---\n") if text.startswith("---\n") else ("", "", "")
            text = rest.partition("\n---")[0]
        try:
            about = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError, ValueError):
            raise DataError(_no_tables(repo, f"a {name} that cannot be read")) from None
        configs = about.get("configs") if isinstance(about, dict) else None
        for place in _places_named(configs):
            if re.search(r"^[/~\\]|:|(^|/)\.\.(/|$)", place):
                raise DataError(_no_tables(repo, f"files at {place[:80]!r}, outside its repository"))


def _places_named(value: Any, is_place: bool = False) -> Iterator[str]:
    """All that a card's `configs` say under data_files and data_dir."""
    if isinstance(value, str) and is_place:
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            is_split = is_place and key == "split"
            yield from _places_named(inner, (is_place or key in ("data_files", "data_dir")) and not is_split)
    elif isinstance(value, list):
        for inner in value:
            yield from _places_named(inner, is_place)


def require_size(repo: str, name: str, revision: str | None, limit: int, repo_type: str = "model") -> None:
    """Before a file of the Hub is downloaded: it has at most `limit` bytes. Says nothing about a file that is missing,
    or while the Hub cannot be asked. Raises DataError."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        url = hf_hub_url(repo, name, repo_type=repo_type, revision=revision or None)
        size = get_hf_file_metadata(url, timeout=10).size
    except (HfHubHTTPError, OSError, ValueError):
        return  # whoever downloads it says why it cannot be had
    except Exception as error:
        if not _is_network(error):
            raise
        return
    if size is not None and size > limit:
        raise DataError(
            f"{name} of {repo} on the Hub has {size} bytes, and such a file needs at most {limit}.\n"
            "1. Ask its owner whether it is the right one."
        )


def find_place(repo: str, commit: str, shard: str, limits: Limits, give_up_at: float) -> Place:
    """Where a file of a data set lies. Raises ShardError."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repo, shard, repo_type="dataset", revision=commit)

    def ask() -> Any:
        timeout = max(0.2, min(limits.timeout, give_up_at - time.monotonic()))
        return get_hf_file_metadata(url, timeout=timeout)

    try:
        found = patiently(ask, give_up_at, limits.retries)
    except Exception as error:  # as above
        missing = type(error).__name__ in ("EntryNotFoundError", "RemoteEntryNotFoundError", "RevisionNotFoundError")
        why = explain(error, repo, commit).splitlines()
        raise ShardError("missing_shard" if missing else "unreachable_shard", " ".join(why)) from None
    if not found.size or not found.location:
        raise ShardError("empty_shard", "the Hub does not say how large it is")
    return Place(found.location, found.size)


def patiently(call: Callable[[], T], give_up_at: float, retries: int) -> T:
    """`call` again while the Hub is busy or the network breaks, as late as it asks for, with growing pauses. Raises
    what `call` raises when that is no use, or when the next attempt would begin after `give_up_at`."""
    for attempt in itertools.count():
        try:
            return call()
        except Exception as error:
            pause = max(0.5 * 2 ** min(attempt, 6) * (0.5 + random.random()), _asked_wait(error))
            if not is_passing(error) or attempt >= retries or time.monotonic() + pause > give_up_at:
                raise
        time.sleep(pause)
    raise AssertionError


def is_passing(error: BaseException) -> bool:
    """Whether asking again may help."""
    if isinstance(error, DataError):
        return False
    status = _status(error)
    if status is not None:
        return status in PASSING
    return _is_network(error)


def explain(error: BaseException, repo: str, revision: str) -> str:
    """What happened and what to do, without anything that the error says itself: that may hold signed addresses."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/datasets/{repo}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"The data set {repo} is gated, and you are not among those who may read it.\n"
            f"1. Ask for access: {page}\n2. Log in with the account that has it: hf auth login"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"There is no data set {repo} on the Hub, or it is private.\n"
            f"1. Check its name: {page}\n2. If it is private, log in with an account that may read it: hf auth login"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"The data set {repo} has no revision {revision!r}.\n"
            f"1. Look which there are: {page}/commits/main\n2. Or leave the revision out: dataset: {repo}"
        )
    status = _status(error)
    if status == 429:
        return (
            f"The Hub has had too many requests from here and gives nothing of {repo} for now (HTTP 429).\n"
            f"1. Wait {_asked_wait(error) or 300:.0f} s and start again.\n"
            "2. Log in, which allows more requests: hf auth login"
        )
    if status in (401, 403):
        return (
            f"The Hub refuses to give {repo} to this login (HTTP {status}).\n"
            f"1. Log in again: hf auth login\n2. Look whether that account may read it: {page}"
        )
    if status is None and (trouble := blamed_on_proxy(page, error)):
        return f"The data set {repo} cannot be read from the Hub: {trouble}"
    what = f"HTTP {status}" if status else _in_words(error)
    return (
        f"The data set {repo} cannot be read from the Hub ({what}).\n"
        f"1. Check the network: curl -I {page}\n"
        "2. If HF_HUB_OFFLINE is set, unset it: data sets are streamed, not kept.\n"
        "3. Or train on files that you have: kind: shards"
    )


def _no_tables(repo: str, what: str) -> str:
    return (
        f"The data set {repo} has {what}; only parquet files can be streamed by parts.\n"
        f"1. The Hub keeps most data sets as parquet too: dataset: {repo}@{CONVERTED}\n"
        "2. If it has tars of images and captions, name their addresses: kind: shards"
    )


def _names(names: Any) -> str:
    shown = [str(name)[:80] for name in list(names)[:20]]
    return ", ".join(shown) + (", ..." if len(names) > 20 else "") if shown else "(there is none)"


def _status(error: BaseException | None) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _asked_wait(error: BaseException | None) -> float:
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    seconds = str(headers.get("Retry-After", ""))
    return min(float(seconds), MAX_WAIT) if seconds.isascii() and seconds.isdigit() else 0.0


def _in_words(error: BaseException) -> str:
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return "no answer in time"
    return getattr(error, "strerror", None) or type(error).__name__


def _is_network(error: BaseException) -> bool:
    """The Hub's client has changed its HTTP library twice; all have errors of their own."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, (OfflineModeIsEnabled, FileNotFoundError, PermissionError)):
        return False
    return isinstance(error, (OSError, HfHubHTTPError)) or type(error).__module__.split(".")[0] in (
        "httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3",
    )  # fmt: skip


def _within(give_up_at: float, call: Callable[[], T]) -> T:
    """What `call` gives, unless it takes too long: the Hub's client sleeps for as long as a server asks it to."""
    outcome: list[tuple[T | None, BaseException | None]] = []

    def work() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(give_up_at - time.monotonic() + LAST_ATTEMPT)
    if not outcome:
        _raise(TimeoutError("no answer in time"))
    result, error = outcome[0]
    return result if error is None else _raise(error)


def _raise(error: BaseException) -> NoReturn:
    raise error
