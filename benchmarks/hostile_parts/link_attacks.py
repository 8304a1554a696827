"""Run files that come by link and reach for the volunteer's machine, and models with code of their own.

Each is tried by the real command line in a process of its own, with the volunteer's own pictures beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.hostile_parts.attack import LINK, Attack

CODE = """
import pathlib
pathlib.Path({mark!r}).write_text("ran")
from transformers import PretrainedConfig
class {name}(PretrainedConfig):
    model_type = "{kind}"
"""


@dataclass(frozen=True)
class Scene:
    """The place in which a trap is set.

    :param private: a folder with a shard of the volunteer's own pictures, watched
    :param inner: address of a server that only this machine reaches
    :param written: a folder where nothing of the run's belongs
    :param mark: a file that foreign code would write
    :param folder: room for the trap's own files
    """

    private: Path
    inner: str
    written: Path
    mark: Path
    folder: Path


@dataclass(frozen=True)
class Trap:
    """
    :param run: what the run file says beside the emoji run, or beside a fine-tune's
    :param by_link: the run file is served; else a path of it is given
    :param typed: what the volunteer presses when asked
    :param script: Python that is run, with the run file's path in sys.argv; empty: `volunteer-kit join`
    """

    run: dict[str, Any] = field(default_factory=dict)
    by_link: bool = True
    typed: str = ""
    script: str = ""


Make = Callable[[Scene], Trap]


def data(**fields: Callable[[Scene], Any] | Any) -> Make:
    """A run whose section `data` says this."""

    def make(scene: Scene) -> Trap:
        said = {name: value(scene) if callable(value) else value for name, value in fields.items()}
        return Trap({"data": said})

    return make


def fifo(scene: Scene) -> str:
    import os

    path = scene.private / "pipe.tar"
    if not path.exists():
        os.mkfifo(path)
    return str(path)


def linked_folder(scene: Scene) -> str:
    path = scene.folder / "linked"
    if not path.exists():
        path.symlink_to(scene.private)
    return f"{path}/*.tar"


def repository(scene: Scene, **about: Any) -> Path:
    """A model's folder, whose configuration names code beside it."""
    folder = scene.folder / "model"
    folder.mkdir(exist_ok=True)
    config = {"model_type": "surely_new", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps({**config, **about}))
    (folder / "own.py").write_text(CODE.format(mark=str(scene.mark), name="Own", kind="surely_new"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"})
    )
    return folder


TINY = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FINE_TUNE = """
import sys
from volunteer_kit.runs import build_model, load_run
config = load_run(sys.argv[1])
build_model(config)
from volunteer_kit.model.transformers_model import build_transformers
build_transformers(config.model, 0)
print("the model was built")
"""


def model(config: Callable[[Scene], dict[str, Any]], typed: str = "y\n" * 20) -> Make:
    """A fine-tune of this model, built as its peers and its monitor build it."""
    return lambda scene: Trap({"model": config(scene)}, by_link=False, typed=typed, script=FINE_TUNE)


def _with_code(scene: Scene) -> dict[str, Any]:
    return {"transformers": str(repository(scene))}


def _with_code_for_known(scene: Scene) -> dict[str, Any]:
    return {"transformers": str(repository(scene, **TINY))}


def _with_code_and_lora(scene: Scene) -> dict[str, Any]:
    return {"transformers": str(repository(scene)), "lora": {"r": 4}}


def _kernel(scene: Scene) -> dict[str, Any]:
    return {"config": {**TINY, "attn_implementation": "kernels-community/surely-bad"}}


def _auto_map(scene: Scene) -> dict[str, Any]:
    return {"config": {**TINY, "auto_map": {"AutoModelForCausalLM": f"{repository(scene)}--own.Model"}}}


def _list(scene: Scene) -> list[str]:
    return ["https://nowhere.invalid/x.tar", f"{scene.private}/photos.tar"]


def _spelt_otherwise(scene: Scene) -> list[str]:
    hosts = ("2130706433", "0x7f.1", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]")
    return [f"{scene.inner.replace('127.0.0.1', host)}/x.tar" for host in hosts]


def _file(name: str, make: Make, is_quick: bool = False) -> Attack:
    return Attack(name, "a run file by link", 7, make, (LINK,), 60.0, is_quick=is_quick)


def _code(name: str, make: Make, is_quick: bool = False) -> Attack:
    return Attack(name, "a model's repository", 8, make, (LINK,), 40.0, is_quick=is_quick)


CAPS = {"disk_cache_mb": 16_000_000, "cache_mb": 1_000_000, "cache_dir": lambda scene: str(scene.written)}
ATTACKS = [
    _file("link-local-folder", data(shards=lambda scene: f"{scene.private}/*.tar"), is_quick=True),
    _file("link-local-list", data(shards=_list)),
    _file("link-file-url", data(shards=lambda scene: f"file://{scene.private}/photos.tar")),
    _file("link-relative-path", data(shards=lambda scene: f"../../../../../../..{scene.private}/photos.tar")),
    _file("link-symlink", data(shards=linked_folder)),
    _file("link-codes-folder", data(kind="codes", shards=lambda scene: f"{scene.private}/*")),
    _file("link-whole-disk", data(shards="/**/*.tar")),
    _file("link-fifo", data(shards=fifo)),
    _file("link-inner-address", data(shards=lambda scene: f"{scene.inner}/meta-data.tar")),
    _file("link-inner-spelt-otherwise", data(shards=_spelt_otherwise)),
    _file("link-cache-dir", data(shards=lambda scene: f"{scene.private}/*.tar", cache_dir=CAPS["cache_dir"])),
    _file("link-huge-caps", data(kind="scenes", level=1, **CAPS)),
    _code("code-auto-map", model(_with_code), is_quick=True),
    _code("code-auto-map-known-kind", model(_with_code_for_known)),
    _code("code-auto-map-lora", model(_with_code_and_lora)),
    _code("code-auto-map-in-run-file", model(_auto_map)),
    _code("code-hub-kernel", model(_kernel)),
]
