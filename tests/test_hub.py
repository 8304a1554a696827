"""Data sets of the Hub, through the real `datasets` and `huggingface_hub` clients and a stand-in for the Hub."""

from __future__ import annotations

import io
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.hub import Hub
from tests.shard_files import answering, good_shard, picture, red_level
from volunteer_kit.data.settings import Columns, Filters

N = 16  # codes a sample
TOKEN = "hf_SecretOfTheVolunteer"
SAFE = Filters()
PATIENT = {"timeout": 60.0, "retries": 3}  # what comes at all comes, however slow this machine is


class Stage(NamedTuple):
    hub: Hub
    ask: Callable[..., Any]


@pytest.fixture(scope="module")
def whole_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Hub() as hub, hub.client(tmp_path_factory.mktemp("home")) as ask:
        yield Stage(hub, ask)


@pytest.fixture
def stage(whole_stage: Stage) -> Stage:
    whole_stage.hub.forget()
    return whole_stage


def codes_of(count: int, length: int = N) -> list[np.ndarray]:
    return list(np.random.default_rng(count).integers(0, 8192, (count, length)))


def table(count: int, **columns: Any) -> pa.Table:
    """`count` safe rows with codes as the run wants them; a column of None is left out."""
    made = {
        "caption": [f"picture number {n}" for n in range(count)],
        "code": [codes.astype("<i2").tobytes() for codes in codes_of(count)],
        "NSFW": ["UNLIKELY"] * count,
        "original_width": [64] * count,
        "original_height": [48] * count,
        "url": [f"https://example.org/{n}" for n in range(count)],
    }
    return pa.table({name: values for name, values in {**made, **columns}.items() if values is not None})


def parquet(rows: pa.Table, group: int = 100, **settings: Any) -> bytes:
    data = io.BytesIO()
    pq.write_table(rows, data, row_group_size=group, **settings)
    return data.getvalue()


class Seen(NamedTuple):
    """What a volunteer gets of a data set."""

    shards: list[str]
    catalogue: str
    ranges: list[list[int]]
    records: dict[tuple[int, int], tuple[str, np.ndarray]]  # by shard and index: caption, codes or pixels
    counts: Counter[str]
    errors: list[str]


def look(
    dataset: str,
    *,
    start: int = 0,
    stop: int | None = None,
    columns: Mapping[str, str] | None = None,
    filters: Filters = SAFE,
    limits: Mapping[str, float] = PATIENT,
    give_up: float = 100.0,
    token: str | None = None,
    **named: Any,
) -> Seen | str:
    """In the client's process: everything of a data set's first `stop` rows a shard, or what a DataError says."""
    import os

    from volunteer_kit.data.errors import DataError
    from volunteer_kit.data.hub import HubSource
    from volunteer_kit.data.source import Limits, ShardError

    os.environ.pop("HF_TOKEN", None)
    os.environ |= {"HF_TOKEN": token} if token else {}
    counts: Counter[str] = Counter()
    settings = {"image_size": 16, "codes": N, "range_length": 150, "patience": 100.0, **named}
    try:
        source = HubSource(
            dataset,
            columns=Columns(**(columns or {})),
            filters=filters,
            limits=Limits(**limits),
            counts=counts,
            **settings,
        )
    except DataError as error:
        return str(error)
    seen = Seen(list(source.shards), source.catalogue, [], {}, counts, [])
    for number, shard in enumerate(source.shards):
        try:
            seen.ranges.append(list(source.ranges(shard, time.monotonic() + give_up)))
            for raw in source.read(shard, start, stop, time.monotonic() + give_up):
                _use(source, raw, number, seen)
        except ShardError as error:
            counts[error.cause] += 1
            seen.errors.append(str(error))
    return seen


def _use(source: Any, raw: Any, shard: int, seen: Seen) -> None:
    from volunteer_kit.data.source import LeftOut

    try:
        record = source.use(raw)
        seen.records[shard, raw.index] = record.caption, record.image if record.codes is None else record.codes
    except LeftOut as why:
        seen.counts[str(why)] += 1


# What there is


