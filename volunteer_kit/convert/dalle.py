"""dalle-pytorch's checkpoints <-> the kit's: the same weights under the same names, in another wrapping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError
from torch import Tensor

from volunteer_kit.checkpoint import (
    OPTIMIZER,
    Checkpoint,
    CheckpointError,
    is_finite,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from volunteer_kit.convert.dalle_layout import FREE, VERSION, config_of, differences, hparams_of
from volunteer_kit.convert.files import ConvertError, Source, refuse_to_overwrite, tensors_of, write_pickle
from volunteer_kit.convert.vqgan import build_vqgan, write_vqgan
from volunteer_kit.model.dalle import Dalle, DalleConfig
from volunteer_kit.model.image_tokenizer import ImageTokenizerError, image_tokenizer_config, load_image_tokenizer
from volunteer_kit.model.vqgan import Vqgan, VqganConfig
from volunteer_kit.optim.recipe import parameter_names
from volunteer_kit.runs import RunConfig, build_optimizer, build_param_groups

OURS = "volunteer_kit"  # our entry in a dalle-pytorch file, for what it has no word for
VAE, TAMING = "vae.", "vae.model."  # names of the image tokenizer's weights; those of a VQGanVAE
FIRST_EPOCH = 1  # at 0, whoever joins would not ask for the state and begin from random weights
Say = Callable[[str], None]


def is_dalle(content: Mapping[str, Any]) -> bool:
    """Whether this is dalle-pytorch's: a file of train_dalle.py, or its weights alone."""
    return {"hparams", "weights"} <= content.keys() or "to_logits.1.weight" in content


# --- theirs -> ours ---


def import_dalle(source: Source, target: str, run: RunConfig | None, say: Say, called: str = "") -> Path:
    """Write target/epoch-NNNNNN. With `run`, which the user called so, its workers go on from it.

    Raises ConvertError, CheckpointError.
    """
    folder, content = Path(target), source.content
    if any(folder.glob("epoch-*")):
        raise ConvertError(f"{folder} holds checkpoints already, and the newest counts.\n1. Give another folder.")
    weights = _weights(source)
    own = {_today(name): tensor for name, tensor in weights.items() if not name.startswith(VAE)}
    ours = content[OURS] if isinstance(content.get(OURS), dict) else {}
    config = _config(source, own, run, ours)
    model = _fill(config, own)
    epoch = ours.get("epoch") if type(ours.get("epoch")) is int else FIRST_EPOCH
    tensors, meta = model.tensors(), {"epoch": max(FIRST_EPOCH, epoch), "model": config.model_dump(mode="json")}
    meta["converted"] = {"from": f"dalle-pytorch {VERSION}", "file": source.path.name, "sha256": source.sha256}
    if run is not None:
        statistics, meta["numbers"] = zero_statistics(run, model)
        tensors |= statistics
        meta |= {"run_id": run.run_id, "fingerprint": run.fingerprint, "run": run.model_dump(mode="json")}
    path = save_checkpoint(folder, tensors, meta)
    say(f"Wrote {path}: {model.num_parameters() / 1e6:,.1f} M parameters.")
    if any(content.get("hparams", {}).get(key) for key in ("attn_dropout", "ff_dropout")):
        say("It was trained with dropout; the kit trains without.")
    tokenizer = _keep_tokenizer(source, weights, folder, say)
    say(_next_with_run(folder, called, run) if run else _next_without_run(folder, config, tokenizer))
    return path


def zero_statistics(run: RunConfig, model: Dalle) -> tuple[dict[str, Tensor], list[float]]:
    """The run's optimizer before its first step, as a worker's checkpoint holds it: named tensors, and the counters."""
    make_optimizer, _ = build_optimizer(run)
    optimizer = make_optimizer(build_param_groups(run, model))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors, numbers = {}, []
    for name, parameter in zip(parameter_names(model), parameters, strict=True):
        for key, value in sorted(optimizer.state[parameter].items()):
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{name}/{key}"] = value
            else:
                numbers.append(value)
    return tensors, numbers


def _weights(source: Source) -> dict[str, Tensor]:
    weights = source.content.get("weights", source.content)
    if isinstance(weights, str):
        raise ConvertError(
            f"{source.path} is what DeepSpeed leaves beside its own files, without the weights.\n"
            "1. Consolidate them first: python zero_to_fp32.py FOLDER weights.pt\n"
            "2. Then convert that file, with --run of a run file whose section model describes it."
        )
    return tensors_of(weights)


