"""Filters: what passes, what does not and why, by table; the safe setting is the default."""

from __future__ import annotations

import json

import pytest

from tests.shard_files import SAFE, picture, read, record, write_tar
from volunteer_kit.data.causes import CAUSES
from volunteer_kit.data.filters import MAX_CAPTION, accept
from volunteer_kit.data.settings import Columns, DataConfig, Filters
from volunteer_kit.data.source import LeftOut

KNOWN = {**SAFE, "original_width": 300, "original_height": 200, "similarity": 0.31, "LANGUAGE": "en"}
HUGE = 10**400  # a number that json can carry and float cannot


def verdict(caption: object = "a red square", filters: Filters = Filters(), **meta: object) -> str:  # noqa: B008
    try:
        return accept(caption, {**KNOWN, **meta}, filters, Columns())
    except LeftOut as why:
        assert str(why) in CAUSES
        return str(why)


PASSES = "a red square"
TABLE = [
    # captions
    ({}, {"caption": "  a\tred\n square "}, PASSES),
    ({}, {"caption": "abc"}, "abc"),
    ({}, {"caption": "ab"}, "short_caption"),
    ({}, {"caption": " a \n\n b "}, "a b"),
    ({}, {"caption": " \n"}, "missing_caption"),
    ({}, {"caption": None}, "missing_caption"),
    ({}, {"caption": 7}, "missing_caption"),
    ({}, {"caption": b"bytes"}, "missing_caption"),
    ({"min_caption": 0}, {"caption": ""}, "missing_caption"),
    ({"min_caption": 13}, {}, "short_caption"),
    ({}, {"caption": "x" * 10**7}, "x" * MAX_CAPTION),
    # safety: only what somebody has looked at and called safe
    ({}, {"NSFW": "NSFW"}, "nsfw"),
    ({}, {"NSFW": "UNSURE"}, "nsfw"),
    ({}, {"NSFW": "unlikely"}, "nsfw"),
    ({}, {"NSFW": None}, "nsfw"),
    ({}, {"NSFW": ["UNLIKELY"]}, "nsfw"),
    ({}, {"NSFW": {}}, "nsfw"),
    ({"nsfw_allowed": ("UNLIKELY", "UNSURE")}, {"NSFW": "UNSURE"}, PASSES),
    ({"nsfw_allowed": ()}, {}, "nsfw"),
    ({"nsfw_allowed": None}, {"NSFW": "NSFW"}, PASSES),
    # shape
    ({}, {"original_width": 400}, PASSES),
    ({}, {"original_width": 401}, "aspect"),
    ({}, {"original_width": 99}, "aspect"),
    ({}, {"original_width": 100.0}, PASSES),
    ({"max_aspect": 1.0}, {}, "aspect"),
    ({}, {"original_width": None}, PASSES),  # the picture itself tells later
    ({}, {"original_width": 0}, PASSES),
    ({}, {"original_width": "wide"}, PASSES),
    ({}, {"original_width": float("nan")}, PASSES),
    ({}, {"original_width": HUGE}, PASSES),
    # size
    ({"min_size": 200}, {}, PASSES),
    ({"min_size": 201}, {}, "too_small"),
    ({"min_size": 1}, {"original_height": None}, "too_small"),
    ({"min_size": 1}, {"original_height": True}, "too_small"),
    ({"min_size": 1}, {"original_height": -200}, "too_small"),
    ({"min_size": 1}, {"original_height": HUGE}, "too_small"),
    # likeness of caption and picture
    ({"min_similarity": 0.31}, {}, PASSES),
    ({"min_similarity": 0.311}, {}, "similarity"),
    ({"min_similarity": -1}, {"similarity": None}, "similarity"),
    ({"min_similarity": -1}, {"similarity": "0.9"}, "similarity"),
    ({"min_similarity": -1}, {"similarity": float("nan")}, "similarity"),
    ({"min_similarity": -1}, {"similarity": float("inf")}, "similarity"),
    ({"min_similarity": 0.3}, {"similarity": True}, "similarity"),
    ({"min_similarity": 0.3}, {"similarity": HUGE}, "similarity"),
    # language
    ({"languages": ("en", "de")}, {}, PASSES),
    ({"languages": ("de",)}, {}, "language"),
    ({"languages": ("de",)}, {"LANGUAGE": None}, "language"),
    ({"languages": ("de",)}, {"LANGUAGE": ["de"]}, "language"),
    ({"languages": ()}, {}, "language"),
]


