"""Run files: written by a host, read by everybody."""

from __future__ import annotations

import json

import yaml

from tests.fuzz.forms import JSON, Text
from tests.fuzz.target import Registry
from tests.fuzz.targets.common import folder
from volunteer_kit.convert.files import ConvertError
from volunteer_kit.convert.vqgan import read_config
from volunteer_kit.run_link import is_like_a_run
from volunteer_kit.run_reader import RUN_FILES, RunError, read_yaml
from volunteer_kit.runs import load_run, run_key_of

registry = Registry()
YAML = Text(
    "{", "}", "[", "]", "&a ", "*a", "<<: ", "!!python/object/apply:os.system ", "!!binary ", "!!set ", "? ", "- ",
    ": ", "\n", "  ", "|", ">", "'", '"', "%", "---\n", "...\n", "null", ".nan", ".inf", "1e400", "0x", "0o7",
    "190:20:30", "2001-01-01", "true", "\t", "\u2028", "\0", "run_id", "model:", "data:", "swarm:", "optimizer:",
    "shards: ", "/etc/passwd", "file:///", "hub:", "1_000", "9" * 400,
)  # fmt: skip


def _run_files() -> list[bytes]:
    return [path.read_bytes() for path in sorted(RUN_FILES.glob("*.yaml")) if path.stem in ("demo", "emoji")]


@registry.add(lambda: [*_run_files(), b"a: 1\nb: [1, {c: 2}]\n"], RunError, form=YAML, max_bytes=8192)
def run_yaml(data: bytes) -> bool:
    """The YAML of a run file."""
    return bool(read_yaml(data.decode("utf-8", "replace"), "run.yaml").values)


@registry.add(_run_files, RunError, form=YAML, max_bytes=8192)
def run_file(data: bytes) -> bool:
    """A run file, up to the checked settings and the run's key."""
    path = folder() / "run.yaml"
    path.write_bytes(data)
    is_like_a_run(path)
    return len(run_key_of(load_run(str(path)))) > 0


def _dumped() -> list[bytes]:
    return [json.dumps(load_run(name).model_dump(mode="json")).encode() for name in ("demo", "emoji")]


@registry.add(_dumped, RunError, form=JSON, max_bytes=16_384)
def run_values(data: bytes) -> bool:
    """A run's values, whatever wrote them: each setting is mutated by itself."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return False
    if not isinstance(values, dict):
        return False
    return load_run(values) is not None


_VQGAN = {
    "model": {
        "params": {
            "embed_dim": 8, "n_embed": 16,
            "ddconfig": {
                "z_channels": 8, "resolution": 16, "in_channels": 3, "out_ch": 3, "ch": 32, "ch_mult": [1, 2],
                "num_res_blocks": 1, "attn_resolutions": [8], "dropout": 0.0, "double_z": False,
            },
        }
    }
}  # fmt: skip


@registry.add(lambda: [yaml.safe_dump(_VQGAN).encode()], RunError, ConvertError, form=YAML)
def vqgan_config(data: bytes) -> bool:
    """A VQGAN's model.yaml."""
    path = folder() / "model.yaml"
    path.write_bytes(data)
    return read_config(path) is not None