def _config(source: Source, own: dict[str, Tensor], run: RunConfig | None, ours: dict) -> DalleConfig:
    """The model's config, by its hyperparameters, or, where there are none, by the run."""
    if "weights" not in source.content:
        if run is None:
            raise ConvertError(
                f"{source.path} holds weights and no hyperparameters, so its model has to be described.\n"
                "1. Write a run file whose section model describes it, and give it with --run."
            )
        return run.model
    if not isinstance(source.content["hparams"], Mapping):
        raise ConvertError(f"{source.path} is no dalle-pytorch checkpoint: its hparams are no dictionary.")
    config = config_of(source.content["hparams"], own)
    if ours.get("padding") in ("masked", "dalle-pytorch"):
        config = config.model_copy(update={"padding": ours["padding"]})
    if run is None:
        return config
    if apart := differences(config, run.model):
        raise ConvertError(
            f"{source.path} is not the model of the run {run.run_id!r}: {'; '.join(apart)}.\n"
            f"1. Write its own numbers into the run file's section model:\n\n{_section(config)}\n"
            "2. Or leave --run out, to convert it without a run."
        )
    return config.model_copy(update={name: getattr(run.model, name) for name in FREE})


def _today(name: str) -> str:
    """axial_positional_embedding called its two weights otherwise when dalle-pytorch 1.6.6 was new."""
    return name.replace("image_pos_emb.weights_", "image_pos_emb.weights.")


def _fill(config: DalleConfig, weights: dict[str, Tensor]) -> Dalle:
    """A model with these weights, in fp32. Raises ConvertError that names what does not fit."""
    with torch.random.fork_rng(devices=[]):
        model = Dalle(config)
    expected = model.state_dict()
    wrong = [f"{name} is missing" for name in expected if name not in weights]
    wrong += [f"{name} is not of this model" for name in weights if name not in expected]
    wrong += [
        f"{name} is {tuple(weights[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    if wrong:
        raise ConvertError(
            f"The weights are not those of the model described ({len(wrong)} differences): {'; '.join(wrong[:3])}.\n"
            f"1. Check that the file was saved by dalle-pytorch {VERSION}; older versions name layers otherwise.\n"
            "2. For weights without hyperparameters, check section model of the run file."
        )
    if not is_finite(weights):
        raise ConvertError("The weights are not finite: that training had broken down. Take an earlier checkpoint.")
    positions = "transformer.pos_emb"  # computed, not trained; wide bounds, for files in fp16
    if positions in expected and not torch.allclose(weights[positions].float(), expected[positions], 1e-2, 1e-2):
        raise ConvertError(
            "The rotary positions in the file are not those of today's rotary-embedding-torch, so the model would "
            "compute something else.\n1. Use it with the libraries that it was trained with."
        )
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items() if name != positions}, strict=False)
    return model


def _keep_tokenizer(source: Source, weights: dict[str, Tensor], folder: Path, say: Say) -> str | None:
    """Write the VQGAN that the file may hold beside the checkpoint. :returns: what a run file calls it."""
    if f"{TAMING}quantize.proj.weight" in weights:
        theirs = {name.removeprefix(TAMING): tensor for name, tensor in weights.items() if name.startswith(TAMING)}
        path = folder / "image-tokenizer.safetensors"
        write_vqgan(path, build_vqgan(theirs, f"The image tokenizer in {source.path}"))
        say(f"Wrote {path}: the VQGAN that was in the file.")
        return str(path)
    if any(name.startswith(VAE) for name in weights):
        say(
            "Left out the image tokenizer in the file: the kit reads only VQGAN with Gumbel quantization. "
            "Pictures need a run whose image_tokenizer knows the same codes."
        )
    return None


def _section(config: DalleConfig) -> str:
    values = {name: value for name, value in config.model_dump(mode="json").items() if value is not None}
    return yaml.safe_dump({"model": values}, sort_keys=False, default_flow_style=None)


def _next_with_run(folder: Path, called: str, run: RunConfig) -> str:
    return (
        f"It is of the run {run.run_id!r}; the optimizer's statistics begin at zero. Next:\n"
        f'1. Draw with it: volunteer-kit generate "..." --checkpoint {folder} --run {called}\n'
        f"2. Train on from it: volunteer-kit join {called} --new-swarm --checkpoint-dir {folder}"
    )


