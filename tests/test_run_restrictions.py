"""What a run file from a link or from the Hub may name on a volunteer's machine, and what it may cost."""

from __future__ import annotations

import contextlib
import http.server
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from pydantic import BaseModel

from tests.shard_files import FaultyServer, good_shard
from volunteer_kit.data.errors import DataError
from volunteer_kit.data.settings import DataConfig
from volunteer_kit.data.sources import room_on_disk
from volunteer_kit.home import Home
from volunteer_kit.run_data import data_words
from volunteer_kit.run_origin import Origin
from volunteer_kit.run_reader import RUN_FILES, find_run, origin_of
from volunteer_kit.run_restrictions import RULES, require_room
from volunteer_kit.runs import FineTuneConfig, RunConfig, RunError, build_stream, load_run, require_ready, with_data
from volunteer_kit.session import Session
from volunteer_kit.training.protocol import WorkerSpec
from volunteer_kit.volunteer import _spec

EMOJI: dict[str, Any] = yaml.safe_load((RUN_FILES / "emoji.yaml").read_text())
FINE_TUNE: dict[str, Any] = {
    "run_id": "tuned", "target_batch_size": 64, "optimizer": {"warmup_epochs": 1, "total_epochs": 10},
    "model": {"config": {"model_type": "llama", "vocab_size": 64}, "lora": {}},
}  # fmt: skip


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[FaultyServer]:
    """Of run files and shards, on this machine; the kit's folders are the test's."""
    monkeypatch.setenv("VOLUNTEER_KIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "served").mkdir()
    with FaultyServer(tmp_path / "served") as one:
        threading.Thread(target=one.serve_forever, args=(0.05,), daemon=True).start()
        yield one
        one.stop.set()
        one.shutdown()


@pytest.fixture
def private(tmp_path) -> Path:
    """The volunteer's own pictures."""
    (tmp_path / "private").mkdir()
    good_shard(tmp_path / "private" / "photos.tar", 40)
    return tmp_path / "private"


def changed(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`data__shards=...` changes the section data."""
    values = yaml.safe_load(yaml.safe_dump(values))
    for path, value in changes.items():
        *sections, key = path.split("__")
        section = values
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    return values


def linked(
    server: FaultyServer, base: dict[str, Any] = EMOJI, allow_private: bool = False, **changes: Any
) -> RunConfig:
    (server.folder / "run.yaml").write_text(yaml.safe_dump(changed(base, **changes)))
    return load_run(f"{server.url}/ok/run.yaml", allow_private_data=allow_private)


def refused(server: FaultyServer, *words: str, base: dict[str, Any] = EMOJI, **changes: Any) -> str:
    with pytest.raises(RunError) as caught:
        linked(server, base, **changes)
    assert all(word in str(caught.value) for word in ("Fix: ", *words)), str(caught.value)
    return str(caught.value)


def test_every_setting_of_a_run_has_a_rule():
    """A new setting fails here: say in run_restrictions.py what a stranger may do with it."""

    def names(section: type[BaseModel], above: str = "") -> Iterator[str]:
        for name, field in section.model_fields.items():
            options = [field.annotation, *getattr(field.annotation, "__args__", ())]
            inner = [kind for kind in options if isinstance(kind, type) and issubclass(kind, BaseModel)]
            if inner:
                yield from names(inner[0], f"{above}{name}.")
            elif field.annotation is not type(None):
                yield f"{above}{name}"

    settings = set(names(RunConfig)) | set(names(FineTuneConfig))
    assert settings == set(RULES)
    unbounded = {name for name in DataConfig.LOCAL if RULES[f"data.{name}"] == RULES["description"]}
    assert not unbounded, "what one machine chooses for itself costs it something"


@pytest.mark.parametrize(
    "shards",
    ["{private}/*.tar", "{private}/photos.tar", ["https://data.example.org/0.tar", "{private}/photos.tar"], "/**/*.tar",
     "~/photos.tar", "photos.tar", "file://{private}/photos.tar", "pipe:cat {private}/photos.tar", "az://a/b.tar",
     "memory://a/b.tar", "ftp://a.example/x.tar", "\\\\server\\share", "{fifo}", "/dev/zero", "/proc/self/mem"],
    ids=str,
)  # fmt: skip
def test_a_linked_run_names_no_files_of_the_volunteer(server, private, tmp_path, shards):
    os.mkfifo(tmp_path / "fifo")

    def filled(text: str) -> str:
        return text.replace("{private}", str(private)).replace("{fifo}", str(tmp_path / "fifo"))

    named = filled(shards) if isinstance(shards, str) else [filled(text) for text in shards]
    message = refused(server, "data.shards", "no files of this machine", "--data", data__shards=named)
    assert "line " in message


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ("http://169.254.169.254/latest/meta-data/iam/x.tar", "own network"),
        ("http://192.168.1.1/{0..3}.tar", "own network"),
        ("http://{data.example.org,2130706433}/0.tar", "own network"),
        ("https://data.example.org/{0..3}.tar", None),
        ("http://0x7f.1/x.tar", "own network"),
        ("http://0177.0.0.1/x.tar", "own network"),
        ("http://[::ffff:169.254.169.254]/x.tar", "own network"),
        ("http://0.0.0.0:9/x.tar", "own network"),
        ("http://100.64.0.1/x.tar", "own network"),
        ("http://[64:ff9b::7f00:1]/x.tar", "own network"),
        ("http://user:pass@data.example.org/x.tar", "holds a login"),
        ("http://data.example.org:22/x.tar", "port 22"),
        ("http://data.example.org:6379/x.tar", None),
        ("HTTP://169.254.169.254/x.tar", "own network"),
        ("hf://datasets/org/name@refs/convert/parquet/data/{0..3}.tar", None),
        ("s3://photos/{0..3}.tar", None),
        ("gs://photos/{0..3}.tar", None),
        ("s3://photos/*.tar", "would have to be listed"),
        ("hf://datasets/org/name/**/*.tar", "would have to be listed"),
        ("hf://datasets/org/name/../../other/x.tar", "no address of a file on the Hub"),
        ("s3://user:pass@photos/x.tar", "no file in a store"),
    ],
)
def test_addresses_in_a_linked_run_are_public_ones(server, shards, words):
    if words is None:
        assert linked(server, data__shards=shards).data.shards == shards
    else:
        message = refused(server, words, data__shards=shards)
        assert "pass@" not in message


def test_what_resolves_to_an_inner_service_is_never_asked(server, private, monkeypatch, tmp_path):
    """As an attacker's name that leads to 169.254.169.254, or to the router: the service is another port here."""
    inner_folder = tmp_path / "inner"
    inner_folder.mkdir()
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo",
        lambda host, *args, **kwargs: look_up("127.0.0.1" if host == "data.example.org" and not kwargs.get("flags")
                                              else host, *args, **kwargs),
    )  # fmt: skip
    with FaultyServer(inner_folder) as inner:
        threading.Thread(target=inner.serve_forever, args=(0.05,), daemon=True).start()
        config = linked(server, data__shards=f"http://data.example.org:{inner.server_address[1]}/ok/x.tar",
                        data__patience=2)  # fmt: skip
        with pytest.raises(DataError, match="own network"):
            build_stream(config, peer_seed=1).next_batch(2)
        handed_on = load_run(config.dumped_for_worker())
        with pytest.raises(DataError, match="own network"):
            build_stream(handed_on, peer_seed=1).next_batch(2)
        assert inner.asked == []
        inner.stop.set()
        inner.shutdown()


def test_shards_on_the_links_own_server_are_read_there_at_home(server):
    good_shard(server.folder / "0.tar", 8)
    config = linked(server, data__shards=f"{server.url}/ok/0.tar")
    for run in (config, load_run(config.dumped_for_worker())):
        with contextlib.closing(build_stream(run, peer_seed=1)) as stream:
            assert len(stream.next_batch(4).codes) == 4
    assert "the server of the link itself" in data_words(config)


def test_a_word_of_the_volunteer_allows_other_servers_of_the_own_network(server, tmp_path):
    (tmp_path / "nas").mkdir()
    good_shard(tmp_path / "nas" / "0.tar", 8)
    with FaultyServer(tmp_path / "nas") as nas:
        threading.Thread(target=nas.serve_forever, args=(0.05,), daemon=True).start()
        shards = f"{nas.url}/ok/0.tar"
        refused(server, "own network", data__shards=shards)
        config = linked(server, allow_private=True, data__shards=shards)
        with contextlib.closing(build_stream(load_run(config.dumped_for_worker()), peer_seed=1)) as stream:
            assert len(stream.next_batch(4).codes) == 4
        assert "own network are allowed" in data_words(config)
        refused_still = changed(EMOJI, data__shards="/etc/passwd")
        (server.folder / "run.yaml").write_text(yaml.safe_dump(refused_still))
        with pytest.raises(RunError, match="no files of this machine"):
            load_run(f"{server.url}/ok/run.yaml", allow_private_data=True)
        nas.stop.set()
        nas.shutdown()


def test_no_word_of_the_volunteer_makes_a_linked_run_their_own():
    """Other than that the data are their own: a store's login is sent for these alone."""
    assert Origin(kind="link").addresses.is_foreign and Origin(kind="hub", allow_private_data=True).addresses.is_foreign
    for own in (Origin(kind="link", own_data=True), Origin(kind="file"), Origin(kind="python"), Origin(kind="kit")):
        assert not own.addresses.is_foreign


def test_the_volunteers_own_folder_works_with_a_linked_run(server, private):
    config = with_data(linked(server), str(private))
    require_ready(config)
    spec = _spec(config, Home(private / "home"), [], None, None, name="v", client_mode=True, checkpoint_dir=None,
                 identity_path=None)  # fmt: skip
    handed_on = load_run(WorkerSpec.model_validate_json(spec.model_dump_json()).run)
    assert handed_on.origin == Origin(kind="link", own_data=True, endpoint=config.origin.endpoint)
    with contextlib.closing(build_stream(handed_on, peer_seed=1)) as stream:
        assert len(stream.next_batch(4).codes) == 4
    assert data_words(config).startswith(f"You named them: {private}")


def test_a_worker_refuses_what_was_smuggled_past_its_parent(server, private):
    """It checks the file again, by the origin that it was handed."""
    values = linked(server).dumped_for_worker()
    values["data"]["shards"] = str(private / "photos.tar")
    with pytest.raises(RunError, match="no files of this machine"):
        Session(WorkerSpec(run=values), lambda *args, **fields: None, on_broken=lambda why: None)


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (EMOJI, {"data__cache_dir": "/root/.ssh"}, "data.cache_dir"),
        (EMOJI, {"data__cache_dir": "cache"}, "data.cache_dir"),
        (EMOJI, {"image_tokenizer": "/home/me/weights.safetensors"}, "image_tokenizer"),
        (EMOJI, {"image_tokenizer": "../weights/emoji64"}, "image_tokenizer"),
        (EMOJI, {"text_tokenizer": "file:/home/me/tokenizer.json"}, "text_tokenizer"),
        (EMOJI, {"text_tokenizer": "hub:../../etc/passwd"}, "text_tokenizer"),
        (EMOJI, {"text_tokenizer": "hub:a/b@../../x"}, "text_tokenizer"),
        (EMOJI, {"model__depth": 100_000}, "model.depth"),
        (EMOJI, {"model__dim": 10**9}, "model.dim"),
        (EMOJI, {"model__text_seq_len": 10**8}, "model.text_seq_len"),
        (EMOJI, {"model__shared_attn_ids": [0] * 5000}, "model.shared_attn_ids"),
        (EMOJI, {"data__range_length": 2**20}, "data.range_length"),
        (EMOJI, {"initial_peers": ["/ip4/1.1.1.1/tcp/1/p2p/Qm"] * 1000}, "initial_peers"),
        (EMOJI, {"initial_peers": ["/unix/run/docker.sock/p2p/Qm"]}, "initial_peers"),
        (FINE_TUNE, {"model": {"transformers": "/home/me/model"}}, "model.transformers"),
        (FINE_TUNE, {"model": {"transformers": "../model"}}, "model.transformers"),
        (FINE_TUNE, {"model": {"transformers": "~/model"}}, "model.transformers"),
        (FINE_TUNE, {"model": {"transformers": "a/b@../../x"}}, "model.transformers"),
        (FINE_TUNE, {"model__lora__target_modules": "(.*)*(.*)*x"}, "model.lora.target_modules"),
        (FINE_TUNE, {"model__config__auto_map": {"AutoConfig": "x--y.Z"}}, "auto_map"),
        (FINE_TUNE, {"model__config__attn_implementation": "evil/kernel"}, "attn_implementation"),
        (FINE_TUNE, {"model__config__num_hidden_layers": 10**7}, "num_hidden_layers"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) and "run_id" not in value else "",
)  # fmt: skip
def test_no_setting_of_a_linked_run_names_files_or_takes_all_there_is(server, base, changes, words):
    refused(server, words, base=base, **changes)


