"""The VQGAN: taming's own layers and names, exact codes without noise, and one file that keeps them exact."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch.nn import functional as F

from volunteer_kit.model import upstream, vqgan
from volunteer_kit.model.image_tokenizer import (
    PUBLISHED,
    ImageTokenizerError,
    image_tokenizer_config,
    load_image_tokenizer,
    published_file,
    save_vqgan,
)
from volunteer_kit.model.vqgan import Vqgan, VqganConfig, config_of_weights
from volunteer_kit.run_tokenizers import build_tokenizers, image_identity
from volunteer_kit.runs import RunError, load_run, require_ready

SMALL = dict(
    resolution=32, ch=32, ch_mult=(1, 2), num_res_blocks=1, attn_resolutions=(16,), z_channels=32, embed_dim=32,
    n_embed=50,
)  # fmt: skip


def build(**changes) -> Vqgan:
    torch.manual_seed(0)
    return Vqgan(VqganConfig(**{**SMALL, **changes}))


def pictures(number: int = 3, side: int = 32) -> torch.Tensor:
    return torch.rand(number, 3, side, side, generator=torch.Generator().manual_seed(1))


def test_codes_are_those_of_tamings_quantizer_without_its_noise(monkeypatch):
    model = build()
    images = pictures()
    codes = model.encode(images)
    assert codes.shape == (3, 256) and codes.dtype == torch.int64 and len(codes.unique()) > 10
    hidden = model.quant_conv(model.encoder(images * 2 - 1))
    noisy = model.quantize(hidden)[2][2].flatten(1)
    assert (noisy == codes).float().mean() < 0.9  # its forward draws noise, even in eval mode
    monkeypatch.setattr(F, "gumbel_softmax", lambda logits, tau, dim, hard: F.softmax(logits / tau, dim))
    assert torch.equal(model.quantize(hidden)[2][2].flatten(1), codes)
    assert torch.equal(model.encode(images), codes)


def test_decoded_images_are_tamings():
    model = build()
    codes = torch.randint(50, (2, 256), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        vectors = model.quantize.get_codebook_entry(codes.flatten(), (2, 16, 16, 32))
        expected = (model.decoder(model.post_quant_conv(vectors)).clamp(-1, 1) + 1) * 0.5
    images = model.decode(codes)
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-6)
    assert images.shape == (2, 3, 32, 32) and 0 <= images.min() < images.max() <= 1


def test_a_large_batch_goes_through_in_parts_and_there_and_back(monkeypatch):
    model = build()
    images = pictures(5)
    one_by_one = torch.cat([model.encode(image[None]) for image in images])
    drawn = torch.cat([model.decode(codes[None]) for codes in one_by_one])
    seen = []
    model.encoder.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    monkeypatch.setattr(vqgan, "PIXELS_AT_ONCE", 2 * 32 * 32 + 1)
    codes = model.encode(images)
    assert seen == [2, 2, 1]
    assert (codes == one_by_one).float().mean() > 0.99  # sums in another order may turn a close choice
    torch.testing.assert_close(model.decode(one_by_one), drawn, rtol=0, atol=1e-5)
    assert model.encode(model.decode(codes)).shape == (5, 256)
    assert model.encode(images[:0]).shape == (0, 256) and model.decode(codes[:0]).shape == (0, 3, 32, 32)


def test_weights_have_the_names_of_tamings_gumbelvq_and_tell_their_config():
    with torch.device("meta"):
        model = Vqgan(VqganConfig())
        layers = upstream.taming_layers()
        shape = dict(
            double_z=False, z_channels=256, resolution=256, in_channels=3, out_ch=3, ch=128, ch_mult=[1, 1, 2, 4],
            num_res_blocks=2, attn_resolutions=[32], dropout=0.0,
        )  # fmt: skip
        names = {f"encoder.{name}" for name in layers.Encoder(**shape).state_dict()}
        names |= {f"decoder.{name}" for name in layers.Decoder(**shape).state_dict()}
    names |= {"quantize.proj.weight", "quantize.proj.bias", "quantize.embed.weight"}
    names |= {f"{conv}.{name}" for conv in ("quant_conv", "post_quant_conv") for name in ("weight", "bias")}
    assert set(model.state_dict()) == names
    config = model.config
    assert (config.image_size, config.fmap, config.patch, config.num_codes) == (256, 32, 8, 8192)
    assert config_of_weights(model.state_dict()) == config
    small = build()
    assert config_of_weights(small.state_dict(), resolution=32) == small.config
    assert not any(parameter.requires_grad for parameter in small.parameters()) and not small.training


def test_building_prints_nothing_and_draws_nothing(capfd, tmp_path):
    save_vqgan(tmp_path / "a.safetensors", build())
    state = torch.get_rng_state()
    load_image_tokenizer(tmp_path / "a.safetensors")
    assert torch.equal(state, torch.get_rng_state())
    captured = capfd.readouterr()
    assert not captured.out and not captured.err  # a worker's events go through stdout


def test_a_file_comes_back_exactly_and_has_one_content(tmp_path):
    model = build()
    for name in ("a", "b"):
        save_vqgan(tmp_path / f"{name}.safetensors", model)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    again = load_image_tokenizer(tmp_path / "a.safetensors")
    assert isinstance(again, Vqgan) and again.config == model.config and not again.training
    assert image_tokenizer_config(tmp_path / "a.safetensors") == model.config
    for name, tensor in load_file(tmp_path / "a.safetensors").items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, model.state_dict()[name])
    assert torch.equal(again.encode(pictures()), model.encode(pictures()))
    cut = (tmp_path / "a.safetensors").read_bytes()[:-100]
    (tmp_path / "a.safetensors").write_bytes(cut)
    with pytest.raises(ImageTokenizerError, match="a.safetensors is no intact image tokenizer"):
        load_image_tokenizer(tmp_path / "a.safetensors")


def test_what_it_cannot_code_is_refused():
    model = build()
    with pytest.raises(ValueError, match=r"\(B, 3, 32, 32\)"):
        model.encode(pictures(side=16))
    with pytest.raises(ValueError, match="0..49"):
        model.decode(torch.full((1, 256), 50))
    with pytest.raises(ValueError, match=r"\(B, 256\)"):
        model.decode(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(resolution=33), "cannot be halved"),
        (dict(ch=40), "multiples of 32"),
        (dict(embed_dim=64), "Gumbel quantization reads z_channels"),
        (dict(double_z=True), "double_z"),
        (dict(out_ch=1), "out_ch"),
        (dict(width=1), "Extra inputs"),
        (dict(num_res_blocks=10**9), "less than or equal to 16"),
        (dict(n_embed=2**40), "less than or equal to 1048576"),
        (dict(attn_resolutions=(8,) * 11), "at most 10 items"),
    ],
)
def test_impossible_configs_are_refused_in_words(changes, says):
    with pytest.raises(ValidationError, match=says):
        VqganConfig(**{**SMALL, **changes})


def test_a_published_name_says_how_to_get_the_weights_and_finds_them(tmp_path, monkeypatch):
    monkeypatch.setenv("VOLUNTEER_KIT_HOME", str(tmp_path))
    config = load_run("dalle-laion")  # valid without the weights: sizes are known
    fingerprint = config.fingerprint
    assert image_tokenizer_config("vqgan-f8-8192") == VqganConfig()
    for call in (lambda: build_tokenizers(config), lambda: require_ready(config, draws=True)):
        with pytest.raises(RunError, match=r"(?s)1\. Download.*heibox.*2\. .*convert last.ckpt vqgan-f8-8192.*3\. "):
            call()
    with pytest.raises(ImageTokenizerError, match="is not on this machine"):
        load_image_tokenizer("vqgan-f8-8192")

    assert published_file("vqgan-f8-8192") == tmp_path / "vqgan-f8-8192.safetensors"
    save_vqgan(published_file("vqgan-f8-8192"), build())
    with pytest.raises(ImageTokenizerError, match="not those of the published one"):
        load_image_tokenizer("vqgan-f8-8192")
    monkeypatch.setitem(PUBLISHED, "vqgan-f8-8192", VqganConfig(**SMALL))
    assert load_image_tokenizer("vqgan-f8-8192").config == VqganConfig(**SMALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vqgan-f8-8192").write_text("not the tokenizer, by chance of the same name")
    assert config.fingerprint == fingerprint  # peers that read ready-made codes need no weights


def test_a_vqgan_at_a_path_counts_by_its_weights(tmp_path):
    save_vqgan(tmp_path / "a.safetensors", build())
    save_vqgan(tmp_path / "b.safetensors", build())
    identity = image_identity(str(tmp_path / "a.safetensors"))
    assert identity == image_identity(str(tmp_path / "b.safetensors")) and len(identity) == 32
    save_vqgan(tmp_path / "b.safetensors", build(n_embed=51))
    assert identity != image_identity(str(tmp_path / "b.safetensors"))
