"""What a model card says of a fine-tune of a language model, where it differs from a text-to-image run's."""

from __future__ import annotations

from pathlib import Path

from volunteer_kit.model.transformers_config import TransformersConfig

WHOLE_MODEL = "transformers"  # folder
DATA = "Each volunteer trained on data of its own; the run's host knows which were asked for, and under which licence."
LIMITS = (
    "It knows what its base and its data knew, faults and prejudices too, and says what is false as fluently as what "
    "is true."
)


def base_of(model: TransformersConfig) -> str | None:
    """Its repository on the Hub, if that is where it comes from."""
    name = (model.transformers or "").partition("@")[0]
    return name if name.count("/") == 1 and not Path(name).is_absolute() else None


def what(model: TransformersConfig) -> str:
    base = base_of(model)
    of = f" of [{base}](https://huggingface.co/{base})" if base else ""
    if model.lora is not None:
        return f"Low-rank adapters{of}"
    return f"A language model{', a fine-tune' + of if of else ''}"


def front(model: TransformersConfig) -> str:
    """What the Hub reads."""
    lines = ["---", f"library_name: {'peft' if model.lora is not None else 'transformers'}",
             "pipeline_tag: text-generation"]  # fmt: skip
    if base := base_of(model):
        lines.append(f"base_model: {base}")
    return "\n".join([*lines, "tags:", "- hivemind", "- collaborative-training", "---"])


def place_of(name: str, model: TransformersConfig) -> str:
    """Where a file of transformers' lies: a whole model beside `model.safetensors`, the kit's own file."""
    return f"{WHOLE_MODEL}/{name}" if model.lora is None else name


def use(model: TransformersConfig, repo: str) -> str:
    if model.lora is None:
        library, code = "transformers", f'AutoModelForCausalLM.from_pretrained("{repo}", subfolder="{WHOLE_MODEL}")'
    elif base_of(model):
        library, code = "peft", f'AutoPeftModelForCausalLM.from_pretrained("{repo}")'
    else:
        library, code = "peft", f'PeftModel.from_pretrained(base, "{repo}")  # the base is the run\'s host\'s'
    name = code.partition(".")[0]
    return (
        f"## How to use it\n\n```python\nfrom {library} import {name}\n\nmodel = {code}\n```\n\n"
        "`model.safetensors` has what was trained and, under `optimizer/`, the optimizer's statistics, so that "
        "training can go on from it; `meta.json` says what it is of. Nothing in here is pickled."
    )


def rows(model: TransformersConfig) -> list[tuple[str, str]]:
    found = [("Sample", f"{model.max_length:,} words at most")]
    if model.lora is not None:
        found.insert(0, ("Adapters", f"LoRA, rank {model.lora.r}, alpha {model.lora.alpha:g}"))
    return found
