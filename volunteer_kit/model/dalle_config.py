"""The sizes of the text-to-image transformer. A run file is read without torch, so the transformer is not here."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

AttentionKind = Literal["full", "axial_row", "axial_col", "conv_like"]


class DalleConfig(BaseModel):
    """What decides the model's shape; every peer of a run must have the same."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dim: int = Field(gt=0)  # width of a token
    depth: int = Field(gt=0)  # layers
    heads: int = Field(gt=0)  # attention heads of a layer
    dim_head: int = Field(64, ge=6)  # width of a head
    ff_mult: int = Field(4, gt=0)  # the GEGLU feed-forward is ff_mult * dim wide
    text_seq_len: int = Field(256, gt=0)  # tokens of a caption, padded
    num_text_tokens: int = Field(32_100, gt=0)  # the text tokenizer's vocabulary; 0 is the padding
    image_fmap_size: int = Field(32, gt=0)  # codes a side
    num_image_tokens: int = Field(8192, gt=0)  # the image tokenizer's codes
    attn_types: tuple[AttentionKind, ...] = ("full",)  # kinds of attention, cycled over the layers
    shared_attn_ids: tuple[int, ...] | None = None  # cycled; layers with equal ids share their attention weights
    shared_ff_ids: tuple[int, ...] | None = None  # the same for the feed-forward weights
    last_layer_conv_like: bool = False  # the last layer is conv_like, with weights of its own
    reversible: bool = False  # reversible residual layers
    shift_tokens: bool = True  # shift a part of each token's features from its neighbours
    rotary_emb: bool = True  # rotary position embeddings
    share_input_output_emb: bool = True  # one matrix for input embeddings and output logits
    loss_img_weight: float = Field(7.0, gt=0)  # weight of the codes' loss beside the captions'
    # masked: paddings are neither seen nor learned, and short captions cost less. dalle-pytorch: as its checkpoints
    # were trained, each padding is a word of its own that codes attend to and that text has to predict.
    padding: Literal["masked", "dalle-pytorch"] = "masked"

    @property
    def image_seq_len(self) -> int:
        return self.image_fmap_size**2

    @property
    def total_tokens(self) -> int:
        """Text vocabulary, one padding token for each text position, image codes."""
        return self.num_text_tokens + self.text_seq_len + self.num_image_tokens

    @property
    def layer_kinds(self) -> list[str]:
        """The kind of attention of each layer."""
        return self._cycled(self.attn_types, "conv_like")

    @property
    def parameters(self) -> int:
        """How many numbers the transformer learns."""
        inner, hidden = self.heads * self.dim_head, self.ff_mult * self.dim
        norms = 6 * self.dim * self.depth  # LayerScale and a norm of each attention and each feed-forward
        attention = 4 * inner * self.dim + self.dim
        feed_forward = 3 * hidden * self.dim + 2 * hidden + self.dim  # GEGLU: twice as wide before the gate
        shared = len(set(self.layer_ids(self.shared_attn_ids))) * attention
        shared += len(set(self.layer_ids(self.shared_ff_ids))) * feed_forward
        logits = 2 * self.dim + self.total_tokens * (self.dim + 1)
        return norms + shared + logits + self._embeddings

    @property
    def _embeddings(self) -> int:
        """Those that no output logits share, and learned positions in place of rotary ones."""
        tokens = 0 if self.share_input_output_emb else self.total_tokens
        positions = 0 if self.rotary_emb else self.text_seq_len + 1 + 2 * self.image_fmap_size
        return (tokens + positions) * self.dim

    def layer_ids(self, ids: tuple[int, ...] | None) -> list[int]:
        """Which weights each layer uses, from `shared_attn_ids` or `shared_ff_ids`."""
        ids = ids if ids is not None else tuple(range(self.depth))
        return self._cycled(ids, max(ids) + 1)

    def _cycled(self, values: tuple, last: object) -> list:
        if not self.last_layer_conv_like:
            return list(islice(cycle(values), self.depth))
        return [*islice(cycle(values), self.depth - 1), last]

    @model_validator(mode="after")
    def _can_be_built(self) -> DalleConfig:
        for name in ("attn_types", "shared_attn_ids", "shared_ff_ids"):
            if getattr(self, name) == ():
                raise ValueError(f"{name} is empty; name at least one, or leave it out")
        kind_of: dict[int, str] = {}
        for number, kind in zip(self.layer_ids(self.shared_attn_ids), self.layer_kinds, strict=True):
            if kind_of.setdefault(number, kind) != kind:
                raise ValueError(
                    f"layers that share attention {number} are {kind_of[number]!r} and {kind!r}; "
                    "give shared_attn_ids and attn_types the same cycle"
                )
        if self.shift_tokens and self.dim % 4:
            raise ValueError(f"shift_tokens moves quarters of a token, so dim must be a multiple of 4, not {self.dim}")
        return self


PRESETS: dict[str, DalleConfig] = {
    # "Training Transformers Together", NeurIPS 2021: 125.9 M parameters, 1.1 G if nothing were shared
    "original": DalleConfig(
        dim=1024, depth=64, heads=16, dim_head=64,
        attn_types=("axial_row", "axial_col", "axial_row", "axial_row"),
        shared_attn_ids=(0, 1, 2, 3), shared_ff_ids=(0, 1, 2, 3),
        last_layer_conv_like=True, reversible=True,
    ),
    # learns generated scenes within minutes on two CPU cores
    "tiny": DalleConfig(
        dim=64, depth=3, heads=2, dim_head=32, ff_mult=2,
        text_seq_len=16, num_text_tokens=512, image_fmap_size=8, num_image_tokens=192,
    ),
}  # fmt: skip
