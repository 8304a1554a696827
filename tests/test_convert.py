"""convert: others' checkpoints become the kit's and back, bit for bit, and nothing in a pickle is ever run."""

from __future__ import annotations

import collections
import hashlib
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from tests.test_model import SHARED, SMALL, VARIANTS, batch, build, reference
from tests.test_vqgan import SMALL as SMALL_VQGAN
from tests.test_vqgan import build as build_vqgan
from tests.test_vqgan import pictures
from volunteer_kit.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from volunteer_kit.cli import app
from volunteer_kit.convert import ConvertError, convert
from volunteer_kit.convert.dalle_layout import config_of, differences, hparams_of
from volunteer_kit.model.dalle import PRESETS, Dalle, DalleConfig
from volunteer_kit.model.image_tokenizer import PUBLISHED, load_image_tokenizer, published_file, save_vqgan
from volunteer_kit.model.vqgan import VqganConfig
from volunteer_kit.optim.recipe import parameter_names
from volunteer_kit.run_reader import RunError
from volunteer_kit.runs import RunConfig, build_optimizer, build_param_groups, load_run
from volunteer_kit.swarm.node.training_state import TrainingState

# as train_dalle.py of dalle-pytorch 1.6.6 writes its own; sharing and tied embeddings as users of the class give them
HPARAMS = dict(
    num_text_tokens=20, text_seq_len=6, dim=32, depth=3, heads=2, dim_head=16, reversible=False, loss_img_weight=7,
    attn_types=("full",), ff_dropout=0.0, attn_dropout=0.0, stable=False, shift_tokens=True, rotary_emb=True,
)  # fmt: skip
TIED = {**HPARAMS, "share_input_output_emb": True}


def run_of(**model) -> RunConfig:
    """A run whose model has 192 codes, 8 a side: those of the tokenizer scenes32."""
    fields = {**SMALL, "image_fmap_size": 8, "num_image_tokens": 192, "num_text_tokens": 512, **model}
    values = load_run("demo").model_dump(mode="json")
    return load_run({**values, "run_id": "mine", "model": {"padding": "dalle-pytorch", **fields}})


def run_file(tmp_path: Path, run: RunConfig) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run.model_dump(mode="json")))
    return str(path)


def theirs_of(model: Dalle) -> torch.nn.Module:
    """dalle-pytorch's own DALLE with other weights than `model`."""
    theirs = reference(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return theirs


def save_theirs(path: Path, theirs: torch.nn.Module, hparams: dict, **changes) -> Path:
    """As train_dalle.py does, optimizer and schedule included."""
    optimizer = torch.optim.Adam([p for p in theirs.parameters() if p.requires_grad], lr=1e-3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    content = {
        "hparams": hparams, "vae_params": None, "epoch": 5, "version": "1.6.6", "vae_class_name": "DiscreteVAE",
        "weights": theirs.state_dict(), "opt_state": optimizer.state_dict(), "scheduler_state": schedule.state_dict(),
    }  # fmt: skip
    torch.save({**content, **changes}, path)
    return path


def said(*arguments, **options) -> tuple[Path, str]:
    lines: list[str] = []
    return convert(*arguments, say=lines.append, **options), "\n".join(lines)


# --- dalle-pytorch -> the kit ---


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "sparse"])
def test_a_model_of_dalle_pytorch_computes_the_same_here(variant, tmp_path):
    model = build(**{**VARIANTS[variant], "padding": "dalle-pytorch"})
    theirs = theirs_of(model)
    path = save_theirs(tmp_path / "dalle.pt", theirs, hparams_of(model.config))
    written, text = said(path, tmp_path / "out")
    assert written == tmp_path / "out" / "epoch-000001" and hashlib.sha256(path.read_bytes()).hexdigest() in text
    found = load_checkpoint(written)
    config = DalleConfig.model_validate(found.meta["model"])
    assert config == model.config  # the shortest way to write it is how it was written here
    section = text[text.index("model:") : text.index("No run was named")]
    assert DalleConfig.model_validate(yaml.safe_load(section)["model"]) == config
    again = Dalle(config)
    again.load_tensors(found.model)
    captions, codes = batch(config)
    with torch.no_grad():
        expected = theirs.eval()(captions.clone(), codes, return_loss=True)
        torch.testing.assert_close(again.eval()(captions, codes).loss, expected, rtol=1e-5, atol=1e-6)
    assert found.meta["converted"]["sha256"] in text and not found.optimizer


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
def test_a_file_of_train_dalle_is_read_in_every_format(tmp_path, legacy, half):
    model = build(share_input_output_emb=False, padding="dalle-pytorch")
    theirs = theirs_of(model)
    theirs = theirs.half() if half else theirs
    path = save_theirs(tmp_path / "dalle.pt", theirs, HPARAMS)
    torch.save(torch.load(path), path, _use_new_zipfile_serialization=not legacy)
    written, text = said(path, tmp_path / "out")
    assert "Left out the image tokenizer in the file" in text
    tensors = load_checkpoint(written).model
    assert tensors.keys() == model.tensors().keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, theirs.state_dict()[name].float())