def test_a_hosts_wishes_for_this_machine_are_lowered_to_their_bounds(server):
    wishes = {"cache_mb": 1_000_000, "disk_cache_mb": 16_000_000, "prefetch": 65_536, "encode_batch": 4096,
              "timeout": 600, "retries": 100, "patience": 86_400, "max_member_mb": 1024}  # fmt: skip
    config = linked(server, **{f"data__{name}": value for name, value in wishes.items()})
    for name in wishes:
        assert getattr(config.data, name) == RULES[f"data.{name}"].most
    own = server.folder / "own.yaml"
    own.write_text(yaml.safe_dump(changed(EMOJI, data__disk_cache_mb=16_000_000)))
    assert load_run(own).data.disk_cache_mb == 16_000_000, "a user's own file is the user's choice"
    assert config.fingerprint == load_run("emoji").fingerprint


def test_a_cache_takes_a_share_of_the_free_disk(tmp_path, monkeypatch):
    disk = shutil.disk_usage(tmp_path)._replace(free=4_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: disk)
    file = tmp_path / "new" / "cache.sqlite"
    assert room_on_disk(file, 10**12) == 1_000_000 and room_on_disk(file, 1000) == 1000
    file.parent.mkdir()
    file.write_bytes(bytes(400_000))
    assert room_on_disk(file, 10**12) == 1_100_000, "what it takes already is not taken off again"


