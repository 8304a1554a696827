"""Shards on this machine: what a pattern finds, within which bounds, and what is opened."""

from __future__ import annotations

import glob
import os
import socket
import time

import pytest

from volunteer_kit.data import local_files
from volunteer_kit.data.errors import DataError
from volunteer_kit.data.shards import expand_shards, open_shard
from volunteer_kit.data.source import Limits, ShardError


@pytest.fixture
def tree(tmp_path):
    for name in ("a/0.tar", "a/1.tar", "a/b/2.tar", "a/.hidden/3.tar", "a/.4.tar", "[x]/5.tar", "a/b/c/6.tar", "7.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


@pytest.mark.parametrize(
    "pattern",
    ["*.txt", "a/*.tar", "a/**/*.tar", "**/*.tar", "**", "a/?.tar", "a/[01].tar", "a/*/2.tar", "a/**/c/*.tar",
     "a/.*.tar", "*/*.tar", "nothing/*.tar", "a/**/"],
)  # fmt: skip
def test_patterns_find_what_glob_finds(tree, pattern):
    expected = sorted({p for p in glob.glob(str(tree / pattern), recursive=True) if os.path.isfile(p)})
    assert local_files.list_files(str(tree / pattern)) == expected


def test_relative_patterns_and_folders_with_brackets(tree, monkeypatch):
    monkeypatch.chdir(tree)
    assert local_files.list_files("a/*.tar") == ["a/0.tar", "a/1.tar"]
    assert expand_shards(str(tree / "[x]")) == [str(tree / "[x]/5.tar")]


def test_a_pattern_over_everything_ends_with_a_message(tree, monkeypatch):
    monkeypatch.setattr(local_files, "MAX_ENTRIES", 5)
    with pytest.raises(DataError, match=r"look through too much(.|\n)*1\. Name the folder"):
        expand_shards(str(tree / "**/*.tar"))
    monkeypatch.setattr(local_files, "MAX_ENTRIES", 10**6)
    monkeypatch.setattr(local_files, "MAX_SECONDS", 0.0)
    with pytest.raises(DataError, match="too much"):
        expand_shards(str(tree / "**/*.tar"))


def test_loops_of_links_are_not_followed(tree):
    for name in ("a/loop", "a/b/loop", "a/b/c/loop"):
        (tree / name).symlink_to(tree)
    (tree / "a/broken.tar").symlink_to(tree / "nowhere")
    names = [os.path.basename(path) for path in expand_shards(str(tree / "a/**/*.tar"))]
    assert names == ["0.tar", "1.tar", "2.tar", "6.tar"]


def special(kind: str, path) -> str:
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    elif kind == "a folder":
        path.mkdir()
    else:
        return "/dev/zero"
    return str(path)


@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a device", "a folder"])
def test_what_is_no_regular_file_is_refused_and_never_waited_for(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    path = special(kind, tmp_path / "x.tar")
    started = time.monotonic()
    with pytest.raises(ShardError, match=kind):
        open_shard(path, Limits(), time.monotonic() + 5)
    if kind != "a folder":
        with pytest.raises(DataError, match=rf"is {kind}, and a shard is a regular file(.|\n)*1\. "):
            expand_shards(path)
    with pytest.raises(DataError, match="No shard matches"):
        expand_shards(str(tmp_path / "*.tar"))
    assert time.monotonic() - started < 30
