"""What a sample costs: arithmetic and memory, estimated from the model's shape. The tuner measures the rest."""

from __future__ import annotations

from dataclasses import dataclass

from volunteer_kit.device.table import Precision

FLOATS_PER_UNIT = 18  # kept for backward per layer, token and channel; measured on the kit's model, ff_mult 4
FOLDED = 5  # dim**2 numbers that a layer keeps in fp32: its output matrices, LayerScale folded into them


@dataclass(frozen=True)
class Workload:
    """What one sample costs; enough to choose a first batch size."""

    parameters: int  # trainable
    tokens: int  # per sample, text and image
    dim: int
    depth: int
    logits: int  # text tokens x text vocabulary + image tokens x codes
    reversible: bool = False  # then recomputing needs no activations at all

    @property
    def flops(self) -> float:
        """Of forward and backward of one sample; sharing weights saves memory, not work."""
        return 6.0 * (self.tokens * self.depth * 16 * self.dim**2 + self.dim * self.logits)

    def sample_bytes(self, precision: Precision, checkpointing: bool) -> float:
        """Memory of one sample's activations."""
        width = self.tokens * self.dim
        one_layer = FLOATS_PER_UNIT * width
        layers = self.depth * one_layer
        if checkpointing:
            layers = one_layer + (4 if self.reversible else self.depth) * width
        size = 4 if precision == "fp32" else 2.4  # norms and softmax stay in fp32
        return layers * size + 3 * 4 * self.logits

    def layer_bytes(self, precision: Precision, checkpointing: bool) -> float:
        """Memory that a microbatch takes whatever its size."""
        return 0 if checkpointing or precision != "fp32" else self.depth * FOLDED * self.dim**2 * 4


# Of volunteer_kit/model/dalle.py's presets, for the printout; a run passes its own.
DEMO = Workload(parameters=172_112, tokens=80, dim=64, depth=3, logits=16 * 528 + 64 * 192)
ORIGINAL = Workload(125_900_000, 1280, 1024, 64, 256 * 32_356 + 1024 * 8192, reversible=True)
