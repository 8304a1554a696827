"""Training on TPUs: torch_xla over PJRT, in one process, all cores as one device.

The model that the swarm averages stays on the CPU. A copy of it lives on the TPU, and each microbatch's gradients come
back in one transfer; a microbatch that does not fit at once is computed in parts, whose gradients are summed on the
TPU before. The batch is cut over the cores, parameters are whole on each; XLA's partitioner puts the sum of
gradients over the cores into the program itself (Xu et al. 2021, GSPMD, https://arxiv.org/abs/2105.04663).
"""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch

from volunteer_kit.training.replicas import parameter_version

ComputeLoss = Callable[[torch.nn.Module, Any], torch.Tensor]


class MissingTorchXla(ImportError):
    """torch_xla is not installed, or belongs to another PyTorch; the message has the line that installs it."""


class TpuCores:
    """`compute_gradients` of a Trainer, over the cores of this machine's TPU; its model is on the CPU.

    The TPU is opened by the first microbatch, when hivemind has begun its processes: to fork a process that holds one
    may hang. That microbatch also compiles, minutes for a large model, and so does the first of another batch size or
    after a change of the model's `checkpointing`; all others compile nothing. A batch size that is no multiple of the
    cores is right too, but no faster than one core.

    This process may not have computed a gradient before: autograd, once begun, learns of no other device.

    :param compute_loss: (model, batch) -> scalar mean loss; the batch's tensors are on the model's device
    :param precision: "bf16", or "fp32", several times slower; parameters and gradients are fp32 in both
    :param cores: 1 takes the first core only, None all there are (torch_xla's SPMD knows nothing between)
    :param fits: rows that a core has room for at once; a microbatch of more is computed in equal parts, one after
        another. None: every microbatch fits
    :param programs: a folder that keeps what was compiled, so that a process that follows this one need not wait again
    Raises MissingTorchXla.
    """

    def __init__(
        self,
        compute_loss: ComputeLoss,
        precision: Literal["bf16", "fp32"] = "bf16",
        cores: Literal[1] | None = None,
        programs: str | Path | None = None,
        fits: int | None = None,
    ):
        require_torch_xla()
        self._compute_loss, self._precision, self._cores = compute_loss, precision, cores
        self._programs, self._fits = programs, fits
        self._device: torch.device | None = None
        self._mesh: Any = None  # of all cores; None: one core
        self._copy: torch.nn.Module | None = None
        self._copied = -1  # parameter_version of what the copy holds
        self._zeros: torch.Tensor | None = None  # on the TPU: what the sum over parts begins with

    def __call__(self, model: torch.nn.Module, batch: Any, scale: float = 1.0) -> torch.Tensor:
        """Set .grad of the model's parameters. :returns: the microbatch's mean loss. Both are on the CPU.

        Raises RuntimeError with RESOURCE_EXHAUSTED when the microbatch does not fit.
        """
        self._open()
        each = self._up_to_date(model)
        try:
            numbers, has_gradient = self._summed(each, batch, scale)
        finally:
            each.zero_grad(set_to_none=True)  # what an error leaves would become an output of the next program
        start = 0
        for parameter, found in zip(model.parameters(), has_gradient, strict=True):
            if found:
                parameter.grad = numbers[start : start + parameter.numel()].view_as(parameter)
                start += parameter.numel()
        return numbers[-1]

    def close(self) -> None:
        """Forget the copy; the TPU itself is this process's until it ends."""
        self._copy, self._copied, self._zeros = None, -1, None

    def _open(self) -> None:
        if self._device is not None:
            return
        import torch_xla
        import torch_xla.runtime as runtime

        if self._precision == "fp32":
            import torch_xla.backends

            torch_xla.backends.set_mat_mul_precision("highest")  # the default rounds fp32 factors to bf16
        if self._programs is not None:
            runtime.initialize_cache(str(self._programs))
        count = runtime.addressable_runtime_device_count()
        if count > 1 and self._cores != 1:
            from torch_xla.distributed.spmd import Mesh

            runtime.use_spmd()
            self._mesh = Mesh(list(range(count)), (count,), ("cores",))
        self._device = torch_xla.device()

    def _up_to_date(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model's copy on the TPU, equal in parameters, without gradients."""
        if self._copy is None:
            self._copy = _without_gradients(model).to(self._device)
        if hasattr(model, "checkpointing"):
            self._copy.checkpointing = model.checkpointing
        version = parameter_version(model)
        if version != self._copied:
            ours = [parameter.detach() for parameter in model.parameters()]
            for parameter, sent in zip(self._copy.parameters(), self._sent(ours), strict=True):
                parameter.data = sent
            self._copied = version
        return self._copy

    def _summed(self, each: torch.nn.Module, batch: Any, scale: float) -> tuple[torch.Tensor, list[bool]]:
        """Forward and backward of all parts, one transfer back.

        :returns: every gradient flat, one after another, then the loss, on the CPU; and which parameters have one
        """
        tensors = {name: value for name, value in batch._asdict().items() if torch.is_tensor(value)}
        rows = min(len(tensor) for tensor in tensors.values())
        parts = parts_of(rows, self._fits, 1 if self._mesh is None else self._mesh.size())
        numbers = None
        # cut on the CPU: rows taken on the TPU by their numbers would make a program of each part
        for part in zip(*(tensor.chunk(parts) for tensor in tensors.values()), strict=True):
            moved = SimpleNamespace(**dict(zip(tensors, self._sent(list(part), cut=True), strict=True)))
            numbers, has_gradient = self._computed(each, moved, scale / parts, numbers, parts > 1)
        numbers = numbers.cpu()
        numbers[-1] /= parts
        return numbers, has_gradient

    def _sent(self, tensors: list[torch.Tensor], cut: bool = False) -> list[torch.Tensor]:
        """The tensors on the TPU: all of them in one transfer, whole on each core, or cut into rows."""
        import torch_xla.core.xla_model as xla

        # rows that do not come out even would end the whole process, in XLA's partitioner
        if not cut or self._mesh is None or any(len(tensor) % self._mesh.size() for tensor in tensors):
            return xla.send_cpu_data_to_device(tensors, self._device)
        from torch_xla.distributed.spmd import ShardingSpec

        specs = [ShardingSpec(self._mesh, ("cores", *[None] * (tensor.dim() - 1))) for tensor in tensors]
        pairs = zip(tensors, specs, strict=True)
        return [xla.send_cpu_data_to_device([t], self._device, input_sharding=spec)[0] for t, spec in pairs]

    def _computed(
        self, each: torch.nn.Module, batch: Any, scale: float, so_far: torch.Tensor | None, is_part: bool
    ) -> tuple[torch.Tensor, list[bool]]:
        """Forward and backward of one part: one program, the same for each. Its numbers stay on the TPU, added to those
        of the parts before."""
        import torch_xla

        with self._autocast():
            loss = self._compute_loss(each, batch)
        (loss * scale).backward()
        gradients = [parameter.grad for parameter in each.parameters()]
        flat = [gradient.flatten() for gradient in gradients if gradient is not None]
        numbers = torch.cat([*flat, loss.detach().float().view(1)])
        has_gradient = [gradient is not None for gradient in gradients]
        if is_part:
            numbers = numbers + (self._nothing_yet(len(numbers)) if so_far is None else so_far)
        del loss, gradients, flat, so_far
        each.zero_grad(set_to_none=True)  # now, or the program would give each gradient a second time
        self._keep_whole(numbers)  # summed over the cores
        torch_xla.sync()
        return numbers, has_gradient

    def _nothing_yet(self, length: int) -> torch.Tensor:
        """Zeros that lie on the TPU: made within the first part's program, they would make it another than the rest."""
        if self._zeros is None or len(self._zeros) != length:
            import torch_xla.core.xla_model as xla

            (self._zeros,) = xla.send_cpu_data_to_device([torch.zeros(length)], self._device)
            self._keep_whole(self._zeros)
        return self._zeros

    def _keep_whole(self, numbers: torch.Tensor) -> None:
        if self._mesh is not None:
            from torch_xla.distributed.spmd import mark_sharding

            mark_sharding(numbers, self._mesh, (None,))

    def _autocast(self):
        return torch.autocast("xla", dtype=torch.bfloat16) if self._precision == "bf16" else nullcontext()


def parts_of(rows: int, fits: int | None, cores: int) -> int:
    """The fewest equal parts of a microbatch of which each fits.

    :param fits: rows that a core has room for; None: any number
    :param cores: rows that they do not divide are whole on each of them
    """
    if fits is None:
        return 1
    return next(
        parts for parts in range(1, rows + 1) if rows % parts == 0 and _on_a_core(rows // parts, cores) <= max(1, fits)
    )


def _on_a_core(rows: int, cores: int) -> int:
    return rows // cores if rows % cores == 0 else rows


def _without_gradients(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model; deepcopy alone would copy its gradients along."""
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    twin = copy.deepcopy(model)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    return twin


def require_torch_xla() -> None:
    """Raises MissingTorchXla unless a torch_xla of this PyTorch's version is installed. Imports nothing."""
    wanted = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    try:
        found = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is not None and found.split(".")[:2] == wanted.split("."):
        return
    what = "is not installed" if found is None else f"is here as {found}, which belongs to another PyTorch"
    raise MissingTorchXla(
        f"A TPU trains through torch_xla, which {what} (PyTorch is {torch.__version__}).\n"
        f"  1. Install the one that belongs to it, then start again: pip install 'torch_xla[tpu]=={wanted}.*'\n"
        "  2. If there is none for this PyTorch yet, take an older one of both: "
        "pip install torch==2.9.0 'torch_xla[tpu]==2.9.0'\n"
        "  3. Or choose a machine with a GPU, or without any accelerator."
    )


def compilations() -> int:
    """Programs that this process has compiled for the TPU: 0 before the first microbatch; constant after warm-up."""
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value("UncachedCompile") or 0


def computed_elsewhere() -> list[str]:
    """Operations that torch_xla cannot compile and ran on the CPU, each with a wait for the TPU; [] is right."""
    import torch_xla.debug.metrics as metrics

    reading_a_number = "aten::_local_scalar_dense"
    return [name for name in metrics.executed_fallback_ops() if name != reading_a_number]
