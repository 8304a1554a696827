"""How a sequence of text and codes is laid out, and which position sees which."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

CONV_KERNEL = 5  # dalle-pytorch's conv_like layers look back 5 x 5 positions


@lru_cache(maxsize=16)
def attention_mask(kind: str, text_len: int, fmap: int) -> Tensor:
    """Which position sees which, bool (S, S) with S = text_len + fmap**2 - 1 (the last code is never an input).

    `text_len` counts <bos>. Text sees text before it; an image position sees all text and, among the image positions
    up to its own, all (full), those of its row or column (axial_row, axial_col), or 5 x 5 of them (conv_like).
    """
    size = text_len + fmap * fmap
    position = torch.arange(size)
    sees = position[:, None] >= position[None, :]  # (S + 1, S + 1)
    place = torch.arange(fmap * fmap)
    down = (place // fmap)[:, None] - (place // fmap)[None, :]  # (N, N) rows between query and key
    right = (place % fmap)[:, None] - (place % fmap)[None, :]
    near = {
        "full": torch.ones_like(down, dtype=torch.bool),
        "axial_row": down == 0,
        "axial_col": right == 0,
        "conv_like": (down >= 0) & (down < CONV_KERNEL) & (right >= 0) & (right < CONV_KERNEL),
    }[kind]
    sees[text_len:, text_len:] &= near
    return sees[:-1, :-1].contiguous()


@dataclass
class Layout:
    """How one batch's sequences are laid out: `text_len` positions of <bos> and text, then codes in reading order."""

    text_len: int
    fmap: int
    angles: Tensor | None  # (S, R) rotary angles of all S = text_len + fmap**2 - 1 positions; R even
    is_text: Tensor | None = None  # (B, text_len) bool, False for paddings that nobody may see; None: all are seen
    offset: int = 0  # positions before this call's, while sampling
    _masks: dict[str, Tensor] = field(default_factory=dict)
    _turns: tuple[Tensor, Tensor] | None = None

    def mask(self, kind: str, device: torch.device) -> Tensor:
        """Who sees whom, bool (S, S), or (B, 1, S, S) where paddings are hidden."""
        if kind not in self._masks:
            mask = attention_mask(kind, self.text_len, self.fmap).to(device)
            if self.is_text is not None:
                keys = F.pad(self.is_text, (0, len(mask) - self.text_len), value=True)  # (B, S)
                mask = mask & keys[:, None, None, :]
            self._masks[kind] = mask
        return self._masks[kind]

    def turns(self, start: int, end: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Cosine and sine of the angles of positions start:end, (L, 1, 1, R); None without rotary embedding."""
        if self.angles is None:
            return None
        if self._turns is None:
            angles = self.angles.to(device)[:, None, None]
            self._turns = angles.cos(), angles.sin()
        cos, sin = self._turns
        return cos[start:end], sin[start:end]