@pytest.mark.parametrize("filters, changed, expected", TABLE)
def test_what_passes(filters, changed, expected):
    assert verdict(**changed, filters=Filters(**filters)) == expected


def test_the_first_cause_counts():
    everything = Filters(min_size=500, min_similarity=0.9, languages=("de",))
    meta = {"NSFW": "NSFW", "original_width": 1000}
    assert verdict("", everything, **meta) == "missing_caption"
    assert verdict("ab", everything, **meta) == "short_caption"
    order = [
        ("nsfw", {"NSFW": "UNLIKELY"}),
        ("aspect", {"original_width": 300}),
        ("too_small", {"original_width": 600, "original_height": 600}),
        ("similarity", {"similarity": 1.0}),
        ("language", {"LANGUAGE": "de"}),
        (PASSES, {}),
    ]
    for cause, cure in order:
        assert verdict(PASSES, everything, **meta) == cause
        meta |= cure


def test_the_default_is_the_safe_one():
    assert Filters() == DataConfig(kind="shards").filters == Filters(3, ("UNLIKELY",), 2.0, 0, None, None, False)
    assert DataConfig(kind="codes").filters == DataConfig(kind="hub", dataset="a/b").filters == Filters()
    nothing_known = {"original_width": 64, "original_height": 64}
    with pytest.raises(LeftOut, match="nsfw"):
        accept("a caption", nothing_known, Filters(), Columns())


def test_a_run_file_sets_every_filter():
    settings = {"min_caption": 5, "nsfw_allowed": None, "max_aspect": 3, "min_size": 64, "min_similarity": 0.3,
                "languages": ["en"], "drop_duplicates": True}  # fmt: skip
    assert DataConfig(kind="shards", **settings).filters == Filters(5, None, 3, 64, 0.3, ("en",), True)
    assert set(settings) == set(Filters._fields)
    assert not set(settings) & DataConfig.LOCAL  # who filters otherwise does not train the same model


def test_columns_are_found_under_their_names():
    columns = Columns(nsfw="punsafe", similarity="clip", language="lang", width="w", height="h")
    filters = Filters(3, ("no",), 2.0, 50, 0.2, ("en",))
    meta = {"punsafe": "no", "clip": 0.5, "lang": "en", "w": 60, "h": 60}
    assert accept(PASSES, meta, filters, columns) == PASSES
    for name in meta:
        with pytest.raises(LeftOut):
            accept(PASSES, {key: value for key, value in meta.items() if key != name}, filters, columns)


def test_each_filter_has_its_count(tmp_path):
    filters = Filters(min_size=50, min_similarity=0.3, languages=("en",), drop_duplicates=True)
    good = {"similarity": 0.4, "LANGUAGE": "en"}
    red, blue = picture(), picture(colour=(0, 0, 200))
    records = [
        record("0", "a red square", red, **good),
        record("1", "no", red, **good),
        record("2", "a square", blue, **{**good, "NSFW": "NSFW"}),
        record("3", "a square", blue, **{**good, "original_width": 200}),
        record("4", "a square", blue, **{**good, "original_width": 49, "original_height": 49}),
        record("5", "a square", blue, **{**good, "similarity": 0.2}),
        record("6", "a square", blue, **{**good, "LANGUAGE": "de"}),
        record("7", "the same again", red, **good),
        record("8", "a green square", picture(colour=(0, 200, 0)), **good),
    ]
    kept, counts = read(write_tar(tmp_path / "x.tar", *records), filters=filters)
    assert [found.caption for found in kept] == ["a red square", "a green square"]
    causes = ("short_caption", "nsfw", "aspect", "too_small", "similarity", "language", "duplicate")
    assert counts == dict.fromkeys(causes, 1)


def test_numbers_beyond_all_measure_cost_one_record(tmp_path):
    """json has integers without end, which float and division refuse."""
    meta = {"caption": PASSES, "NSFW": "UNLIKELY", "original_width": HUGE, "original_height": 3, "similarity": -HUGE}
    files = [{**record("k"), "k.json": json.dumps(meta).encode()}, record("z", similarity=0.9)]
    kept, counts = read(write_tar(tmp_path / "x.tar", *files), filters=Filters(min_similarity=0.1))
    assert len(kept) == 1 and counts == {"similarity": 1}