def test_a_split_is_listed_and_read(stage: Stage):
    files = {f"data/train-{n:05d}-of-00002.parquet": parquet(table(60 + n)) for n in range(2)}
    commit = stage.hub.add("datasets", "org/plain", {**files, "data/test-00000-of-00001.parquet": parquet(table(3))})
    seen = stage.ask(look, "org/plain")
    assert seen.shards == list(files) and seen.catalogue == f"hub/org/plain@{commit}/default/train"
    assert seen.ranges == [[0, 60], [0, 61]] and not seen.counts
    for shard in range(2):
        for n, codes in enumerate(codes_of(60 + shard)):
            caption, ours = seen.records.pop((shard, n))
            assert caption == f"picture number {n}" and np.array_equal(ours, codes)
    assert not seen.records
    assert len(stage.ask(look, "org/plain", split="test").records) == 3
    assert stage.ask(look, f"org/plain@{commit}").catalogue == seen.catalogue


def test_subsets_and_splits_of_the_card(stage: Stage):
    card = "configs:\n" + "".join(
        f"- config_name: {name}\n  data_files:\n  - split: {split}\n    path: {name}/*.parquet\n"
        for name, split in (("cats", "train"), ("dogs", "validation"))
    )
    files = {"cats/0.parquet": parquet(table(5)), "dogs/0.parquet": parquet(table(7))}
    stage.hub.add("datasets", "org/card", {"README.md": f"---\n{card}---\n# Pets".encode(), **files})
    seen = stage.ask(look, "org/card", subset="dogs", split="validation")
    assert seen.shards == ["dogs/0.parquet"] and seen.catalogue.endswith("/dogs/validation")
    assert len(seen.records) == 7
    assert "has no split 'train'" in (said := stage.ask(look, "org/card", subset="dogs")) and "validation" in said
    for subset in ("birds", None):
        assert "Set `subset` to one of: cats, dogs" in stage.ask(look, "org/card", subset=subset)


# How it is read


def test_a_range_costs_its_row_groups_only(stage: Stage):
    noise = [np.random.default_rng(n).bytes(5000) for n in range(1000)]
    data = parquet(table(1000, noise=noise), group=100)
    stage.hub.add("datasets", "org/large", {"train.parquet": data})
    seen = stage.ask(look, "org/large", start=400, stop=600)
    assert seen.ranges == [[0, 200, 400, 600, 800, 1000]]
    assert sorted(index for _, index in seen.records) == list(range(400, 600))
    bodies = [asked for asked in stage.hub.asked if asked.path.startswith("/cdn/")]
    assert all(asked.range for asked in bodies) and len(bodies) <= 4
    assert sum(map(_length, bodies)) < 0.05 * len(data)


def test_a_row_group_of_any_size_streams_through_little_memory(stage: Stage):
    count = 12_000
    big = table(count, code=[np.random.default_rng(n).bytes(4096) for n in range(count)])
    data = parquet(big, group=count, use_dictionary=False)
    assert len(data) > 48e6
    stage.hub.add("datasets", "org/one_group", {"train.parquet": data})
    used, peak = stage.ask(_memory_of_reading, "org/one_group")
    assert used == count and peak < 24e6
    bodies = [asked for asked in stage.hub.asked if asked.path.startswith("/cdn/")]
    assert len(bodies) <= 5  # the column of codes is one request, from its beginning to its end