def test_a_model_larger_than_this_machine_is_refused_before_it_is_built(server, monkeypatch):
    config = with_data(linked(server), "x.tar")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("", (), {"total": 10**6}))
    with pytest.raises(RunError, match=r"GB of memory to be trained(.|\n)*1\. "):
        require_room(config)
    require_room(with_data(load_run("emoji"), "x.tar"))


def test_what_the_kit_keeps_of_links_stays_foreign_under_any_path(server, private, tmp_path, monkeypatch):
    linked(server, data__shards="https://data.example.org/0.tar")
    (kept,) = (tmp_path / "home" / "run_files").glob("*.yaml")
    kept.write_text(yaml.safe_dump(changed(EMOJI, data__shards=str(private / "*.tar"))))
    (tmp_path / "elsewhere.yaml").symlink_to(kept)
    monkeypatch.chdir(kept.parent)
    for path in (kept, kept.name, tmp_path / "elsewhere.yaml", f"../run_files/{kept.name}"):
        assert origin_of(Path(path)).kind == "link"
        with pytest.raises(RunError, match="no files of this machine"):
            load_run(path)


def test_a_run_of_the_hub_is_foreign(tmp_path, monkeypatch):
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub/models--org--name/snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "run.yaml").write_text(yaml.safe_dump(changed(EMOJI, data__shards="/home/me/*.tar")))
    assert origin_of(snapshot / "run.yaml").kind == "hub"
    with pytest.raises(RunError, match="no files of this machine"):
        load_run(snapshot / "run.yaml")