def _next_without_run(folder: Path, config: DalleConfig, tokenizer: str | None) -> str:
    codes, side = config.num_image_tokens, config.image_fmap_size
    return (
        f"Its model, as a run file says it:\n\n{_section(config)}\n"
        "No run was named, so the checkpoint holds weights only. Next:\n"
        "1. Paste that section into a copy of volunteer_kit/run_files/dalle-laion.yaml, with the tokenizers that it\n"
        f"   was trained with: text of {config.num_text_tokens} words, images as {side}x{side} codes of {codes}"
        + (f"\n   image_tokenizer: {tokenizer}\n" if tokenizer else "\n")
        + f'2. Draw with it: volunteer-kit generate "..." --checkpoint {folder} --run RUN.yaml\n'
        "3. To train on from it, convert again with --run RUN.yaml, which adds the optimizer's statistics, all zero."
    )


# --- ours -> theirs ---


def export_dalle(source: Path, target: str, run: RunConfig | None, say: Say) -> Path:
    """A checkpoint, or the newest good one of a folder -> a file for dalle-pytorch. Raises ConvertError."""
    path = Path(target)
    refuse_to_overwrite(path)
    found = load_checkpoint(source) if (source / "meta.json").is_file() else latest_checkpoint(source)
    if found is None:
        raise ConvertError(f"There is no checkpoint in {source}.\n1. Give a folder with epoch-NNNNNN in it.")
    config, tokenizer_name = _described(found, run)
    hparams = hparams_of(config)
    model = Dalle(config)
    try:
        model.load_tensors(found.model)
    except ValueError as error:
        raise CheckpointError(f"{found.path}: {error}.\n1. Name the run that it was trained in with --run.") from None
    vae_class, vae = _their_tokenizer(config, tokenizer_name, say)
    ours = {"epoch": found.epoch, "padding": config.padding, "run_id": found.meta.get("run_id", "")}
    write_pickle(
        path,
        {
            "hparams": hparams,
            "vae_params": None,
            "epoch": 0,  # of its data, which train_dalle.py counts on from; ours are single steps
            "version": VERSION,
            "vae_class_name": vae_class,
            "weights": {**model.state_dict(), **{f"{TAMING}{name}": tensor for name, tensor in vae.items()}},
            "opt_state": None,
            "scheduler_state": None,
            OURS: ours,
        },
    )
    say(f"Wrote {path}: epoch {found.epoch}, {model.num_parameters() / 1e6:,.1f} M parameters, for dalle-pytorch.")
    if config.padding == "masked":
        say(
            "The run trained with padding: masked. dalle-pytorch gives every padded position a token of its own, which "
            "this model never saw: its pictures there are worse than here, the more so for short captions."
        )
    return path


def _described(found: Checkpoint, run: RunConfig | None) -> tuple[DalleConfig, str]:
    """The model and the image tokenizer's name, by --run or by what the checkpoint says of itself."""
    if run is not None:
        return run.model, run.image_tokenizer
    of_run = found.meta.get("run")
    of_run = of_run if isinstance(of_run, dict) else {}
    try:
        return DalleConfig.model_validate(of_run.get("model") or found.meta.get("model")), str(
            of_run.get("image_tokenizer", "")
        )
    except ValidationError:
        raise ConvertError(
            f"The checkpoint {found.path} does not say which model it holds.\n"
            "1. Name the run that it was trained in with --run."
        ) from None


def _their_tokenizer(config: DalleConfig, name: str, say: Say) -> tuple[str | None, dict[str, Tensor]]:
    """dalle-pytorch's class for the image tokenizer, and its weights as far as they are here."""
    try:
        if not name:
            raise ImageTokenizerError("the checkpoint names none (--run RUN would)")
        if not isinstance(image_tokenizer_config(name), VqganConfig):
            raise ImageTokenizerError(f"the run's image tokenizer {name!r} is none of dalle-pytorch's")
        tokenizer = load_image_tokenizer(name)
    except ImageTokenizerError as error:
        codes, side = config.num_image_tokens, config.image_fmap_size
        say(
            f"Left out the image tokenizer: {str(error).splitlines()[0].rstrip('.')}. Build dalle-pytorch's DALLE with "
            f"a vae of {side}x{side} codes of {codes}, and load the weights with load_state_dict(..., strict=False)."
        )
        return None, {}
    assert isinstance(tokenizer, Vqgan)
    say(
        "The VQGAN's weights are in the file, as dalle-pytorch's VQGanVAE names them. Its model.yaml needs "
        "lossconfig: {target: taming.modules.losses.DummyLoss}, since the loss's own weights are not kept."
    )
    return "VQGanVAE", tokenizer.state_dict()
