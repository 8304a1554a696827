"""How a run file describes a model of transformers; read without torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator


class LoraSettings(BaseModel):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), as peft makes them."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    r: int = Field(16, ge=1, le=1024)  # rank
    alpha: float = Field(32.0, gt=0, le=1e4)  # the adapters' output is scaled by alpha / r
    dropout: float = Field(0.0, ge=0, lt=1)  # dropout in front of the adapters
    target_modules: str | tuple[str, ...] = "all-linear"  # modules that get adapters


class TransformersConfig(BaseModel):
    """A causal language model. Code of a repository's own is never run, and nothing is unpickled (repository.py).

    :param transformers: Hub id, `org/name` or `org/name@COMMIT`, or folder, `./FOLDER`, of the weights to begin with
    :param config: in its place, a new model: `model_type` and the fields of its configuration
    :param lora: adapters; without this section all of the model is trained
    :param max_length: tokens of a sample, at most; a shorter sample counts as its share of a whole one
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    transformers: str | None = Field(None, max_length=300)
    config: dict[str, JsonValue] | None = None
    lora: LoraSettings | None = None
    max_length: int = Field(512, ge=1, le=2**20)

    @model_validator(mode="after")
    def _one_of_two(self) -> TransformersConfig:
        if (self.transformers is None) == (self.config is None):
            raise ValueError("give either transformers, a Hub id or folder, or config, the fields of a new model")
        return self