def test_a_file_cannot_say_where_it_came_from_and_no_dump_tells_it(server):
    refused(server, "'origin' is no setting", origin={"kind": "kit"})
    config = linked(server)
    assert "origin" not in config.model_dump() and "_origin" not in config.model_dump()
    assert config == load_run("emoji") and config.origin != load_run("emoji").origin
    assert find_run("demo").origin.kind == "kit"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/", "https://192.168.1.1/", "https://router/", "http://localhost:9/"])
def test_an_authority_in_the_own_network_is_no_business_of_a_link_from_elsewhere(url):
    key = "ed25519:zCxnPDqEWnO5E2QIRyTsT3RpR-IUYM1P65zsY1VYt44"
    values = changed(EMOJI, authority={"url": url, "public_key": key}) | {"origin": {"kind": "link"}}
    with pytest.raises(RunError, match="own network"):
        load_run(values)
    load_run(values | {"origin": {"kind": "link", "endpoint": ["127.0.0.1", 80]}})


def test_a_link_by_http_to_another_machine_needs_a_word(tmp_path, monkeypatch):
    monkeypatch.setenv("VOLUNTEER_KIT_HOME", str(tmp_path))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for url in ("http://192.0.2.1/run.yaml", "http://[2001:db8::1]:8000/run.yaml"):
        with pytest.raises(RunError, match=r"another machine(.|\n)*1\. .*https://(.|\n)*--allow-http(.|\n)*3\. "):
            load_run(url)
    with pytest.raises(RunError, match="holds a login"):
        load_run("http://me:secret@127.0.0.1/run.yaml")