def _memory_of_reading(dataset: str) -> tuple[int, float]:
    """In the client's process: rows, and the bytes that Python and pyarrow held at most to read them."""
    import tracemalloc

    from volunteer_kit.data.hub import HubSource
    from volunteer_kit.data.source import Limits

    source = HubSource(
        dataset, columns=Columns(), image_size=16, codes=2048, filters=SAFE, limits=Limits(), counts=Counter(),
        range_length=100,
    )  # fmt: skip
    pool, rows = pa.default_memory_pool(), 0
    arrow = 0
    tracemalloc.start()
    for raw in source.read(source.shards[0], 0, None, time.monotonic() + 60):
        rows += source.use(raw).codes.shape == (2048,)
        arrow = max(arrow, pool.bytes_allocated())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return rows, peak + arrow


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int16()),
        pa.list_(pa.int64()),
        pa.large_list(pa.uint16()),
        pa.list_(pa.int32(), N),
        pa.large_binary(),
        pa.binary(2 * N),
        pa.dictionary(pa.int32(), pa.binary()),
    ],
    ids=str,
)
def test_codes_of_every_kind(stage: Stage, kind: pa.DataType):
    codes = codes_of(30)
    values = [row.tolist() if hasattr(kind, "value_field") else row.astype("<i2").tobytes() for row in codes]
    values[7] = None
    name = f"org/codes_{abs(hash(str(kind)))}"
    stage.hub.add("datasets", name, {"train.parquet": parquet(table(30, code=pa.array(values, kind)), group=7)})
    seen = stage.ask(look, name)
    assert seen.counts == {"missing_codes": 1} and len(seen.records) == 29
    assert all(np.array_equal(seen.records[0, n][1], codes[n]) for n in range(30) if n != 7)


def test_codes_of_another_length_are_left_out(stage: Stage):
    good = codes_of(1)[0].astype("<i2").tobytes()
    rows = table(4, code=[good, good[:-1], good + good, b""])
    stage.hub.add("datasets", "org/bad_codes", {"train.parquet": parquet(rows)})
    assert stage.ask(look, "org/bad_codes").counts == {"bad_codes": 3}
    lists = table(4, code=pa.array([[1] * N, [1] * (N - 1), [1] * (N - 1) + [None], []], pa.list_(pa.int16())))
    stage.hub.add("datasets", "org/bad_lists", {"train.parquet": parquet(lists)})
    assert stage.ask(look, "org/bad_lists").counts == {"bad_codes": 3}


@pytest.mark.parametrize("as_struct", [True, False])
def test_images(stage: Stage, as_struct: bool):
    levels = [40, 90, 140, 190]
    images: list[Any] = [picture(colour=(level, 0, 0), kind="PNG") for level in levels]
    images += [images[0][:60], None, picture(200, 20)]
    values = [{"bytes": data, "path": "x" * 1000} for data in images] if as_struct else images
    name = f"org/images_{as_struct}"
    stage.hub.add("datasets", name, {"train.parquet": parquet(table(7, code=None, image=values))})
    seen = stage.ask(look, name)
    assert [red_level(seen.records[0, n][1]) for n in range(4)] == levels
    assert seen.records[0, 0][1].shape == (16, 16, 3)
    assert seen.counts == {"bad_image": 1, "missing_image": 1, "aspect": 1}
    small = {**PATIENT, "member_bytes": min(map(len, images[:4])) - 1}
    assert stage.ask(look, name, limits=small).counts == {"image_too_large": 5, "bad_image": 1, "missing_image": 1}


def test_columns_by_other_names(stage: Stage):
    names = {"caption": "TEXT", "code": "tokens", "NSFW": "unsafe"}
    renamed = table(5)
    renamed = renamed.rename_columns([names.get(name, name) for name in renamed.column_names])
    stage.hub.add("datasets", "org/renamed", {"train.parquet": parquet(renamed)})
    columns = {"caption": "TEXT", "code": "tokens", "nsfw": "unsafe"}
    assert len(stage.ask(look, "org/renamed", columns=columns).records) == 5
    said = stage.ask(look, "org/renamed", columns={"caption": "TEXT", "code": "tokens"})
    assert "lacks what this run looks at: NSFW." in said and "columns: {nsfw: NAME}" in said and "unsafe" in said
    assert "lacks what this run looks at: caption, image" in stage.ask(look, "org/renamed", columns={"nsfw": "unsafe"})
    said = stage.ask(look, "org/renamed", columns={**columns, "caption": "original_width"})
    assert "looks at: original_width" in said  # there, but numbers are no captions


