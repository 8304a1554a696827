"""Somebody's scripts of fine-tunes, run as they stand, one after another in one process, as in a notebook.

stdin: one JSON order a line: `script`, its text; `folder`, where it runs; `given`: whether it finds a model and a
dataset there already. stdout: what the scripts print, and JSON events: "met", when training begins, with the addresses
by which we hold the others; "step", of the swarm's; "done", with the Trainer's log, when what was trained, and
the buffers that are saved, are in trained.safetensors, in the folder; "failed".
"""

from __future__ import annotations

import json
import os
import traceback

import torch
from safetensors.torch import save_file

from benchmarks.trainer_parts.material import Sentences, tiny_llama
from volunteer_kit.training.hf_trainer import SwarmCallback
from volunteer_kit.worker import own_stdin


async def addresses_of_others(dht, node) -> list[str]:
    return [str(address) for info in await node.p2p.list_peers() for address in info.addrs]


def say(event: str, **fields) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def listen() -> None:
    """To all callbacks that are made from now on."""
    begin = SwarmCallback.on_train_begin

    def on_train_begin(callback, *args, **kwargs):
        begin(callback, *args, **kwargs)
        peer = callback.member.peer
        say("met", peer_id=str(peer.peer_id), addresses=peer.dht.run_coroutine(addresses_of_others))

    def on_report(callback, report):
        say("step", epoch=report.epoch, group_size=report.group_size)

    SwarmCallback.on_train_begin, SwarmCallback.on_report = on_train_begin, on_report


def run(script: str, folder: str, given: bool = False) -> None:
    os.chdir(folder)
    names = {"__name__": "__main__"}
    if given:
        names |= {"model": tiny_llama(), "dataset": Sentences(range(10, 10_250, 20))}  # all of one length
    exec(compile(script, "script.py", "exec"), names)
    trainer = names["trainer"]
    model = trainer.model
    saved = {name: p for name, p in model.named_parameters() if p.requires_grad}
    saved |= {name: b for name, b in model.named_buffers() if name in model.state_dict()}
    save_file({name: tensor.detach().clone() for name, tensor in saved.items()}, "trained.safetensors")
    say("done", log=trainer.state.log_history)


def main() -> None:
    torch.set_num_threads(1)
    listen()
    for line in own_stdin():
        try:
            run(**json.loads(line))
        except Exception:
            say("failed", why=traceback.format_exc())


if __name__ == "__main__":
    main()