def test_a_link_by_http_is_read_from_another_machine_once_it_is_allowed(tmp_path, monkeypatch):
    """A proxy on this machine stands for the way there: it answers for every server."""
    asked = []

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = yaml.safe_dump(EMOJI).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("VOLUNTEER_KIT_HOME", str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True).start()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_address[1]}")
        monkeypatch.setenv("no_proxy", "")
        url = "http://93.184.216.34/run.yaml"
        with pytest.raises(RunError, match="--allow-http"):
            load_run(url)
        assert asked == []
        config = load_run(url, allow_http=True)
        assert config == load_run("emoji") and config.origin == Origin(kind="link", endpoint=None) and asked == [url]
        proxy.shutdown()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"kind": "scenes"}}, "draws the pictures itself"),
        ({"data": {"kind": "hub", "dataset": "org/name"}}, "org/name on the Hugging Face Hub"),
        ({"data__shards": "https://{a,b}.example.org/{0..9}.tar"}, "named: a.example.org, b.example.org. Up to 1 GB"),
        ({"data__shards": ["s3://photos/{0..9}.tar", "hf://datasets/a/b/x.tar"]}, ": s3://photos, huggingface.co. Up"),
        ({"data__shards": [f"https://{n}.example.org/x" for n in range(9)]}, "and 5 more"),
    ],
)
def test_the_first_screen_says_where_data_come_from(server, changes, words, monkeypatch):
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    values = changed(EMOJI, **changes) | {"origin": {"kind": "link"}}
    assert words in data_words(load_run(values, allow_private_data=False))


def test_the_first_screen_names_a_proxy_that_looks_up_names(server, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy.example.org:3128")
    monkeypatch.setenv("no_proxy", "")
    config = linked(server, data__shards="https://data.example.org/0.tar")
    assert "through the proxy proxy.example.org" in data_words(config)