def test_filters_and_duplicates(stage: Stage):
    rows = table(
        8,
        caption=["ab", None, "nsfw one", "wide one", "unlike", "good", "good again", "the picture of `good`"],
        NSFW=["UNLIKELY", "UNLIKELY", "NSFW"] + ["UNLIKELY"] * 5,
        original_width=[64, 64, 64, 300, 64, 64, 64, 64],
        similarity=[0.4, 0.4, 0.4, 0.4, 0.1, 0.4, 0.4, 0.4],
    )
    code = rows["code"].to_pylist()
    rows = rows.set_column(rows.column_names.index("code"), "code", [code[:7] + [code[5]]])
    stage.hub.add("datasets", "org/filters", {"train.parquet": parquet(rows, group=3)})
    seen = stage.ask(look, "org/filters", filters=Filters(min_similarity=0.3, drop_duplicates=True))
    assert sorted(index for _, index in seen.records) == [5, 6]
    left_out = ("short_caption", "missing_caption", "nsfw", "aspect", "similarity", "duplicate")
    assert seen.counts == dict.fromkeys(left_out, 1)
    assert len(stage.ask(look, "org/filters").records) == 4


def test_captions_that_are_no_text(stage: Stage):
    raw = pa.array([b"caf\xe9 on a table", b"a good one"], pa.binary())
    text = pa.StringArray.from_buffers(2, *raw.buffers()[1:])
    stage.hub.add("datasets", "org/latin", {"train.parquet": parquet(table(2, caption=text))})
    seen = stage.ask(look, "org/latin")
    assert [seen.records[0, n][0] for n in range(2)] == ["caf\ufffd on a table", "a good one"]


def test_categories(stage: Stage):
    rows = table(9, caption=pa.array(["a cat", "a dog", "a bird"] * 3).dictionary_encode())
    rows = rows.set_column(2, "NSFW", rows["NSFW"].dictionary_encode())
    stage.hub.add("datasets", "org/categories", {"train.parquet": parquet(rows)})
    assert [caption for caption, _ in stage.ask(look, "org/categories").records.values()][:2] == ["a cat", "a dog"]


def test_texts_that_their_writer_calls_bytes(stage: Stage):
    captions = pa.array(["\ufeffa cat", "caf\u00e9", "a dog"]).cast(pa.binary())
    rows = table(3, caption=captions, NSFW=pa.array([b"SAFE"] * 3, pa.binary(4)))
    stage.hub.add("datasets", "org/bytes", {"train.parquet": parquet(rows)})
    seen = stage.ask(look, "org/bytes", filters=Filters(nsfw_allowed=("SAFE",)))
    assert [caption for caption, _ in seen.records.values()] == ["a cat", "caf\u00e9", "a dog"] and not seen.counts


def test_a_column_of_another_type_is_named_with_it(stage: Stage):
    rows = table(2, caption=[["a"], ["b"]], code=[1.5, 2.5])
    stage.hub.add("datasets", "org/types", {"train.parquet": parquet(rows)})
    said = stage.ask(look, "org/types")
    assert "caption (it is list<element: string>, and has to be text)" in said
    assert "code (it is double, and has to be bytes or lists of integers)" in said


def test_two_columns_of_one_name(stage: Stage):
    rows = table(2)
    twice = pa.table([*rows.columns, rows["caption"]], names=[*rows.column_names, "caption"])
    stage.hub.add("datasets", "org/twice", {"a.parquet": parquet(twice), "b.parquet": parquet(rows)})
    seen = stage.ask(look, "org/twice")
    assert len(seen.records) == 2 and seen.errors == ["a parquet file with two columns of one name"]


def test_an_address_that_is_no_longer_valid_is_asked_for_anew(stage: Stage):
    stage.hub.add("datasets", "org/signed", {"train.parquet": parquet(table(300))})
    seen, again = stage.ask(_read_twice, "org/signed", stage.hub.url.replace("127.0.0.1", "localhost"))
    assert "HTTP 400" in seen and again == 300


def _read_twice(dataset: str, elsewhere: str) -> tuple[str, int]:
    """In the client's process: with an address that has become wrong, and after it."""
    from volunteer_kit.data.hub import HubSource
    from volunteer_kit.data.hub_client import Place
    from volunteer_kit.data.source import Limits, ShardError

    source = HubSource(
        dataset, columns=Columns(), image_size=16, codes=N, filters=SAFE, limits=Limits(), counts=Counter(),
        range_length=100,
    )  # fmt: skip
    shard = source.shards[0]
    size = source._places[shard][0].size
    source._places[shard] = Place(f"{elsewhere}/cdn/datasets/{dataset}/-/{shard}?signature=old", size), time.monotonic()
    with pytest.raises(ShardError) as seen:
        list(source.read(shard, 0, 100, time.monotonic() + 100))
    return str(seen.value), len(list(source.read(shard, 0, None, time.monotonic() + 100)))


