"""Two peers fine-tune adapters over a base in 4 bits on one card (QLoRA), by the Trainer, and are equal at the end.

The base is a Llama of random weights: nothing can be downloaded where this runs. `python -m` of this module is a peer,
as trainer_parts/swarm.py starts it: settings on the first line of stdin, events on stdout.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu_parts.part import Setting, Tell, gigabytes_peak

WORDS = 512
LLAMA = {"hidden_size": 2048, "layers": 8, "heads": 16, "length": 512, "batch": 8}
TINY = {"hidden_size": 64, "layers": 2, "heads": 2, "length": 24, "batch": 4}
STEPS = {"cuda": 12, "cpu": 6}


class Counting(torch.utils.data.Dataset):
    """Rows that count up from a number of their own, in steps of 1 to 3."""

    def __init__(self, first: int, count: int, length: int):
        self.first, self.count, self.length = first, count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        row = self.first + place
        words = (row * 7 + (1 + row % 3) * torch.arange(self.length)) % WORDS  # (T,)
        return {"input_ids": words, "labels": words.clone(), "attention_mask": torch.ones_like(words)}


# --- a peer ---


def be_peer() -> None:
    settings = json.loads(sys.stdin.readline())
    plain = builtins.print

    def say(event: str, **fields) -> None:
        plain(json.dumps({"event": event, **fields}), flush=True)

    def printed(*words, **kwargs) -> None:
        for word in words:
            if "initial_peers = " in str(word):
                say("invitation", maddrs=ast.literal_eval(str(word).split(" = ", 1)[1]))
        plain(*words, **kwargs, file=sys.stderr)

    builtins.print = printed
    from safetensors.torch import save_file

    from volunteer_kit.model.transformers_model import LoraSettings, TransformersConfig, build_transformers
    from volunteer_kit.training.hf_trainer import SwarmTrainer, SwarmTrainingArguments

    config = TransformersConfig(transformers=settings["base"], lora=LoraSettings(r=16), max_length=settings["length"])
    model = build_transformers(config, 3, quantization="4bit" if settings["four_bits"] else None)
    on_card = settings["device"] == "cuda"
    arguments = SwarmTrainingArguments(
        settings["out"] + ".d",
        per_device_train_batch_size=settings["batch"],
        max_steps=settings["steps"],
        learning_rate=2e-3,
        optim="paged_adamw_8bit" if settings["four_bits"] else "adamw_torch",
        bf16=on_card,
        use_cpu=not on_card,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=on_card,
        hivemind_config={"dht": settings["dht"], "opt": settings["opt"]},
    )
    data = Counting(settings["first"], 4096, settings["length"])
    trainer = SwarmTrainer(model=model, args=arguments, train_dataset=data)
    began = time.monotonic()
    trainer.train()
    trained = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters() if p.requires_grad}
    save_file(trained, settings["out"])
    logs = [log for log in trainer.state.log_history if "loss" in log]
    say(
        "done", seconds=time.monotonic() - began, steps=trainer.state.global_step,
        peak_gb=gigabytes_peak(settings["device"]),
        losses=[log["loss"] for log in logs], groups=[log.get("group_size", 1) for log in logs],
        parameters=sum(p.numel() for p in trained.values()), device=str(next(model.parameters()).device),
        quantized=sum(type(p).__name__ == "Params4bit" for p in model.parameters()),
    )  # fmt: skip


# --- both ---


def measure(setting: Setting, tell: Tell) -> None:
    from benchmarks.trainer_parts.swarm import trained

    sizes = TINY if setting.tiny else LLAMA
    four_bits = importlib.util.find_spec("bitsandbytes") is not None
    base, count = save_base(setting.folder / "base", sizes)
    tell(base_parameters=count, four_bits=four_bits, **{key: sizes[key] for key in ("length", "batch")})
    opt = {
        "run_id": "qlora", "target_batch_size": 2 * sizes["batch"], "wait_for_peers": 2, "matchmaking_time": 3.0,
        "averaging_timeout": 30.0,
    }  # fmt: skip
    with trained(
        setting.folder, [{"first": 0}, {"first": 4096}], lambda _: {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"]},
        setting.left() - 5, module="benchmarks.gpu_parts.qlora", base=str(base), device=setting.device, opt=opt,
        four_bits=four_bits, steps=STEPS[setting.device], length=sizes["length"], batch=sizes["batch"],
    ) as peers:  # fmt: skip
        ends = [peer.said("done")[0] for peer in peers]
        one, other = (peer.parameters() for peer in peers)
    equal = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    last = ends[0]
    tell(
        parameters_equal=equal, parameters=last["parameters"], quantized_tensors=last["quantized"],
        steps=min(end["steps"] for end in ends), seconds_of_training=max(end["seconds"] for end in ends),
        loss_first=last["losses"][0], loss_last=last["losses"][-1], together=sum(size == 2 for size in last["groups"]),
        device=last["device"], peak_gb=last["peak_gb"],
    )  # fmt: skip
    memory = f"{last['peak_gb']:.2f} GB of the card each, " if last["peak_gb"] else ""
    tell.summary(
        f"{count / 1e6:.0f} M in {'4' if four_bits else '32'} bits, {last['parameters'] / 1e6:.2f} M trained, {memory}"
        f"{last['steps']} steps, loss {last['losses'][0]:.2f} to {last['losses'][-1]:.2f}, "
        f"{'equal' if equal else 'NOT EQUAL'}"
    )
    if not equal or (four_bits and not last["quantized"]):
        raise SystemExit("Their adapters are not equal, or the base is not in 4 bits.")


def save_base(folder: Path, sizes: dict[str, int]) -> tuple[Path, int]:
    """A Llama of random weights, as a run's host would have it on the Hub. -> (its folder, parameters)"""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden = sizes["hidden_size"]
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=hidden, intermediate_size=5 * hidden // 2, num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"], max_position_embeddings=sizes["length"],
    )  # fmt: skip
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder, model.num_parameters()


if __name__ == "__main__":
    be_peer()
