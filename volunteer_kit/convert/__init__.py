"""Checkpoints of others -> the kit's, and back: `volunteer-kit convert SOURCE TARGET`.

What SOURCE is, is found out: a published VQGAN becomes an image tokenizer, a dalle-pytorch checkpoint becomes one of
the kit, and a folder of the kit's checkpoints becomes a dalle-pytorch file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from volunteer_kit import output, packages
from volunteer_kit.convert.dalle import export_dalle, import_dalle, is_dalle
from volunteer_kit.convert.files import ConvertError, Source, read_checkpoint, sha256_of, tensors_of
from volunteer_kit.convert.vqgan import convert_vqgan, is_vqgan
from volunteer_kit.run_reader import RunError
from volunteer_kit.runs import RunConfig, load_run

__all__ = ["ConvertError", "convert"]


def convert(
    source: str | Path,
    target: str | Path,
    *,
    run: str | Path | RunConfig | None = None,
    config: str | Path | None = None,
    say: Callable[[str], None] = output.say,
) -> Path:
    """Convert `source` and write `target`; returns the path of what was written.

    `target` is a file, a folder for a checkpoint of the kit, or the name of a published tokenizer (vqgan-f8-8192).
    `run` is the run that a dalle-pytorch checkpoint is to be trained on in, or that the kit's was trained in.
    `config` is a VQGAN's model.yaml, for one whose sizes cannot be told from its weights.
    Raises ConvertError, CheckpointError, RunError, MissingDependency.
    """
    packages.require("train")
    source = Path(source)
    chosen = run if run is None or isinstance(run, RunConfig) else load_run(run)
    if source.is_dir():
        _refuse("--config", config, "a checkpoint of the kit")
        return export_dalle(source, str(target), chosen, say)
    sha256 = sha256_of(source)
    say(f"{source}: {source.stat().st_size / 1e6:,.1f} MB, SHA-256 {sha256}")
    read = read_checkpoint(source, sha256)
    content = read.content if isinstance(read.content, Mapping) else {}
    try:
        if is_dalle(content):
            _refuse("--config", config, "a dalle-pytorch checkpoint")
            return import_dalle(read, str(target), chosen, say, called=str(run))
        weights = content.get("state_dict", content)
        if isinstance(weights, Mapping) and is_vqgan(weights):
            _refuse("--run", run, "a VQGAN")
            return convert_vqgan(read, tensors_of(weights), str(target), Path(config) if config else None, say)
    except ConvertError as error:
        if str(source) in str(error):
            raise
        raise ConvertError(f"{source}: {error}") from None
    raise _unknown(read)


def _refuse(option: str, value: object, what: str) -> None:
    if value is not None:
        raise RunError(f"{option} has no use for {what}.\n1. Leave {option} out.")


def _unknown(source: Source) -> ConvertError:
    keys = ", ".join(sorted(map(str, source.content))[:6]) if isinstance(source.content, Mapping) else "no dictionary"
    return ConvertError(
        f"{source.path} is nothing that can be converted: it holds {keys}.\n"
        "1. A VQGAN checkpoint holds state_dict with encoder..., quantize... and decoder...\n"
        "2. A dalle-pytorch checkpoint holds hparams and weights, or the weights of a DALLE; its image tokenizers' own "
        "files (DiscreteVAE, OpenAI's) are not read.\n"
        "3. Checkpoints of the kit are folders: give the folder."
    )