# What goes wrong


def test_gated(stage: Stage):
    stage.hub.add("datasets", "org/gated", {"train.parquet": parquet(table(5))}, gated=True)
    stage.hub.tokens |= {TOKEN: "vera", "hf_stranger": "sam"}
    stage.hub.admitted.add(TOKEN)
    for token in (None, "hf_stranger"):
        said = stage.ask(look, "org/gated", token=token)
        assert "org/gated is gated" in said and f"{stage.hub.url}/datasets/org/gated" in said
        assert "hf auth login" in said and "hf_" not in said
    stage.hub.asked.clear()
    assert len(stage.ask(look, "org/gated", token=TOKEN).records) == 5
    assert all(not asked.token for asked in stage.hub.asked if asked.path.startswith("/cdn/"))
    assert any(asked.token == TOKEN for asked in stage.hub.asked)


def read_tars(pattern: str, token: str | None = None, is_foreign: bool = False) -> tuple[list[str], list[str]] | str:
    """In the client's process: captions of some shards' records and what was wrong, or what a DataError says."""
    import os

    from volunteer_kit.data.addresses import ANY_ADDRESS, PUBLIC_ONLY
    from volunteer_kit.data.errors import DataError
    from volunteer_kit.data.laion import LaionSource
    from volunteer_kit.data.shards import expand_shards
    from volunteer_kit.data.source import Limits, ShardError

    os.environ.pop("HF_TOKEN", None)
    os.environ |= {"HF_TOKEN": token} if token else {}
    limits = Limits(60.0, 3, addresses=PUBLIC_ONLY if is_foreign else ANY_ADDRESS)
    captions, errors = [], []
    try:
        shards = expand_shards(pattern, limits.addresses)
    except DataError as error:
        return str(error)
    source = LaionSource(shards, image_size=8, filters=SAFE, limits=limits, counts=Counter())
    for shard in shards:
        try:
            captions += [source.use(raw).caption for raw in source.read(shard, 0, None, time.monotonic() + 100)]
        except ShardError as error:
            errors.append(str(error))
    return captions, errors


def tars(tmp_path) -> dict[str, bytes]:
    return {f"data/{n}.tar": good_shard(tmp_path / "x.tar", 2, first=10 * n).read_bytes() for n in range(2)}


CAPTIONS = [f"picture number {n}" for n in (0, 1, 10, 11)]


@pytest.mark.parametrize("kind", ["gated", "private"])
def test_tars_of_a_closed_repository(stage: Stage, kind: str, tmp_path):
    """By https and by hf://; the token goes to the Hub and not to the store that it sends us on to."""
    stage.hub.add("datasets", f"org/{kind}_tars", tars(tmp_path), **{kind: True})
    stage.hub.tokens |= {TOKEN: "vera", "hf_stranger": "sam"}
    stage.hub.admitted.add(TOKEN)
    page = f"{stage.hub.url}/datasets/org/{kind}_tars"
    for pattern in (f"{page}/resolve/main/data/{{0..1}}.tar", f"hf://datasets/org/{kind}_tars/data/{{0..1}}.tar"):
        for token in (None, "hf_stranger"):
            captions, errors = stage.ask(read_tars, pattern, token)
            assert not captions and len(errors) == 2
            words = "is gated" if kind == "gated" else "or it is private"
            assert all(words in said and page in said and "hf auth login" in said for said in errors), errors
            assert all("hf_" not in said for said in errors)
        stage.hub.forget()
        assert stage.ask(read_tars, pattern, TOKEN) == (CAPTIONS, [])
        asked = [(one.path.startswith("/cdn/"), one.token) for one in stage.hub.asked]
        assert asked == [(False, TOKEN), (True, None)] * 2
    assert stage.ask(read_tars, f"hf://datasets/org/{kind}_tars/data/*.tar", TOKEN) == (CAPTIONS, [])