def test_dropout_is_told_and_old_names_of_positions_are_known(tmp_path):
    model = build(**{**VARIANTS["no rotary, own embeddings"], "padding": "dalle-pytorch"})
    weights = {
        name.replace("image_pos_emb.weights.", "image_pos_emb.weights_"): tensor
        for name, tensor in theirs_of(model).state_dict().items()
    }
    hparams = {**hparams_of(model.config), "ff_dropout": 0.1}
    path = save_theirs(tmp_path / "dalle.pt", torch.nn.Linear(1, 1), hparams, weights=weights)
    written, text = said(path, tmp_path / "out")
    assert "trained with dropout" in text and "image_pos_emb.weights.0" in load_checkpoint(written).model


@pytest.mark.parametrize(
    ("hparams", "says"),
    [
        ({"stable": True}, "stable, which divides"),
        ({"sandwich_norm": True}, "sandwich_norm"),
        ({"sparse_attn": True}, "DeepSpeed"),
        ({"attn_types": ("full", "sparse")}, "attention type 'sparse'"),
        ({"mlp_mult": 2}, "'mlp_mult'"),
        ({"dim": "wide"}, "'dim'"),
        ({"depth": 4}, "is missing"),
        ({"depth": 2}, "is not of this model"),
        ({"heads": 3}, r"is \(96, 32\), not"),
        ({"text_seq_len": 7}, "not"),
        ({"shift_tokens": False}, "differences"),
        ({"rotary_emb": False}, "image_pos_emb"),
    ],
)
def test_what_the_kit_does_not_have_is_told_in_words(tmp_path, hparams, says):
    theirs = theirs_of(build(share_input_output_emb=False))
    path = save_theirs(tmp_path / "dalle.pt", theirs, {**HPARAMS, **hparams})
    with pytest.raises(ConvertError, match=f"(?s)dalle.pt.*{says}.*1\\. "):
        said(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_positions_that_are_computed_otherwise_and_broken_weights_are_refused(tmp_path):
    weights = theirs_of(build(share_input_output_emb=False)).state_dict()
    for name, change, says in (
        ("transformer.pos_emb", lambda tensor: tensor * 1.3, "rotary positions"),
        ("to_logits.0.weight", lambda tensor: tensor * float("nan"), "not finite"),
        ("to_logits.0.weight", lambda tensor: [1.0], "no ordinary tensor"),
    ):
        changed = {**weights, name: change(weights[name])}
        path = save_theirs(tmp_path / "dalle.pt", torch.nn.Linear(1, 1), HPARAMS, weights=changed)
        with pytest.raises(ConvertError, match=says):
            said(path, tmp_path / "out")
    path = save_theirs(tmp_path / "dalle.pt", torch.nn.Linear(1, 1), HPARAMS, weights="look into consolidating")
    with pytest.raises(ConvertError, match="zero_to_fp32"):
        said(path, tmp_path / "out")


def test_weights_alone_need_a_run(tmp_path):
    run = run_of()
    theirs = theirs_of(Dalle(run.model))
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ConvertError, match=r"(?s)weights.pt.*\n1\. .*--run"):
        said(tmp_path / "weights.pt", tmp_path / "out")
    written, _ = said(tmp_path / "weights.pt", tmp_path / "out", run=run)
    assert torch.equal(load_checkpoint(written).model["to_logits.0.weight"], theirs.state_dict()["to_logits.0.weight"])


