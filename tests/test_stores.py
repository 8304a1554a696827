"""Shards at s3:// and gs://: fsspec with a bucket in memory in the place of s3fs; plain addresses for linked runs."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from fsspec.spec import AbstractFileSystem

from tests.encoding import make
from tests.shard_files import FAST, good_shard, open_source
from volunteer_kit.data import stores
from volunteer_kit.data.addresses import ANY_ADDRESS, PUBLIC_ONLY, AddressPolicy
from volunteer_kit.data.codes import CodeSource
from volunteer_kit.data.errors import DataError
from volunteer_kit.data.hosts import HOSTS
from volunteer_kit.data.hub_access import hub_login, is_at_hub
from volunteer_kit.data.settings import Filters
from volunteer_kit.data.shards import catalogue_of, expand_shards, open_shard
from volunteer_kit.data.source import ShardError
from volunteer_kit.data.stores import PIECE, public_url

SECRET = "AKIAsecret"


class NoCredentialsError(Exception):
    """As botocore's."""


class Bucket(AbstractFileSystem):
    """A file system in memory; each request is noted, and the next ones fail as `faults` say."""

    protocol = "s3"
    cachable = False
    files: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[tuple[bool, str, int | None, int | None]]] = []
    faults: ClassVar[list[Exception]] = []
    is_open: ClassVar[threading.Event] = threading.Event()

    def __init__(self, anon: bool = False, config_kwargs: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.anon = anon

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": len(self._data(path))}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self._data(path, start, end)[start:end]

    def find(self, path: str, *_: Any, detail: bool = False, **__: Any) -> Any:
        found = {name: {"name": name, "type": "file"} for name in self.files if name.startswith(path.rstrip("/") + "/")}
        return found if detail else list(found)

    def _data(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        self.asked.append((self.anon, path, start, end))
        self.is_open.wait()
        if self.faults:
            raise self.faults.pop(0)
        name = self._strip_protocol(path)
        if name not in self.files:
            raise FileNotFoundError(path)
        return self.files[name]


@pytest.fixture
def bucket(monkeypatch, tmp_path) -> Iterator[type[Bucket]]:
    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, "s3", Bucket)
    monkeypatch.setattr(stores, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(stores, "_plain", set())
    HOSTS.worked("s3://photos/x")
    Bucket.files, Bucket.asked, Bucket.faults = {}, [], []
    Bucket.is_open.set()
    for n in range(2):
        Bucket.files[f"photos/a/{n}.tar"] = good_shard(tmp_path / f"{n}.tar", 30, first=100 * n).read_bytes()
    yield Bucket
    Bucket.is_open.set()
    HOSTS.worked("s3://photos/x")


def read(shard: str, start: int = 0, stop: int | None = None, **settings: Any) -> bytes:
    with open_shard(shard, FAST._replace(**{"timeout": 20, **settings}), time.monotonic() + 60, start, stop) as stream:
        return stream.read()


def test_a_shard_in_a_bucket_is_the_shard_on_the_disk(bucket, tmp_path):
    shards = expand_shards("s3://photos/a/{0..1}.tar")
    assert shards == expand_shards("s3://photos/a/*.tar") == expand_shards("s3://photos/a/")
    here = open_source(tmp_path / "0.tar", tmp_path / "1.tar")
    there = open_source(*shards, limits=FAST._replace(timeout=20))
    assert there.catalogue == here.catalogue
    for ours, theirs in zip(here.shards, there.shards, strict=True):
        for start, stop in ((0, 10), (10, 20), (20, None)):
            found = [[(raw.index, raw.key, source.use(raw).caption) for raw in source.read(shard, start, stop, 1e18)]
                     for source, shard in ((here, ours), (there, theirs))]  # fmt: skip
            assert found[0] == found[1] and len(found[0]) == min(stop or 30, 30) - start
    starts = [start for _, path, start, _ in bucket.asked if path == shards[0] and start is not None]
    assert len(starts) == 3 and 0 == starts[0] < starts[1] < starts[2], "a range goes on where the last one ended"


def test_code_shards_in_a_bucket(bucket, tmp_path):
    make(tmp_path / "0.tar", tmp_path / "out")
    bucket.files |= {f"photos/codes/{path.name}": path.read_bytes() for path in (tmp_path / "out").iterdir()}
    settings: dict[str, Any] = {"codes": 4, "num_codes": 256, "tokenizer": None, "filters": Filters()}
    source = CodeSource(["s3://photos/codes/0.tar"], counts=Counter(), limits=FAST._replace(timeout=20), **settings)
    shard = source.shards[0]
    assert source.ranges(shard, 1e18) == [0, 30]
    assert [source.use(raw).caption for raw in source.read(shard, 28, 30, 1e18)] == [
        "picture number 28", "picture number 29"
    ]  # fmt: skip


def test_large_files_come_in_pieces(bucket):
    bucket.files["photos/large"] = data = bytes(range(256)) * 10_000
    for start, stop in ((0, None), (5, 1_500_000), (len(data), None), (100, 100), (0, 10**9)):
        assert read("s3://photos/large", start, stop) == data[start:stop]
    pieces = [stop - start for _, _, start, stop in bucket.asked if start is not None]
    assert len(pieces) == 8 and max(pieces) == PIECE
    with pytest.raises(ShardError, match="ends after") as found:
        read("s3://photos/large", len(data) + 1)
    assert found.value.cause == "cut_shard"


def test_a_request_that_fails_is_made_again_from_its_byte(bucket):
    data = bucket.files["photos/a/0.tar"]
    bucket.faults += [ConnectionError(SECRET), TimeoutError()]
    assert read("s3://photos/a/0.tar", 1000) == data[1000:]
    assert [start for _, _, start, _ in bucket.asked] == [None, None, None, 1000]


@pytest.mark.parametrize(
    ("fault", "cause", "words"),
    [
        (FileNotFoundError(SECRET), "missing_shard", "no file of this name"),
        (PermissionError(SECRET), "unreachable_shard", "aws configure"),
        (RuntimeError(SECRET), "unreachable_shard", "the store cannot be read (RuntimeError)"),
        (OSError(5, "Input/output error"), "unreachable_shard", "Input/output error"),
    ],
)
def test_failures_are_told_without_secrets(bucket, fault, cause, words):
    bucket.faults += [fault] * 9
    with pytest.raises(ShardError) as found:
        read("s3://photos/a/0.tar")
    assert found.value.cause == cause and words in str(found.value) and SECRET not in str(found.value)


def test_a_store_that_never_answers_is_given_up(bucket):
    bucket.is_open.clear()
    with pytest.raises(ShardError, match="no answer in time"):
        read("s3://photos/a/0.tar", timeout=0.1, retries=1)
    with pytest.raises(ShardError, match="s3://photos is left alone"):
        read("s3://photos/a/1.tar")


def test_whoever_has_no_login_reads_what_is_public(bucket):
    bucket.faults.append(NoCredentialsError(SECRET))
    assert read("s3://photos/a/0.tar") == bucket.files["photos/a/0.tar"]
    assert [anon for anon, *_ in bucket.asked] == [False, True, True]


def test_a_package_that_is_missing_is_named(monkeypatch):
    for scheme, package in (("s3", "s3fs"), ("gs", "gcsfs")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(DataError, match=rf"1\. pip install {package}$"):
            expand_shards(f"{scheme}://photos/{{0..9}}.tar")
        with pytest.raises(ShardError, match=f"pip install {package}"):
            read(f"{scheme}://photos/0.tar")


# what somebody else named


@pytest.mark.parametrize(
    ("shard", "url"),
    [
        ("s3://photos/a/0.tar", "https://photos.s3.amazonaws.com/a/0.tar"),
        ("S3://photos/a b/0+1.tar", "https://photos.s3.amazonaws.com/a%20b/0%2B1.tar"),
        ("s3://my.photos/0.tar", "https://s3.amazonaws.com/my.photos/0.tar"),
        ("s3://169.254.169.254/latest", "https://s3.amazonaws.com/169.254.169.254/latest"),
        ("gs://photos/a/0.tar", "https://storage.googleapis.com/photos/a/0.tar"),
        ("gcs://photos/0.tar", "https://storage.googleapis.com/photos/0.tar"),
    ],
)
def test_a_stores_file_has_a_public_address(shard, url):
    assert public_url(shard) == url
    assert expand_shards(shard, PUBLIC_ONLY) == [url]
    assert catalogue_of("shards", [shard]) == catalogue_of("shards", [url]) or "%" in url


@pytest.mark.parametrize(
    "shard",
    ["s3://a/0.tar", "s3://me:secret@photos/0.tar", "s3://photos", "s3://photos/../0.tar", "s3://photos//0.tar",
     "s3://photos/0.tar?versionId=1", "s3://photos.evil.example:8000/0.tar", "gs://Photos/0.tar",
     "s3://photos/0.tar#x", "s3:///0.tar", "hf://datasets/org/0.tar", "hf://datasets/org/name@/0.tar",
     "hf://datasets/org/name/../../x/0.tar", "hf://datasets/org/name@../0.tar", "hf://me:secret@org/name/0.tar"],
)  # fmt: skip
def test_what_is_no_file_in_a_store_is_refused(shard):
    with pytest.raises(DataError, match="no file in a store|no address of a file on the Hub|would have to be listed"):
        expand_shards(shard, PUBLIC_ONLY)


@pytest.mark.parametrize("addresses", [PUBLIC_ONLY, AddressPolicy("any", is_foreign=True)])
def test_no_login_leaves_this_machine_for_a_linked_run(addresses, bucket, monkeypatch):
    """Not with `allow_private_data` either; and no list is asked for. The store's name leads to a refused address
    here, so that nothing is sent at all."""
    seen: list[str] = []

    def look_up(host: str, *_: Any, **__: Any) -> Any:
        seen.append(host)
        raise OSError("no network")

    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr("socket.getaddrinfo", look_up)
    with pytest.raises(ShardError):
        read("s3://photos/a/0.tar", addresses=addresses, retries=0)
    with pytest.raises(DataError, match="would have to be listed"):
        expand_shards("s3://photos/a/*.tar", addresses)
    assert not bucket.asked and "photos.s3.amazonaws.com" in seen
    assert expand_shards("s3://photos/a/*.tar", ANY_ADDRESS)


@pytest.mark.parametrize(
    ("url", "is_signed"),
    [
        ("https://huggingface.co/datasets/org/name/resolve/main/0.tar", True),
        ("https://huggingface.co/api/whoami-v2", False),
        ("http://huggingface.co/datasets/org/name/resolve/main/0.tar", False),
        ("https://huggingface.co.evil.example/datasets/org/name/resolve/main/0.tar", False),
        ("https://huggingface.co@evil.example/resolve/0.tar", False),
        ("https://huggingface.co:8443/datasets/org/name/resolve/main/0.tar", False),
        ("https://evil.example/huggingface.co/resolve/0.tar", False),
        ("https://cdn-lfs.huggingface.co/resolve/0.tar", False),
        ("https://huggingface.co\\@evil.example/resolve/0.tar", False),
    ],
)
def test_the_token_is_for_files_at_the_hub_itself(url, is_signed, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://huggingface.co")
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert (hub_login(url) is not None) == is_signed
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert is_at_hub("HTTPS://HuggingFace.co/x")