def test_a_token_that_the_hub_does_not_know_keeps_nobody_from_public_files(stage: Stage, tmp_path):
    stage.hub.add("datasets", "org/open_tars", tars(tmp_path))
    stage.hub.fail("/resolve/", times=1, status=401)
    found = stage.ask(read_tars, "hf://datasets/org/open_tars/data/{0..1}.tar", "hf_of_last_year")
    assert found == (CAPTIONS, [])
    assert [one.token for one in stage.hub.asked if "/resolve/" in one.path] == ["hf_of_last_year", None, None]


def test_the_token_does_not_follow_a_redirect_to_the_hub(stage: Stage, tmp_path):
    """A server of strangers would choose, else, which of the volunteer's own files are read."""
    stage.hub.add("datasets", "org/own", tars(tmp_path), private=True)
    stage.hub.admitted.add(TOKEN)
    target = f"{stage.hub.url}/datasets/org/own/resolve/main/data/0.tar"
    head = f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with answering(lambda number, asked: [head.encode()]) as url:
        captions, errors = stage.ask(read_tars, url.replace("/x.tar", "/resolve/main/x.tar"), TOKEN)
    assert not captions and "or it is private" in errors[0]
    assert [one.token for one in stage.hub.asked] == [None]


def test_a_linked_run_reads_the_hub_and_lists_nothing(stage: Stage, tmp_path):
    stage.hub.add("datasets", "org/linked", tars(tmp_path))
    assert stage.ask(read_tars, "hf://datasets/org/linked/data/{0,1}.tar", None, True) == (CAPTIONS, [])
    stage.hub.forget()
    assert "would have to be listed" in stage.ask(read_tars, "hf://datasets/org/linked/data/*.tar", None, True)
    assert "no address of a file on the Hub" in stage.ask(read_tars, "hf://datasets/org/linked/../own/x.tar")
    assert not stage.hub.asked


def test_access_that_ends_while_it_is_read(stage: Stage):
    stage.hub.add("datasets", "org/ends", {"a.parquet": parquet(table(5)), "b.parquet": parquet(table(5))})
    stage.hub.tokens[TOKEN] = "vera"
    stage.hub.fail("/b.parquet", times=99, status=403)
    seen = stage.ask(look, "org/ends", token=TOKEN)
    assert len(seen.records) == 5 and seen.counts == {"unreachable_shard": 1}
    assert "HTTP 403" in seen.errors[0] and "hf auth login" in seen.errors[0] and TOKEN not in seen.errors[0]


def test_what_is_not_there(stage: Stage):
    stage.hub.add("datasets", "org/there", {"train.parquet": parquet(table(5))}, revisions=("main", "v1"))
    stage.hub.add("datasets", "org/private", {"train.parquet": parquet(table(5))}, private=True)
    for name in ("org/missing", "org/private"):
        said = stage.ask(look, name)
        assert f"There is no data set {name} on the Hub, or it is private" in said and "hf auth login" in said
    assert len(stage.ask(look, "org/there@v1").records) == 5
    assert "has no revision 'v2'" in stage.ask(look, "org/there@v2")


def test_what_is_no_table(stage: Stage):
    stage.hub.add("datasets", "org/lines", {"train.jsonl": json.dumps({"caption": "x"}).encode()})
    stage.hub.add("datasets", "org/empty", {"README.md": b"# Nothing yet"})
    stage.hub.add("datasets", "org/program", {"program.py": b"raise SystemExit('executed')", "x.parquet": b""})
    assert "files of the kind json" in (said := stage.ask(look, "org/lines"))
    assert "dataset: org/lines@refs/convert/parquet" in said and "kind: shards" in said
    assert "no data files" in stage.ask(look, "org/empty")
    assert "programs of others are never run here" in stage.ask(look, "org/program")


