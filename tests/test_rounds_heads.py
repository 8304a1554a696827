"""The heads of answers, compressed with the group as a dictionary."""

from __future__ import annotations

import os
import zlib

import pytest

from volunteer_kit.swarm.rounds.heads import AnswerHead, decode_head, deflate_once, encode_head, inflate_once
from volunteer_kit.swarm.sync.contributions import Answer, Share
from volunteer_kit.swarm.wire import MOST, WireError, encode


def head_of(group: tuple[str, ...]) -> AnswerHead:
    shares = tuple(Share(peer, 12 + place % 3, 11, 8 + place % 5, 0xFF) for place, peer in enumerate(sorted(group)))
    return AnswerHead(Answer(0xFF, group[0], os.urandom(32), shares), os.urandom(64))


def group_of(size: int) -> tuple[str, ...]:
    return tuple(f"Qm{os.urandom(22).hex()}" for _ in range(size))


@pytest.mark.parametrize("size", [1, 8, 1000])
def test_a_head_comes_back(size: int) -> None:
    group = group_of(size)
    for head in (AnswerHead(None), head_of(group), head_of(group)._replace(credential=os.urandom(600))):
        assert decode_head(encode_head(head, group), group) == head


def test_the_names_of_the_group_cost_little() -> None:
    group = group_of(8)
    head = head_of(group)
    sent = encode_head(head, group)
    assert len(encode(head)) > 8 * 46 and len(sent) < 32 + 64 + 8 * 16


def test_a_head_for_another_group_is_none() -> None:
    group, other = group_of(8), group_of(8)
    head = head_of(group)
    try:
        assert decode_head(encode_head(head, group), other) != head
    except WireError:
        pass


def test_a_bomb_is_refused() -> None:
    group = group_of(3)
    bomb = deflate_once(bytes(64 * MOST), b"")
    assert len(bomb) < MOST // 8
    with pytest.raises(WireError, match="more than"):
        decode_head(bomb, group)
    with pytest.raises(ValueError, match="more than 99 bytes"):
        inflate_once(deflate_once(bytes(100), b"xyz"), b"xyz", 99)
    assert inflate_once(deflate_once(bytes(100), b"xyz"), b"xyz", 100) == bytes(100)


def test_strangers_bytes_are_refused() -> None:
    group = group_of(3)
    sent = encode_head(head_of(group), group)
    for data in (b"", sent[:-1], sent + b"x", b"\xff" * 100, zlib.compress(b"a head"), deflate_once(b"a head", b"")):
        with pytest.raises(WireError):
            decode_head(data, group)
