"""A model of transformers, with adapters or without: what a fine-tune's run file says of it, and the model itself.

Of a model with adapters only these are trained, sent and kept: who looks after such a run, as its monitor, builds them
beside a base that has shapes only, and needs no memory for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from volunteer_kit import packages
from volunteer_kit.model.repository import Place, check_settings, look_through
from volunteer_kit.model.transformers_config import LoraSettings, TransformersConfig

Quantization = Literal["4bit"]


def build_transformers(
    config: TransformersConfig, seed: int, *, weights: bool = True, quantization: Quantization | None = None
) -> nn.Module:
    """The model, with what is trained as every peer of the run begins with it.

    :param weights: False: with adapters, the base has shapes only, on the device `meta`
    :param quantization: of the base, this machine's own choice: "4bit" is QLoRA's (Dettmers et al. 2023,
        arXiv:2305.14314); needs bitsandbytes and adapters
    Raises ValueError, ModelRefused among them, OSError (it cannot be had from the Hub), MissingDependency.
    """
    packages.require("finetune", *(["4bit"] if quantization else []))
    if quantization and (config.lora is None or config.transformers is None):
        raise ValueError("A quantized model cannot be trained itself: give the run's model `transformers` and `lora`.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        base = _base(config, quantization) if weights or config.lora is None else _shapes(config)
        return base if config.lora is None else _with_adapters(base, config.lora, seed, quantization)


def shapes_of(config: TransformersConfig) -> nn.Module:
    """The same without any weights: for counting."""
    return build_transformers(config, 0, weights=False) if config.lora is not None else _shapes(config)


def save_pretrained(
    config: TransformersConfig,
    trained: Mapping[str, torch.Tensor],
    folder: Path,
    finish: Callable[[nn.Module], None] = lambda model: None,
) -> dict[str, Path]:
    """Write what transformers and peft load: adapters, or the whole model. :returns: its files by name.

    :param trained: tensors by the names of the model's parameters. Raises KeyError for one that is missing
    :param finish: what else training has changed, put into a whole model
    """
    model = build_transformers(config, 0, weights=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(trained[name])
    if config.lora is None:
        finish(model)
    more = {} if config.lora is None else {"save_embedding_layers": False}  # it would ask the Hub for the base's
    model.save_pretrained(folder, **more)
    return {path.name: path for path in folder.iterdir() if path.suffix in (".json", ".safetensors")}


def _about(config: TransformersConfig) -> Any:
    from transformers import AutoConfig

    if config.config is not None:
        check_settings(config.config, "the run file's model")
        return AutoConfig.for_model(**config.config)
    place = look_through(config.transformers, weights=False)
    return AutoConfig.from_pretrained(**_named(place), trust_remote_code=False)


def _named(place: Place) -> dict[str, str]:
    return {name: value for name, value in place._asdict().items() if value is not None}


def _shapes(config: TransformersConfig) -> nn.Module:
    from transformers import AutoModelForCausalLM

    about = _about(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(about, trust_remote_code=False)


def _base(config: TransformersConfig, quantization: Quantization | None) -> nn.Module:
    from transformers import AutoModelForCausalLM

    if config.config is not None:
        return AutoModelForCausalLM.from_config(_about(config), trust_remote_code=False)
    more: dict[str, Any] = {}
    if quantization:
        from transformers import BitsAndBytesConfig

        more["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute_dtype_of_4bit(),
        )
    place = look_through(config.transformers)
    return AutoModelForCausalLM.from_pretrained(
        **_named(place), trust_remote_code=False, use_safetensors=True, weights_only=True, **more
    )


def compute_dtype_of_4bit() -> torch.dtype:
    """The dtype that multiplies a base in 4 bits: bf16 where the card has it, else fp16 (a T4, a V100), fp32 on a CPU.

    PyTorch counts emulated bf16 as support, which a T4 has, at a fraction of its speed.
    """
    if not torch.cuda.is_available():
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def _with_adapters(base: nn.Module, lora: LoraSettings, seed: int, quantization: Quantization | None) -> nn.Module:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from peft.tuners.lora import LoraLayer

    if quantization:
        base = prepare_model_for_kbit_training(base)
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    settings = LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets, task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, settings, autocast_adapter_dtype=True)
    torch.manual_seed(seed)  # the base has taken its share of the random numbers, or none
    for module in model.modules():
        if isinstance(module, LoraLayer):
            _begin(module)
    return model


def _begin(layer: Any) -> None:
    """Fresh adapters, drawn on the CPU in float32: the same numbers on every machine."""
    device = layer.get_base_layer().weight.device
    parts = (layer.lora_A, layer.lora_B, layer.lora_embedding_A, layer.lora_embedding_B)
    for part in parts:
        part.float().to_empty(device="cpu")
    layer.reset_lora_parameters("default", True)
    for part in parts:
        part.to("cpu" if device.type == "meta" else device)
