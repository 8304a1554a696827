"""A process that computes gradients on PJRT's devices and compares them with the CPU's; one line of JSON a microbatch.

python -m tests.tpu.cores_child '[{"model": "demo", "batch_size": 16, "microbatches": 3, ...}, ...]'
"""

from __future__ import annotations

import contextlib
import json
import sys

import torch
import torch_xla

from volunteer_kit.data.stream import Batch
from volunteer_kit.model.dalle import Dalle, DalleConfig
from volunteer_kit.runs import build_model, load_run
from volunteer_kit.session.options import compute_loss
from volunteer_kit.training.tpu import TpuCores, compilations, computed_elsewhere

SMALL = dict(
    dim=32, depth=3, heads=2, dim_head=16, ff_mult=2, text_seq_len=6, num_text_tokens=20, image_fmap_size=4,
    num_image_tokens=11,
)  # fmt: skip
MODELS = {
    "demo": lambda: build_model(load_run("demo")),
    "small": lambda: Dalle(DalleConfig(**SMALL)),
    "as the original": lambda: Dalle(
        DalleConfig(
            **{**SMALL, "depth": 6}, attn_types=("axial_row", "axial_col", "axial_row", "axial_row"), reversible=True,
            shared_attn_ids=(0, 1, 2, 3), shared_ff_ids=(0, 1, 2, 3), last_layer_conv_like=True,
        )
    ),
}  # fmt: skip


def make_batch(config: DalleConfig, size: int, number: int) -> Batch:
    """Captions of all lengths, so that a shape that depends on them is found out."""
    generator = torch.Generator().manual_seed(number)
    text = torch.randint(1, config.num_text_tokens, (size, config.text_seq_len), generator=generator)
    lengths = torch.randint(1, config.text_seq_len + 1, (size, 1), generator=generator)
    lengths = lengths.clamp(max=1 + number)  # the first batches' longest caption is short
    text[torch.arange(config.text_seq_len) >= lengths] = 0
    codes = torch.randint(config.num_image_tokens, (size, config.image_seq_len), generator=generator)
    return Batch(text, codes, [], [], {}, None)


def run(case: dict) -> None:
    torch.manual_seed(0)
    model = MODELS[case["model"]]()
    model.checkpointing = case.get("checkpointing", False)
    cuts, breaks = [], []

    def watched_loss(each, batch):
        cuts.append(torch_xla._XLAC._get_xla_sharding_spec(batch.text))
        if breaks:
            compute_loss(each, batch).backward()
            raise RuntimeError(breaks.pop())
        return compute_loss(each, batch)

    options = {key: case[key] for key in ("cores", "programs", "fits") if key in case}
    cores = TpuCores(watched_loss, precision=case.get("precision", "fp32"), **options)
    for number in range(case["microbatches"]):
        batch = make_batch(model.config, case["batch_size"], number)
        model.zero_grad(set_to_none=True)
        if number == case.get("breaks_before"):
            breaks.append("RESOURCE_EXHAUSTED: so it is pretended")
            with contextlib.suppress(RuntimeError):
                cores(model, batch)
            assert all(parameter.grad is None for parameter in model.parameters())
        loss = cores(model, batch)
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
        expected_loss = compute_loss(model, batch)
        expected_loss.backward()
        errors = [gap(f, parameter.grad) for f, parameter in zip(found, model.parameters(), strict=True)]
        whole = gap(flat(found), flat([parameter.grad for parameter in model.parameters()]))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                parameter.sub_(gradient, alpha=0.05)  # in place, as the swarm's step does
        said = {
            "case": case["name"],
            "loss": abs(loss.item() / expected_loss.item() - 1),
            "gradients": whole,
            "worst_gradient": max(errors),
            "compilations": compilations(),
            "computed_elsewhere": computed_elsewhere(),
            "cut": cuts[-1],
            "on": {str(f.device) for f in found}.pop(),
        }
        print(json.dumps(said), flush=True)


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        run(case)