def test_a_host_trains_on_from_a_converted_checkpoint(tmp_path):
    """What a worker does to resume: the same fingerprint, every statistic of the run's own optimizer."""
    run = run_of(loss_img_weight=3.0)
    theirs = theirs_of(Dalle(run_of().model))
    path = save_theirs(tmp_path / "dalle.pt", theirs, {**TIED, "num_text_tokens": 512})
    done = CliRunner().invoke(app, ["convert", str(path), str(tmp_path / "out"), "--run", run_file(tmp_path, run)])
    assert done.exit_code == 0, done.stderr
    assert f"volunteer-kit join {tmp_path}/run.yaml --new-swarm --checkpoint-dir {tmp_path}/out" in done.stdout
    found = latest_checkpoint(tmp_path / "out", fingerprint=run.fingerprint)
    assert found is not None and found.epoch == 1 and found.meta["run_id"] == "mine"
    model = Dalle(run.model)
    make_optimizer, make_schedule = build_optimizer(run)
    state = TrainingState(build_param_groups(run, model), make_optimizer, make_schedule, parameter_names(model))
    state.take(parameter_names(model), found.tensors, found.meta)
    assert state.epoch == 1
    with torch.no_grad():
        for name, taken in zip(parameter_names(model), state.parameters, strict=True):
            model.get_parameter(name).copy_(taken)
    captions, codes = batch(run.model)
    expected = theirs(captions.clone(), codes, return_loss=True)  # weighted 7 to 1, the run's 3 to 1
    loss = model(captions, codes)
    torch.testing.assert_close((loss.text_loss + 7 * loss.image_loss) / 8, expected, rtol=1e-5, atol=1e-6)


def test_another_model_than_the_runs_is_told_with_the_section_that_fits(tmp_path):
    theirs = theirs_of(Dalle(run_of().model))
    path = save_theirs(tmp_path / "dalle.pt", theirs, {**TIED, "num_text_tokens": 512})
    for changes, says in (
        (dict(padding="masked"), "padding is dalle-pytorch, in the run masked"),
        (dict(reversible=True, dim_head=32), "dim_head is 16, in the run 32; reversible is False, in the run True"),
        (dict(attn_types=["conv_like"]), "attn_types is .*'full'.*, in the run .*'conv_like'"),
    ):
        with pytest.raises(ConvertError, match=f"(?s){says}.*section model:.*image_fmap_size: 8"):
            said(path, tmp_path / "out", run=run_of(**changes))


# --- the kit -> dalle-pytorch, and around ---


def save_ours(folder: Path, model: Dalle, **meta) -> Path:
    return save_checkpoint(folder, model.tensors(), {"epoch": 7, "model": model.config.model_dump(mode="json"), **meta})


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "sparse"])
@pytest.mark.parametrize("padding", ["dalle-pytorch", "masked"])
def test_dalle_pytorch_loads_what_the_kit_wrote_and_it_comes_back_bit_for_bit(variant, padding, tmp_path):
    model = build(**{**VARIANTS[variant], "padding": padding})
    save_ours(tmp_path / "ours", model)
    path, text = said(tmp_path / "ours", tmp_path / "dalle.pt")
    content = torch.load(path, weights_only=True)
    assert content["version"] == "1.6.6" and content["epoch"] == 0 and content["vae_params"] is None
    assert ("padding: masked" in text) == (padding == "masked")

    theirs = reference(build(**VARIANTS[variant]))
    assert {name: getattr(model.config, name) for name in ("dim", "depth", "heads", "text_seq_len")}.items() <= (
        content["hparams"].items()
    )
    own = {name for name in theirs.state_dict() if not name.startswith("vae.")}
    assert content["weights"].keys() == own
    upstream_dalle = type(theirs)(vae=theirs.vae, **content["hparams"])  # takes every hyperparameter that is written
    missing, superfluous = upstream_dalle.load_state_dict(content["weights"], strict=False)
    assert not superfluous and all(name.startswith("vae.") for name in missing)
    for name, tensor in model.state_dict().items():
        assert torch.equal(upstream_dalle.state_dict()[name], tensor)
    if padding == "dalle-pytorch":
        captions, codes = batch(model.config)
        with torch.no_grad():
            expected = upstream_dalle(captions.clone(), codes, return_loss=True)
            torch.testing.assert_close(model(captions, codes).loss, expected, rtol=1e-5, atol=1e-6)

    back, _ = said(path, tmp_path / "back")
    found = load_checkpoint(back)
    assert found.epoch == 7 and DalleConfig.model_validate(found.meta["model"]) == model.config
    assert found.tensors.keys() == model.tensors().keys()
    assert all(torch.equal(tensor, found.tensors[name]) for name, tensor in model.tensors().items())


