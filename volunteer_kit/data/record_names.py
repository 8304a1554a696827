"""Which files of a shard are one record, by their names.

webdataset cuts a name at its first dot (00001.image.jpg and 00001.txt are one record); where names have dots of their
own (shoe.1.jpg, shoe.1.txt), the last one counts. A shard is read by one rule, chosen where the two first differ, from
what stands there: so every reader chooses the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from .source import ShardError
from .tar_reader import Member

PICTURES = ("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp")  # in this order, where a record has several
CAPTIONS = ("txt", "text", "caption")
METADATA = ("json",)
AHEAD = 256  # files of a shard that are looked at to choose its rule
AHEAD_BYTES = 8 * 2**20  # of these files

Role = Literal["image", "text", "json"]
Rule = Literal["first", "last"]

_ROLES: dict[str, tuple[Role, int]] = {
    ending: (role, rank)
    for role, endings in (("image", PICTURES), ("text", CAPTIONS), ("json", METADATA))
    for rank, ending in enumerate(endings)
}
_PLAIN_PARTS = {  # what stands between the dots of 00001.image.jpg where it is the record's picture
    "image": ("image", "img", "picture", "photo", "rgb"),
    "text": ("caption", "text", "txt"),
    "json": ("metadata", "meta", "json"),
}


class Name(NamedTuple):
    """A file's name.

    :ivar first_key: the record's name if the first dot ends it; `last_key`: if the last one does
    :ivar rank: among the files of one role in a record, the lowest is used
    """

    role: Role
    first_key: str
    last_key: str
    rank: tuple[int, int]


def parse_name(path: str) -> Name | None:
    """A file's name, in small or capital letters, with or without .gz at its end; None for what is no picture, caption
    or metadata by its name, and for hidden files."""
    folder, slash, file = path.rpartition("/")
    plain = file[:-3] if file.lower().endswith(".gz") else file
    stem, _, ending = plain.rpartition(".")
    if not stem or file.startswith(".") or ending.lower() not in _ROLES:
        return None
    role, rank = _ROLES[ending.lower()]
    first, _, part = stem.partition(".")
    is_plain = part.lower() in _PLAIN_PARTS[role]
    return Name(role, folder + slash + first, folder + slash + stem, (0 if not part else 1 if is_plain else 2, rank))


def choose_rule(names: Iterable[Name]) -> Rule:
    """The rule by which more of these neighbours are whole records: a picture with its caption. Of two equal ones the
    last dot, unless parts of one record have endings of their own as in 00001.jpg and 00001.seg.png."""
    names = list(names)
    needed = "text" if any(name.role == "text" for name in names) else "json"
    by_first = _records(names, "first")
    whole = [
        sum({"image", needed} <= {name.role for name in record} for record in records)
        for records in (by_first, _records(names, "last"))
    ]
    if whole[0] != whole[1]:
        return "first" if whole[0] > whole[1] else "last"
    has_parts = any(len({name.last_key for name in record}) > 1 for record in by_first)
    return "first" if has_parts else "last"


def key_of(name: Name, rule: Rule | None) -> str:
    """The record that a file belongs to."""
    return name.last_key if rule == "last" else name.first_key


def _records(names: Sequence[Name], rule: Rule) -> list[list[Name]]:
    return [list(record) for _, record in itertools.groupby(names, lambda name: key_of(name, rule))]


class Namer:
    """Reads the names of a shard's members, and chooses the shard's `rule`, None as long as both say the same."""

    def __init__(self, rule: Rule | None) -> None:
        self.rule = rule

    def named(self, members: Iterator[Member]) -> Iterator[tuple[Name | None, Member]]:
        """The members in their order, with None for what belongs to no record. Raises ShardError after the members
        before it."""
        record: dict[Name, None] = {}  # the names of the record that is being read
        for member in members:
            name = _name_of(member)
            if name is not None and self.rule is None:
                if name.first_key != name.last_key:
                    yield from self._choose(record, name, member, members)
                    continue
                if record and next(iter(record)).first_key != name.first_key:
                    record = {}
                record[name] = None
            yield name, member

    def _choose(
        self, record: Iterable[Name], name: Name, member: Member, members: Iterator[Member]
    ) -> Iterator[tuple[Name | None, Member]]:
        """Look ahead, by bounds that are the same for every reader, and choose the rule."""
        seen: list[tuple[Name | None, Member]] = [(name, member)]
        size, failure = member.size, None
        member.hold()
        try:
            while len(seen) < AHEAD and size <= AHEAD_BYTES and (member := next(members, None)) is not None:
                name = _name_of(member)
                seen.append((name, member))
                if name is not None:
                    size += member.size
                    member.hold()
        except ShardError as error:
            failure = error
        self.rule = choose_rule([*record, *(name for name, _ in seen if name is not None)])
        yield from seen
        if failure is not None:
            raise failure


def _name_of(member: Member) -> Name | None:
    return parse_name(member.name) if member.is_file else None