def test_a_card_that_points_elsewhere(stage: Stage, tmp_path):
    (tmp_path / "secret.parquet").write_bytes(parquet(table(5)))
    stage.hub.add("datasets", "org/target", {"train.parquet": parquet(table(5))})
    for n, place in enumerate((f"{tmp_path}/secret.parquet", "hf://datasets/org/target/train.parquet")):
        card = f"---\nconfigs:\n- config_name: default\n  data_files: {place}\n---\n"
        stage.hub.add("datasets", f"org/elsewhere{n}", {"README.md": card.encode()})
        said = stage.ask(look, f"org/elsewhere{n}")
        assert "org/elsewhere" in said and "parquet" in said and "1. " in said


def test_a_folder_of_the_same_name_is_not_taken_for_it(stage: Stage, tmp_path):
    (tmp_path / "org/mine").mkdir(parents=True)
    assert "1. Start in another folder" in stage.ask(_look_from, tmp_path, "org/mine")


def _look_from(folder: Any, dataset: str) -> Seen | str:
    before = os.getcwd()
    os.chdir(folder)
    try:
        return look(dataset)
    finally:
        os.chdir(before)


def test_a_busy_hub_is_asked_again(stage: Stage):
    stage.hub.add("datasets", "org/busy", {"train.parquet": parquet(table(5))})
    stage.hub.fail("/api/datasets/org/busy", times=1, status=429, retry_after=1)
    stage.hub.fail("/resolve/", times=2, status=503)
    stage.hub.fail("/cdn/", times=1, status=500)
    assert len(stage.ask(look, "org/busy").records) == 5


def test_a_hub_that_stays_busy_is_told_in_time(stage: Stage):
    stage.hub.add("datasets", "org/full", {"train.parquet": parquet(table(5))})
    stage.hub.fail("/api/datasets/org/full", times=10**6, status=429, retry_after=3600)
    began = time.monotonic()
    said = stage.ask(look, "org/full", patience=2.0)
    assert "too many requests from here" in said and "1. Wait 300 s" in said and "hf auth login" in said
    stage.hub.forget()
    stage.hub.fail("/tree/", times=10**6, status=429, retry_after=3600)  # here newer clients of the Hub would wait
    said = stage.ask(look, "org/full", patience=2.0)
    assert "cannot be read from the Hub (no answer in time)" in said or "too many requests from here" in said
    stage.hub.forget()
    stage.hub.fail(".parquet", times=10**6, status=429, retry_after=3600)
    seen = stage.ask(look, "org/full", patience=10.0, give_up=2.0)
    assert seen.counts == {"unreachable_shard": 1} and "HTTP 429" in seen.errors[0]
    assert time.monotonic() - began < 1000, "it waits as long as it was told"


def test_connections_that_break_go_on_where_they_broke(stage: Stage):
    rows = table(3000)
    data = parquet(rows, group=3000)
    stage.hub.add("datasets", "org/cuts", {"train.parquet": data})
    stage.hub.fail("/cdn/", times=2, cut_after=20_000)
    seen = stage.ask(look, "org/cuts")
    assert len(seen.records) == 3000 and not seen.counts
    ranges = [asked.range for asked in stage.hub.asked if asked.path.startswith("/cdn/")]
    starts = [int(asked.removeprefix("bytes=").split("-")[0]) for asked in ranges]
    assert len(set(starts)) == len(starts), "nothing is fetched twice"


def test_a_file_that_is_shorter_than_the_hub_says(stage: Stage, tmp_path):
    (tmp_path / "train.parquet").write_bytes(parquet(table(3000), group=1000))
    stage.hub.add("datasets", "org/short", tmp_path)
    stage.hub.fail("/cdn/", times=10**6, cut_after=0)
    seen = stage.ask(look, "org/short", give_up=3.0, limits={"timeout": 1.0, "retries": 1})
    assert not seen.records and seen.counts == {"unreachable_shard": 1}


def test_without_a_network(tmp_path):
    with Hub() as hub:
        pass  # its port is closed from here on
    with hub.client(tmp_path) as ask:
        said = ask(look, "org/name", patience=1.0, token=TOKEN)
        assert "cannot be read from the Hub" in said and "Check the network" in said and "kind: shards" in said
        assert TOKEN not in said and "Traceback" not in said


def _length(asked: Any) -> int:
    first, last = asked.range.removeprefix("bytes=").split("-")
    return int(last) - int(first) + 1
