"""What the run's model draws by now, so that volunteers see what they train."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image

from volunteer_kit.home import Home
from volunteer_kit.run_tokenizers import build_tokenizers
from volunteer_kit.runs import RunConfig
from volunteer_kit.swarm.options import StepReport
from volunteer_kit.training.callbacks import Emit
from volunteer_kit.training.trainer import Callback, Trainer

if TYPE_CHECKING:
    from volunteer_kit.model.dalle import Dalle

SHARE = 0.02  # of the time may go into drawing
NOT_BEFORE = 30.0  # s between two drawings
LAYER_SECONDS = 1e-3  # s a code and layer takes until it was measured
TEMPERATURE = 0.5  # of sampling: what a passer-by should see is what the model is sure of
KEPT = 24  # files


class DrawPictures(Callback):
    """Draws the run's captions now and then, between two global steps.

    A machine that lacks the image tokenizer draws none; a run without captions has none.
    """

    def __init__(self, run: RunConfig, home: Home | None, emit: Emit):
        self._run, self._emit = run, emit
        self._folder = home.pictures if home and run.captions else None
        codes = run.model.image_seq_len * len(run.captions)
        self._cost = codes * run.model.depth * LAYER_SECONDS
        self._next = time.monotonic() + self._pause()
        self._tokenizers = None

    def _pause(self) -> float:
        return max(NOT_BEFORE, self._cost / SHARE)

    def on_epoch(self, trainer: Trainer, report: StepReport, loss: float | None) -> None:
        if time.monotonic() >= self._next:
            self.draw(trainer.model, report.epoch)

    def draw(self, model: Dalle, epoch: int) -> None:
        """Draw every caption once; what goes wrong is no reason to stop training."""
        if self._folder is None:
            return
        started = time.monotonic()
        try:
            paths = self._write(self._pixels(model), epoch)
        except (OSError, ValueError, torch.OutOfMemoryError) as error:
            self._folder = None
            self._emit("warning", kind="pictures", message=f"No more pictures are drawn here: {error}")
            return
        shown = [{"caption": c, "path": str(path)} for c, path in zip(self._run.captions, paths, strict=True)]
        self._emit("pictures", epoch=epoch, pictures=shown)
        self._cost = time.monotonic() - started
        self._next = time.monotonic() + self._pause()

    @torch.no_grad()
    def _pixels(self, model: Dalle) -> torch.Tensor:
        self._tokenizers = self._tokenizers or build_tokenizers(self._run)
        encode, length = self._tokenizers.text.encode, self._run.model.text_seq_len
        device = next(model.parameters()).device
        text = torch.tensor([encode(caption, length) for caption in self._run.captions], device=device)  # (B, T)
        was_training = model.training
        model.eval()
        try:
            codes = model.generate(text, temperature=TEMPERATURE)  # (B, N)
        finally:
            model.train(was_training)
        return self._tokenizers.image.decode(codes.cpu())  # (B, 3, S, S) in [0, 1]

    def _write(self, pixels: torch.Tensor, epoch: int) -> list[Path]:
        self._folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for number, image in enumerate((pixels.permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()):
            paths.append(self._folder / f"epoch-{epoch:07d}-{number}.png")
            Image.fromarray(image).save(paths[-1])
        for old in sorted(self._folder.glob("epoch-*.png"))[: -max(KEPT, len(paths))]:
            old.unlink(missing_ok=True)
        return paths
