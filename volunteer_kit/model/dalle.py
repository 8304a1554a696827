"""The text-to-image transformer: dalle-pytorch's modules and weight names, at less than half the cost a step.

A sequence is <bos>, the caption's tokens, the image's codes. dalle-pytorch's DALLE computes every logit at every
position and masks most of them; here text positions get text logits only and image positions image logits only,
which gives the same loss. Layers are described in Ramesh et al. 2021 (DALL-E), https://arxiv.org/abs/2102.12092.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from volunteer_kit.model import upstream
from volunteer_kit.model.dalle_config import PRESETS, DalleConfig
from volunteer_kit.model.layers import layer_norm, layers_of, run_cached, run_layers
from volunteer_kit.model.layout import Layout
from volunteer_kit.model.matmul import Words, token_losses
from volunteer_kit.model.sampling import guide, sample
from volunteer_kit.packages import MissingDependency

__all__ = ["Dalle", "DalleConfig", "DalleLoss", "MissingDependency", "PRESETS"]

class DalleLoss(NamedTuple):
    """Scalars in fp32: `loss` is the mean of both, the image's weighted by loss_img_weight; backward from `loss`."""

    loss: Tensor
    text_loss: Tensor  # nats a token
    image_loss: Tensor  # nats a code


def shapes_are_fixed(x: Tensor) -> bool:
    """Whether x is on a device whose programs are compiled for one shape: a TPU."""
    return x.device.type == "xla"