def test_a_workers_checkpoint_says_itself_what_it_is(tmp_path):
    run = run_of()
    save_checkpoint(tmp_path, Dalle(run.model).tensors(), {"epoch": 3, "run": run.model_dump(mode="json")})
    path, text = said(tmp_path / "epoch-000003", tmp_path / "dalle.pt")
    assert "'scenes32' is none of dalle-pytorch's" in text and "strict=False" in text
    assert torch.load(path, weights_only=True)["vae_class_name"] is None
    path, _ = said(tmp_path, tmp_path / "again.pt", run=run)
    with pytest.raises(ConvertError, match=r"again.pt is there already.*\n1\. "):
        said(tmp_path, path)


def test_what_cannot_be_written_for_dalle_pytorch_is_told(tmp_path):
    save_ours(tmp_path / "wide", build(ff_mult=2))
    with pytest.raises(ConvertError, match="ff_mult"):
        said(tmp_path / "wide", tmp_path / "dalle.pt")
    save_checkpoint(tmp_path / "bare", build().tensors(), {"epoch": 1})
    with pytest.raises(ConvertError, match=r"does not say which model.*\n1\. .*--run"):
        said(tmp_path / "bare", tmp_path / "dalle.pt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConvertError, match="no checkpoint in"):
        said(tmp_path / "empty", tmp_path / "dalle.pt")


def test_the_vqgan_goes_with_the_model_both_ways(tmp_path):
    vqgan = build_vqgan(resolution=256, ch_mult=(1, 1, 2, 2, 2, 2), attn_resolutions=(8,), n_embed=192)
    save_vqgan(tmp_path / "vqgan.safetensors", vqgan)
    run = load_run(run_of().model_dump(mode="json") | {"image_tokenizer": str(tmp_path / "vqgan.safetensors")})
    save_checkpoint(tmp_path, Dalle(run.model).tensors(), {"epoch": 3, "run": run.model_dump(mode="json")})
    path, text = said(tmp_path, tmp_path / "dalle.pt")
    content = torch.load(path, weights_only=True)
    assert content["vae_class_name"] == "VQGanVAE" and "DummyLoss" in text
    vae = {name for name in content["weights"] if name.startswith("vae.")}
    assert vae == {f"vae.model.{name}" for name in vqgan.state_dict()}
    written, text = said(path, tmp_path / "back")
    kept = load_image_tokenizer(tmp_path / "back" / "image-tokenizer.safetensors")
    assert kept.config == vqgan.config and f"image_tokenizer: {tmp_path}/back/image-tokenizer.safetensors" in text
    assert all(torch.equal(tensor, vqgan.state_dict()[name]) for name, tensor in kept.state_dict().items())
    with pytest.raises(ConvertError, match="holds checkpoints already"):
        said(path, tmp_path / "back")


def test_layers_are_written_the_short_way_and_mean_the_same():
    for config in (PRESETS["original"], DalleConfig(**{**SMALL, **SHARED}), DalleConfig(**{**SMALL, "depth": 1})):
        with torch.device("meta"):
            weights = Dalle(config).state_dict()
        again = config_of(hparams_of(config), weights)
        assert again.model_copy(update={"padding": config.padding}) == config
        assert [word.split(" is ")[0] for word in differences(again, config)] == (
            [] if config.padding == "dalle-pytorch" else ["padding"]
        )
    ids = dict(shared_attn_ids=(5, 2, 5), shared_ff_ids=(0, 1, 2))
    named = config_of({**TIED, **ids}, build().state_dict())
    assert named.shared_attn_ids == (0, 1) and named.shared_ff_ids is None


# --- VQGAN checkpoints ---


LIGHTNING = ("pytorch_lightning", "pytorch_lightning.callbacks", "pytorch_lightning.callbacks.model_checkpoint")


def lightning(vqgan: torch.nn.Module, callback: type) -> dict:
    """What pytorch-lightning leaves: the loss's weights, optimizers, and the class of a callback as a key."""
    weights = {**vqgan.state_dict(), "loss.discriminator.main.0.weight": torch.zeros(2, 2)}
    return {
        "epoch": 3, "global_step": 9, "pytorch-lightning_version": "1.0.8",
        "callbacks": {callback: {"monitor": "val/rec_loss", "best": np.float64(0.5), "seen": callback()}},
        "optimizer_states": [torch.optim.Adam([torch.zeros(1)]).state_dict()],
        "state_dict": collections.OrderedDict(weights),
    }  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A small VQGAN for images of 256x256, in Lightning's wrapping; Lightning itself is not installed."""
    vqgan = build_vqgan(resolution=256, ch_mult=(1, 1, 1, 1, 1, 1), attn_resolutions=(8,))
    with monkeypatch.context() as patch:
        for name in LIGHTNING:
            patch.setitem(sys.modules, name, types.ModuleType(name))
        callback = type("ModelCheckpoint", (), {"__module__": LIGHTNING[-1]})
        sys.modules[LIGHTNING[-1]].ModelCheckpoint = callback
        torch.save(lightning(vqgan, callback), tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt", vqgan


def test_a_lightning_checkpoint_becomes_one_exact_file(checkpoint, tmp_path):
    path, vqgan = checkpoint
    with pytest.raises(pickle.UnpicklingError, match="ModelCheckpoint"):
        torch.load(path, weights_only=True)
    written, text = said(path, tmp_path / "mine.safetensors")
    assert hashlib.sha256(path.read_bytes()).hexdigest() in text and "Left out 1 tensors" in text
    tokenizer = load_image_tokenizer(written)
    assert tokenizer.config == vqgan.config
    images = pictures(1, side=256)
    assert torch.equal(tokenizer.encode(images), vqgan.encode(images))
    again, _ = said(path, tmp_path / "again.safetensors")
    assert again.read_bytes() == written.read_bytes()  # its hash is part of a run's fingerprint
    torch.save(vqgan.state_dict(), tmp_path / "bare.pt")
    bare, _ = said(tmp_path / "bare.pt", tmp_path / "bare.safetensors")
    assert bare.read_bytes() == written.read_bytes()


def test_the_published_name_takes_the_published_sizes_only(checkpoint, tmp_path, monkeypatch):
    path, vqgan = checkpoint
    monkeypatch.setenv("VOLUNTEER_KIT_HOME", str(tmp_path / "home"))
    with pytest.raises(ConvertError, match=r"is not the published vqgan-f8-8192: .*8x8 codes of 50 instead of"):
        said(path, "vqgan-f8-8192")
    monkeypatch.setitem(PUBLISHED, "vqgan-f8-8192", vqgan.config)
    done = CliRunner().invoke(app, ["convert", str(path), "vqgan-f8-8192"])
    assert done.exit_code == 0, done.stderr
    assert published_file("vqgan-f8-8192").is_file() and "image_tokenizer: vqgan-f8-8192" in done.stdout
    assert load_image_tokenizer("vqgan-f8-8192").config == vqgan.config


def test_a_vqgan_of_other_sizes_takes_its_model_yaml(tmp_path):
    vqgan = build_vqgan()
    torch.save({"state_dict": vqgan.state_dict()}, tmp_path / "small.ckpt")
    layers = {k: v for k, v in vqgan.config.model_dump(mode="json").items() if k not in ("embed_dim", "n_embed")}
    params = {"embed_dim": 32, "n_embed": 50, "ddconfig": {**layers, "dropout": 0.0}, "lossconfig": {"target": "x"}}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({"model": {"target": "x", "params": params}}))
    written, _ = said(tmp_path / "small.ckpt", tmp_path / "small.safetensors", config=tmp_path / "model.yaml")
    assert load_image_tokenizer(written).config == VqganConfig(**SMALL_VQGAN)
    for change, says in (({"n_embed": 51}, "size mismatch"), ({"embed_dim": 64}, "Gumbel quantization")):
        (tmp_path / "model.yaml").write_text(yaml.safe_dump({"model": {"params": {**params, **change}}}))
        with pytest.raises(ConvertError, match=f"(?s){says}.*1\\. "):
            said(tmp_path / "small.ckpt", tmp_path / "other.safetensors", config=tmp_path / "model.yaml")
    (tmp_path / "model.yaml").write_text("model: {params: 3}")
    with pytest.raises(ConvertError, match="not the model.yaml"):
        said(tmp_path / "small.ckpt", tmp_path / "other.safetensors", config=tmp_path / "model.yaml")


def test_another_vqgan_and_broken_weights_are_told(tmp_path):
    weights = build_vqgan().state_dict()
    cases = {
        "takes the nearest of its codes": {**weights, "quantize.embedding.weight": torch.zeros(50, 32)},
        "quantize.embed.weight is missing": {n: t for n, t in weights.items() if n != "quantize.embed.weight"},
        "quantize.used": {**weights, "quantize.used": torch.zeros(3)},
        "not finite": {**weights, "quant_conv.bias": torch.full((32,), float("inf"))},
        "no ordinary tensor": {**weights, "quant_conv.bias": None},
    }
    for says, changed in cases.items():
        torch.save({"state_dict": changed}, tmp_path / "x.ckpt")
        with pytest.raises(ConvertError, match=f"(?s)x.ckpt.*{says}"):
            said(tmp_path / "x.ckpt", tmp_path / "x.safetensors")
        assert not list(tmp_path.glob("*.safetensors"))


# --- what must not be opened ---


class Hostile:
    def __init__(self, call, *arguments):
        self.call = call, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("where", ["state_dict", "weights", "key"])
def test_a_hostile_pickle_is_refused_and_nothing_of_it_runs(tmp_path, where, legacy):
    trace = tmp_path / "it-ran"
    for call in (Hostile(os.system, f"touch {trace}"), Hostile(exec, f"open({str(trace)!r}, 'w')")):
        content = {"hparams": HPARAMS, "state_dict": build_vqgan().state_dict(), where: call}
        torch.save(content, tmp_path / "bad.ckpt", _use_new_zipfile_serialization=not legacy)
        with pytest.raises(ConvertError, match=r"(?s)bad.ckpt was not opened.*Nothing of it was run.\n1\. .*2\. "):
            said(tmp_path / "bad.ckpt", tmp_path / "out")
        assert not trace.exists() and not (tmp_path / "out").exists()


def test_a_bare_pickle_is_refused_too(tmp_path):
    trace = tmp_path / "it-ran"
    (tmp_path / "bad.pt").write_bytes(pickle.dumps(Hostile(os.system, f"touch {trace}")))
    with pytest.raises(ConvertError, match="bad.pt"):
        said(tmp_path / "bad.pt", tmp_path / "out")
    assert not trace.exists()


def test_files_that_are_nothing_of_the_kind_are_told(checkpoint, tmp_path):
    path, _ = checkpoint
    whole = path.read_bytes()
    cases = {
        "cut.ckpt": (whole[: len(whole) // 2], "no intact file of torch.save"),
        "empty.ckpt": (b"", "no intact"),
        "text.ckpt": (b"<html>not found</html>", "no intact"),
        "cut.safetensors": (b"\x10", "no intact safetensors"),
    }
    for name, (content, says) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConvertError, match=f"(?s){name}.*{says}.*\n1\\. "):
            said(tmp_path / name, tmp_path / "out")
    for content in ({"weights": {"codebook.weight": torch.zeros(1)}, "x": 1}, [1, 2], {}):
        torch.save(content, tmp_path / "other.pt")
        with pytest.raises(ConvertError, match=r"other.pt is nothing that can be converted.*\n1\. "):
            said(tmp_path / "other.pt", tmp_path / "out")
    with pytest.raises(RunError, match="--run has no use"):
        said(path, tmp_path / "out", run="demo")


def test_in_a_process_of_its_own_errors_are_one_message(tmp_path):
    (tmp_path / "x.pt").write_bytes(pickle.dumps(Hostile(os.system, "echo it-ran")))
    for arguments, says in (([str(tmp_path / "x.pt"), "out"], "SHA-256"), (["/nowhere.ckpt", "out"], "no file /nowh")):
        command = [sys.executable, "-m", "volunteer_kit.cli", "convert", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=140, cwd=tmp_path)
        assert done.returncode == 2 and "Traceback" not in done.stderr and "\n1. " in done.stderr
        assert says in done.stdout + done.stderr and "it-ran" not in done.stdout.split("SHA-256")[0]
