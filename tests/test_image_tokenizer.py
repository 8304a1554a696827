"""The image tokenizer: what ships keeps scenes readable, training works, and broken files are told apart."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from volunteer_kit.model.image_tokenizer import (
    WEIGHTS,
    ImageTokenizerError,
    PatchVQ,
    PatchVQConfig,
    load_image_tokenizer,
)
from volunteer_kit.model.vq_training import Codebook, detail_weight, measure, spherical_kmeans
from volunteer_kit.train_tokenizer import RECIPES, evaluate, main, train_tokenizer

LARGEST = {"scenes32": 1_000_000, "emoji64": 4_000_000}  # bytes


def small(**changes) -> PatchVQ:
    torch.manual_seed(0)
    return PatchVQ(PatchVQConfig(**{**dict(image_size=16, fmap=4, num_codes=8, hidden=8, code_dim=4), **changes}))


@pytest.mark.parametrize(("name", "side"), [("scenes32", 32), ("emoji64", 64)])
def test_a_shipped_tokenizer_keeps_held_out_scenes_readable(name, side):
    assert (WEIGHTS / f"{name}.safetensors").stat().st_size < LARGEST[name]
    tokenizer = load_image_tokenizer(name)
    assert tokenizer.config.image_size == side and tokenizer.config.fmap == 8
    report = evaluate(tokenizer, scenes=100)
    assert report.mae < 0.03
    if name == "scenes32":
        assert min(report.scenes_right.values()) >= 0.98, report
    else:
        assert min(report.scenes_right.values()) >= 0.75, report  # 64x64 pixels in 64 codes, made for emoji


def test_equal_patches_have_equal_codes_wherever_they_lie():
    tokenizer = load_image_tokenizer("scenes32")
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    codes = tokenizer.encode(images)
    assert codes.shape == (2, 64) and codes.dtype == torch.int64
    moved = tokenizer.encode(images.roll((4, 8), dims=(2, 3)))
    assert torch.equal(moved.view(2, 8, 8), codes.view(2, 8, 8).roll((1, 2), dims=(1, 2)))


def test_decoded_images_are_images_and_survive_another_round():
    tokenizer = load_image_tokenizer("scenes32")
    codes = torch.randint(tokenizer.config.num_codes, (3, 64), generator=torch.Generator().manual_seed(0))
    images = tokenizer.decode(codes)
    assert images.shape == (3, 3, 32, 32) and 0 <= images.min() and images.max() <= 1
    assert not images.requires_grad


def test_what_it_cannot_code_is_refused():
    tokenizer = small()
    with pytest.raises(ValueError, match=r"\(B, 3, 16, 16\)"):
        tokenizer.encode(torch.rand(1, 3, 32, 32))
    with pytest.raises(ValueError, match="0..7"):
        tokenizer.decode(torch.full((1, 16), 8))
    with pytest.raises(ValueError, match=r"\(B, 16\)"):
        tokenizer.decode(torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="divisor"):
        PatchVQConfig(image_size=32, fmap=5)


def test_gradients_go_through_the_choice_of_codes():
    model = small()
    out = model(torch.rand(2, 3, 16, 16))
    out.images.square().mean().backward()
    first = model.encoder[0].weight.grad
    assert first is not None and first.abs().max() > 0
    assert not model.codebook.requires_grad and out.codes.shape == (2, 16)


def test_a_file_comes_back_as_it_was(tmp_path):
    model = small()
    path = tmp_path / "mine.safetensors"
    model.save(path)
    again = load_image_tokenizer(path)
    assert again.config == model.config and not again.training
    images = torch.rand(4, 3, 16, 16)
    assert (again.encode(images) == model.encode(images)).float().mean() > 0.95  # fp16 may turn a close choice
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o044 == 0o044  # an installed package must be readable by all
    state = torch.get_rng_state()
    load_image_tokenizer(path)
    assert torch.equal(state, torch.get_rng_state())


def test_files_that_are_no_tokenizer_are_told(tmp_path):
    path = tmp_path / "broken.safetensors"
    model = small()
    model.save(path)
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}  # not mapped to the file
    header = {"patch_vq": model.config.model_dump_json()}
    wrong_size = {"patch_vq": json.dumps({**model.config.model_dump(), "num_codes": 9})}
    endless = {"patch_vq": json.dumps({**model.config.model_dump(), "encoder_blocks": 10**9})}  # to build takes days
    infinite = {**tensors, "codebook": tensors["codebook"] * float("inf")}
    cases = {
        "cut": lambda: path.write_bytes(path.read_bytes()[:-10]),
        "text": lambda: path.write_text("no tensors"),
        "no config": lambda: save_file(tensors, path),
        "not json": lambda: save_file(tensors, path, metadata={"patch_vq": "{"}),
        "other shapes": lambda: save_file(tensors, path, metadata=wrong_size),
        "blocks without end": lambda: save_file(tensors, path, metadata=endless),
        "a tensor missing": lambda: save_file({"codebook": tensors["codebook"]}, path, metadata=header),
        "not finite": lambda: save_file(infinite, path, metadata=header),
    }
    for write in cases.values():
        write()
        with pytest.raises(ImageTokenizerError, match=r"broken.safetensors is no intact image tokenizer"):
            load_image_tokenizer(path)
    with pytest.raises(ImageTokenizerError, match="scenes32"):
        load_image_tokenizer("no-such-name")


def test_kmeans_gives_rare_kinds_a_centre_of_their_own():
    generator = torch.Generator().manual_seed(0)
    kinds = F.normalize(torch.randn(6, 8, generator=generator), dim=-1)
    vectors = kinds[torch.cat((torch.zeros(2000, dtype=torch.int64), torch.arange(6)))]
    centres = spherical_kmeans(vectors, 6)
    assert (kinds @ centres.T).amax(dim=1).min() > 0.99


def test_unused_codes_restart_and_used_ones_follow_their_vectors():
    torch.manual_seed(0)
    model = small(num_codes=4)
    vectors = F.normalize(torch.randn(200, 4), dim=-1)
    codebook = Codebook(model, vectors)
    target = F.normalize(torch.tensor([1.0, 0.1, 0.0, 0.0]), dim=0)
    for _ in range(200):
        cloud = F.normalize(target + 0.02 * torch.randn(50, 4), dim=-1)
        codebook.update(cloud, model.nearest(cloud), restart_below=0.1)
    assert (model.codebook @ target).min() > 0.97  # every code moved to where vectors are
    torch.testing.assert_close(model.codebook.norm(dim=-1), torch.ones(4))


def test_edges_weigh_more_than_plain_patches():
    images = torch.zeros(1, 3, 16, 16)
    images[..., 2:4, 2:4] = 1
    weight = detail_weight(images, 4)
    assert weight.shape == (1, 1, 16, 16) and weight[0, 0, 0, 0] > 4 * weight[0, 0, 15, 15]


def test_training_lowers_the_error_and_is_repeatable(tmp_path):
    lines: list[str] = []
    sizes = dict(hidden=16, num_codes=24, decoder_blocks=1)
    short, first, second = (
        train_tokenizer(tmp_path / f"{n}.safetensors", steps=steps, batch_size=16, say=lines.append, **sizes)
        for n, steps in enumerate((2, 80, 80))
    )
    assert first.mae < 0.6 * short.mae and first.psnr > short.psnr + 3
    assert first == second and (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "2.safetensors").read_bytes()
    tokenizer = load_image_tokenizer(tmp_path / "1.safetensors")
    assert measure(tokenizer, torch.rand(2, 3, 32, 32)).codes_used <= 24
    assert any("kB" in line for line in lines)


def test_what_is_not_said_is_as_in_the_shipped_weights(tmp_path):
    path = tmp_path / "mine.safetensors"
    train_tokenizer(path, steps=1, batch_size=8, say=lambda line: None)
    assert load_image_tokenizer(path).config == load_image_tokenizer("scenes32").config == RECIPES["scenes32"].config
    assert load_image_tokenizer("emoji64").config == RECIPES["emoji64"].config


def test_recipes_ask_for_what_they_need():
    with pytest.raises(ValueError, match="scenes32, emoji64"):
        main("paintings")
    with pytest.raises(ValueError, match="shards"):
        main("emoji64")
