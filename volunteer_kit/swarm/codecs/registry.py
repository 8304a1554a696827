"""Find the codec that a run file names, and check at the start that it works with this numpy.

hivemind 1.1.12 calls `int()` on a one-element array, which numpy >= 2.4 refuses. A notebook cannot choose its
platform's numpy, so these are codecs of the kit's own, and `check_codecs()` refuses to start when a round trip fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression
from hivemind.proto import runtime_pb2

from volunteer_kit.swarm.codecs.dense import BlockwiseCodec, Float16Codec, PlainCodec, UniformCodec
from volunteer_kit.swarm.codecs.topk import SparseCodec
from volunteer_kit.swarm.codecs.wire import FLOAT32, INTEGERS, check_header
from volunteer_kit.swarm.errors import SwarmError, brief

_HIVEMINDS = frozenset(runtime_pb2.CompressionType.values())


class SizeAdaptiveCodec(CompressionBase):
    """`small` for tensors of up to `threshold` elements, `large` above it; integers travel as they are.

    Small tensors (norms, LayerScale, biases) are few bytes and much influence; large ones bear 8 bits well.
    """

    def __init__(self, threshold: int, small: CompressionBase, large: CompressionBase):
        self.threshold, self.small, self.large = threshold, small, large

    def choose(self, info: CompressionInfo) -> CompressionBase:
        if not info.descriptor.dtype.is_floating_point:
            return NoCompression()
        return self.large if info.descriptor.numel() > self.threshold else self.small

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        return self.choose(info).compress(tensor, info, allow_inplace)

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        return decode(serialized_tensor, codec=self)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return self.choose(info).estimate_compression_ratio(info)


CODECS: dict[str, CompressionBase] = {
    "none": NoCompression(),
    "float16": Float16Codec(),
    "uniform8": UniformCodec(8),
    "blockwise8": BlockwiseCodec(8),
    "uniform4": UniformCodec(4),
    "blockwise4": BlockwiseCodec(4),
    "sparse": SparseCodec(),
}
# largest error, in standard deviations of the values that are tried; the sparse codec is tried on what it keeps
_WORST_ERROR = {
    "none": 0.0, "float16": 1e-3, "uniform8": 0.6, "blockwise8": 0.02, "uniform4": 0.6, "blockwise4": 0.3,
    "sparse": 0.0,
}  # fmt: skip
_OWN = {codec.compression_type: codec for codec in CODECS.values() if codec.compression_type > max(_HIVEMINDS)}
_PLAIN = PlainCodec()
# by the number in a message; a sparse part of any density, where no run's is known
_READERS = {codec.compression_type: codec for codec in (*CODECS.values(), _PLAIN, SparseCodec(1.0))}


def decode(
    message: runtime_pb2.Tensor, shape: Sequence[int] | None = None, codec: CompressionBase | None = None
) -> torch.Tensor:
    """A stranger's tensor, outside any graph (it may ask for gradients). Raises ValueError if it makes no sense.

    :param shape: that it must have, which is checked before anything is allocated; None: any of a bounded size
    :param codec: that is in use: nothing else is read, but integers as they are; None: any of CODECS
    """
    check_header(message, shape)
    is_plain = message.compression == runtime_pb2.NONE and message.dtype in INTEGERS
    readers = _READERS if codec is None else _readers_of(codec)
    reader = _PLAIN if is_plain else readers.get(message.compression)
    if reader is None:
        raise ValueError(f"a tensor in codec {message.compression}, which is not in use")
    try:
        return reader.extract(message).detach()
    except (RuntimeError, IndexError, TypeError, OverflowError) as error:  # of a codec of hivemind's
        raise ValueError(f"a tensor that cannot be read: {brief(error)}") from None


def _readers_of(codec: CompressionBase) -> dict[int, CompressionBase]:
    """What reads the messages that this codec makes."""
    if isinstance(codec, SizeAdaptiveCodec):
        return {**_readers_of(codec.small), **_readers_of(codec.large)}
    kind = getattr(codec, "compression_type", None)
    if kind is None:  # hivemind's codecs that choose another by a tensor's role
        return _READERS
    return {kind: codec if isinstance(codec, SparseCodec) else _READERS.get(kind, codec)}


def make_codec(small: str, large: str, threshold: int, density: float | None = None) -> CompressionBase:
    """The codec a run file names: `small` up to `threshold` elements, `large` above. Raises SwarmError for a name.

    :param density: share of a tensor's values that `sparse` sends; None: its own
    """
    for name in (small, large):
        if name not in CODECS:
            raise SwarmError(f"There is no codec {name!r}. Choose one of: {', '.join(CODECS)}.")
    chosen = [SparseCodec(density) if name == "sparse" and density else CODECS[name] for name in (small, large)]
    return chosen[1] if small == large else SizeAdaptiveCodec(threshold, *chosen)


def identity_of(codec: CompressionBase) -> list:
    """What is equal on two peers whose tensors are cut and encoded alike."""
    if isinstance(codec, SizeAdaptiveCodec):
        return [codec.threshold, identity_of(codec.small), identity_of(codec.large)]
    # 8 and 4 bits are of one class, and cut a tensor at other places
    return [type(codec).__name__, getattr(codec, "compression_type", None), getattr(codec, "density", None)]


def leaves_out(codec: CompressionBase) -> bool:
    """Does it leave so much out that it has to come later? See rounds/error_feedback.py."""
    if isinstance(codec, SizeAdaptiveCodec):
        return leaves_out(codec.small) or leaves_out(codec.large)
    return codec.compression_type in _OWN


def check_codecs() -> None:
    """Send numbers through every codec and back. Raises SwarmError when one loses more than it may."""
    dense = torch.randn(3000, generator=torch.Generator().manual_seed(0), **FLOAT32).clamp(-2.9, 2.9)
    few = torch.where(dense.abs() > 2.5, 2.0 * dense.sign(), 0.0 * dense)  # of one magnitude: nothing of it is lost
    for name, codec in CODECS.items():
        values = few if name == "sparse" else dense
        try:
            info = CompressionInfo.from_tensor(values)
            message = runtime_pb2.Tensor.FromString(codec.compress(values, info).SerializeToString())
            error = (decode(message) - values).abs().max().item()
        except Exception as e:
            raise SwarmError(_broken_codec(name, repr(e))) from e
        if not error <= _WORST_ERROR[name]:
            raise SwarmError(_broken_codec(name, f"values come back wrong by {error:.3g}"))


def _broken_codec(name: str, cause: str) -> str:
    return (
        f"The codec {name!r} does not work on this machine ({cause}), and gradients would be lost in it.\n"
        "1. Restart the notebook or process: it may mix two versions of a library.\n"
        "2. If it happens again, report it with the output of: python -m pip list"
    )