class _TiedEmbedding(nn.Module):
    """The output layer under the names that it has as an input embedding in dalle-pytorch."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear


class Dalle(nn.Module):
    """T text tokens, N image codes, D = dim. Raises MissingDependency if dalle-pytorch is not installed.

    `checkpointing` is each machine's own choice and changes no result: activations are computed again in backward,
    for a third more time. Turn it on when memory is short; a reversible model then keeps none of them.
    """

    def __init__(self, config: DalleConfig, checkpointing: bool = False) -> None:
        super().__init__()
        self.config, self.checkpointing = config, checkpointing
        self.num_text = config.num_text_tokens + config.text_seq_len
        theirs = upstream.dalle_transformer()
        self.transformer = theirs.Transformer(
            dim=config.dim, depth=config.depth, heads=config.heads, dim_head=config.dim_head, ff_mult=config.ff_mult,
            seq_len=config.text_seq_len + config.image_seq_len, image_fmap_size=config.image_fmap_size,
            attn_types=config.layer_kinds, shared_attn_ids=config.layer_ids(config.shared_attn_ids),
            shared_ff_ids=config.layer_ids(config.shared_ff_ids), reversible=config.reversible,
            shift_tokens=config.shift_tokens, rotary_emb=config.rotary_emb,
        )  # fmt: skip
        self.layers = layers_of(self.transformer, config.layer_kinds)
        self.to_logits = nn.Sequential(nn.LayerNorm(config.dim), nn.Linear(config.dim, config.total_tokens))
        if config.share_input_output_emb:
            self.text_emb = _TiedEmbedding(self.to_logits[1])
            self.image_emb = _TiedEmbedding(self.to_logits[1])
        else:
            self.text_emb = nn.Embedding(self.num_text, config.dim)
            self.image_emb = nn.Embedding(config.num_image_tokens, config.dim)
        if not config.rotary_emb:
            self.text_pos_emb = nn.Embedding(config.text_seq_len + 1, config.dim)
            fmap = (config.image_fmap_size,) * 2
            self.image_pos_emb = upstream.dalle_reference().AxialPositionalEmbedding(config.dim, axial_shape=fmap)

    def forward(self, text: Tensor, codes: Tensor) -> DalleLoss:
        """text (B, T) int64, 0 = padding; codes (B, N) int64 -> losses. Raises ValueError for other shapes."""
        T, N = self.config.text_seq_len, self.config.image_seq_len
        if text.shape[1:] != (T,) or codes.shape[1:] != (N,):
            raise ValueError(
                f"text is {tuple(text.shape)} and codes {tuple(codes.shape)}; this model reads (B, {T}) and (B, {N})"
            )
        text, lengths, layout = self._laid_out(text)
        x = self._embed(text, codes[:, :-1])  # (B, L, D), L = 1 + text + N - 1
        x = run_layers(self.layers, x, layout, reversible=self.config.reversible, recompute=self.checkpointing)
        x = layer_norm(x, self.to_logits[0])
        linear = self.to_logits[1]
        said = self._text_words(x, text, lengths), self._image_words(x, codes, lengths, layout)
        text_loss, image_loss = token_losses(linear.weight, linear.bias, *said)
        weight = self.config.loss_img_weight
        return DalleLoss((text_loss + weight * image_loss) / (1 + weight), text_loss, image_loss)

    @torch.no_grad()
    def generate(
        self,
        text: Tensor,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        cond_scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """text (B, T) int64 -> codes (B, N) int64, one code at a time.

        temperature: 0 takes the likeliest code. top_k: sample among the k likeliest codes; None: among all.
        cond_scale: classifier-free guidance, https://arxiv.org/abs/2207.12598; 1 = off, 0 = without the caption. It
        doubles the work, and needs a model that has also seen empty captions.
        """
        guided = cond_scale != 1.0
        rows = torch.cat((text, torch.zeros_like(text))) if guided else text  # (B or 2B, T)
        rows, lengths, layout = self._laid_out(rows)
        codes, memory, every = text.new_empty(text.shape[0], 0), {}, torch.arange(len(rows), device=text.device)
        x, last = self._embed(rows, rows[:, :0]), lengths  # (B or 2B, L, D), and where the next code is predicted
        for position in range(self.config.image_seq_len):
            hidden = run_cached(self.layers, x, layout, memory, reversible=self.config.reversible)
            layout.offset += x.shape[1]
            logits = self._image_logits(self.to_logits[0](hidden[every, last]))  # (B or 2B, C)
            logits = guide(*logits.chunk(2), cond_scale) if guided else logits
            code = sample(logits, temperature, top_k, generator)[:, None]  # (B, 1)
            codes = torch.cat((codes, code), dim=1)
            x, last = self._embed(None, torch.cat((code, code)) if guided else code, start=position), 0
        return codes

    @property
    def sampling_bytes(self) -> int:
        """Memory that one caption's keys and values take while it is drawn, in fp32; guidance takes it twice."""
        c = self.config
        return 4 * 2 * c.depth * c.heads * c.dim_head * (c.text_seq_len + c.image_seq_len)

    def num_parameters(self) -> int:
        """Trainable numbers, shared ones counted once."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def tensors(self) -> dict[str, Tensor]:
        """Every trained tensor once, by its first name, on its own device: what a checkpoint holds."""
        return {name: parameter.detach() for name, parameter in self.named_parameters() if parameter.requires_grad}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The reverse of `tensors`. Raises ValueError that names what is missing, superfluous or of another shape."""
        own = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        wrong = [f"{name} is missing" for name in own.keys() - tensors.keys()]
        wrong += [f"{name} is not of this model" for name in tensors.keys() - own.keys()]
        wrong += [
            f"{name} is {tuple(tensors[name].shape)}, not {tuple(own[name].shape)}"
            for name in own.keys() & tensors.keys()
            if tensors[name].shape != own[name].shape
        ]
        if wrong:
            some = "; ".join(sorted(wrong)[:3])
            raise ValueError(f"these weights are of another model ({len(wrong)} differences): {some}")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(tensors[name])

    def _laid_out(self, text: Tensor) -> tuple[Tensor, Tensor, Layout]:
        """text (B, T) -> it without the columns that nobody sees (B, T'), captions' lengths (B,), their layout."""
        config, transformer = self.config, self.transformer
        lengths, is_text = text.new_full((len(text),), text.shape[1]), None
        if config.padding == "masked":
            is_word = text != 0
            lengths = (is_word * torch.arange(1, text.shape[1] + 1, device=text.device)).amax(1)  # (B,)
            if not shapes_are_fixed(text):
                text, is_word = (t[:, : int(lengths.max())] for t in (text, is_word))
            if shapes_are_fixed(text) or not is_word.all():
                is_text = F.pad(is_word, (1, 0), value=True)  # (B, 1 + T'), <bos> is seen
        text_len, angles = 1 + text.shape[1], None
        if transformer.pos_emb is not None:
            angles, start = transformer.pos_emb[0], 1 + config.text_seq_len  # codes keep their angles
            angles = torch.cat((angles[:text_len], angles[start : start + config.image_seq_len - 1]))
        return text, lengths, Layout(text_len, config.image_fmap_size, angles, is_text)

    def _text_words(self, x: Tensor, text: Tensor, lengths: Tensor) -> Words:
        """What <bos> and all words but the last should say. Without paddings a caption counts as one, however long it
        is: gradients of microbatches then add up to those of the whole batch."""
        masked, said = self.config.padding == "masked", self._with_unique_padding(text)
        spoken = text != 0 if masked else torch.ones_like(text, dtype=torch.bool)  # (B, T')
        share = spoken / (spoken.sum(1, keepdim=True).clamp(min=1) * len(text))  # (B, T')
        rows = x[:, : text.shape[1]]
        vocabulary = self.config.num_text_tokens if masked else self.num_text
        if shapes_are_fixed(text):  # paddings take part, and count nothing
            labels = text if masked else said
            return Words(rows.flatten(0, 1), labels.flatten(), share.flatten(), 0, vocabulary)
        return Words(rows[spoken], said[spoken], share[spoken], 0, vocabulary)

    def _image_words(self, x: Tensor, codes: Tensor, lengths: Tensor, layout: Layout) -> Words:
        """What the last word (it predicts the first code) and all codes but the last should say."""
        if shapes_are_fixed(x):  # as a sum, which stays on the core that has the sample
            is_last = lengths[:, None] == torch.arange(layout.text_len, device=x.device)  # (B, 1 + T)
            last_word = (x[:, : layout.text_len] * is_last[..., None]).sum(1, keepdim=True)  # (B, 1, D)
        else:
            last_word = x[torch.arange(len(x), device=x.device), lengths][:, None]
        rows = torch.cat((last_word, x[:, layout.text_len :]), dim=1).flatten(0, 1)  # (B * N, D)
        share = torch.full((len(rows),), 1 / len(rows), device=x.device)
        return Words(rows, codes.flatten(), share, self.num_text, self.config.total_tokens)

    def _with_unique_padding(self, text: Tensor) -> Tensor:
        padding = self.config.num_text_tokens + torch.arange(text.shape[1], device=text.device)  # (T',)
        return torch.where(text == 0, padding, text)

    def _embed(self, text: Tensor | None, codes: Tensor, start: int = 0) -> Tensor:
        """<bos>, text (B, T'), codes (B, L) from position `start` -> (B, 1 + T' + L, D); codes only if text is None."""
        if text is not None:  # 0 is free to be <bos>, since each padding has a number of its own
            text = F.pad(self._with_unique_padding(text), (1, 0), value=0)
        if self.config.share_input_output_emb:  # one look-up: the gradient of each is as large as the whole table
            words = codes + self.num_text
            x = F.embedding(words if text is None else torch.cat((text, words), dim=1), self.to_logits[1].weight)
        else:
            x = self.image_emb(codes)
            x = x if text is None else torch.cat((self.text_emb(text), x), dim=1)
        if self.config.rotary_emb:
            return x
        L = codes.shape[1]
        places = self.image_pos_emb(x.new_empty(1, start + L, x.shape[2]))[:, start:]
        if text is not None:
            places = torch.cat((self.text_pos_emb.weight[None, : text.shape[1]], places), dim=1)
        return x + places

    def _image_logits(self, x: Tensor) -> Tensor:
        linear = self.to_logits[1]
        return F.linear(x, linear.weight[self.num_text :], linear.bias[self.num_text :])
