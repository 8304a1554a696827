"""A fine-tune that a host has opened: joined from Python with one's own data, through a transformers Trainer.

    trainer = swarm_trainer("https://HOST/run.yaml", train_dataset=data, args=TrainingArguments("out"))
    trainer.train()

What every peer must share is the run file's: model and adapters, optimizer and its schedule, target_batch_size, how
gradients are averaged. Batch size, precision, quantization of the base and data are each machine's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from volunteer_kit import output
from volunteer_kit.model.transformers_model import Quantization, build_transformers
from volunteer_kit.optim.recipe import parameter_names
from volunteer_kit.run_optimizers import build_step_bound
from volunteer_kit.runs import FineTuneConfig, RunConfig, RunError, build_model, build_optimizer, build_param_groups
from volunteer_kit.runs import load_run as _load_run
from volunteer_kit.session.membership import Membership
from volunteer_kit.session.node import speeds_among
from volunteer_kit.session.node_parts import codec_of
from volunteer_kit.session.options import swarm_options
from volunteer_kit.session.trust import judge_by
from volunteer_kit.swarm.net.access.control import Admission
from volunteer_kit.swarm.net.peer import Peer, PeerConfig
from volunteer_kit.swarm.node.access import account_name
from volunteer_kit.swarm.node.member import NodeOptimizer
from volunteer_kit.swarm.node.talk import Admit
from volunteer_kit.swarm.records.peer_record import PeerBoard
from volunteer_kit.swarm.rounds.beside import buffer_shapes, initial_buffers
from volunteer_kit.training.hf_config import HivemindConfig, read_hivemind_config
from volunteer_kit.training.hf_gpu import see_one_gpu, use_one_gpu
from volunteer_kit.training.hf_nodes import NodeTerms
from volunteer_kit.training.hf_trainer import SwarmCallback, Trainer, TrainingArguments


def swarm_trainer(
    run: str | Path | FineTuneConfig,
    *,
    train_dataset: Any,
    args: TrainingArguments | None = None,
    model: torch.nn.Module | None = None,
    quantization: Quantization | None = None,
    trainer_class: type[Trainer] = Trainer,
    dht: Mapping[str, Any] | None = None,
    name: str | None = None,
    hf_token: str | None = None,
    allow_http: bool = False,
    **kwargs: Any,
) -> Trainer:
    """A Trainer that takes part in `run` while train() runs.

    :param run: a fine-tune's run file: path, address or Hub id
    :param args: of this machine; learning rate, schedule and clipping are the run's, and so is max_steps unless given
    :param model: the run's, already built; None: it is built, its base quantized as `quantization` says
    :param trainer_class: any Trainer's, TRL's SFTTrainer for instance
    :param dht: arguments of hivemind.DHT, as in hivemind_config; initial_peers are added to the run's
    :param name: shown to the others; None: the account's
    :param hf_token: of the Hub, where the run has an authority; None: the one of `hf auth login`
    :param allow_http: read a run from another machine by http://, where anybody on the way can change it
    :param kwargs: for the Trainer
    Raises RunError, SwarmError; OSError where the base cannot be had.
    """
    config = run if isinstance(run, RunConfig) else _load_run(run, allow_http=allow_http)
    if not isinstance(config, FineTuneConfig):
        raise RunError(
            f"The run {config.run_id!r} trains a text-to-image model, and no Trainer.\n"
            f"1. Join it with join_swarm(), or in a terminal: volunteer-kit join {config.run_id}"
        )
    index = see_one_gpu()
    args = args or TrainingArguments(output_dir=f"{config.run_id}-out")
    use_one_gpu(args, index)
    if args.max_steps <= 0:
        args.max_steps = config.optimizer.total_epochs
    args.max_grad_norm = 0.0  # the run's optimizer clips
    model = model or build_transformers(config.model, config.seed, quantization=quantization)
    _check_model(config, model)
    make_optimizer, make_schedule = build_optimizer(config)
    optimizer = make_optimizer(build_param_groups(config, model))
    trainer = trainer_class(
        model=model, args=args, train_dataset=train_dataset, optimizers=(optimizer, make_schedule(optimizer)), **kwargs
    )
    identity = Path(args.output_dir) / "swarm" / "identity.key"
    identity.parent.mkdir(parents=True, exist_ok=True)
    of_run = _of_run(config, dict(dht or {}), str(identity), name, hf_token)
    trainer.add_callback(SwarmCallback(trainer, replace(of_run, initial_buffers=initial_buffers(model))))
    return trainer


def _check_model(config: FineTuneConfig, model: torch.nn.Module) -> None:
    shared = build_model(config)
    theirs = {name: tuple(p.shape) for name, p in shared.named_parameters() if p.requires_grad}
    ours = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    theirs |= {name: tuple(shape) for name, shape in buffer_shapes(shared).items()}
    ours |= {name: tuple(shape) for name, shape in buffer_shapes(model).items()}
    if parameter_names(shared) != parameter_names(model) or theirs != ours:
        odd = next(iter(sorted(theirs.items() ^ ours.items())), ("their order", ()))[0]
        raise RunError(
            f"This model does not fit the run {config.run_id!r}: it differs in {odd!r} of {len(theirs)} shared "
            "tensors.\n1. Leave `model` out: it is built as the run file says.\n"
            "2. Or build it by volunteer_kit.model.transformers_model.build_transformers(run.model, run.seed)."
        )


def _of_run(
    config: FineTuneConfig, dht: dict[str, Any], identity: str, name: str | None, hf_token: str | None
) -> HivemindConfig:
    opt = {"run_id": config.run_id, "target_batch_size": config.target_batch_size}
    read = read_hivemind_config({"dht": {"identity_path": identity, **dht}, "opt": opt})
    known = list(dict.fromkeys([*read.peer.initial_peers, *config.initial_peers]))
    peer = replace(read.peer, initial_peers=known)
    token = None
    if config.authority is not None:
        from huggingface_hub import get_token

        token = hf_token or get_token()
    return HivemindConfig(
        config.run_id,
        peer,
        swarm_options(config),
        words=read.words,
        name=(name or os.environ.get("USER") or "trainer")[:64],
        max_staleness=config.swarm.max_staleness,
        codec=codec_of(config),
        longest=config.model.max_length,
        door=RunDoor(config, peer, token),
    )


class RunDoor:
    """The way into a run from a file, and what a member of it owes the others: training.hf_config.Door."""

    def __init__(self, run: FineTuneConfig, peer: PeerConfig, hf_token: str | None):
        self.run, self.fingerprint = run, run.fingerprint
        self._config, self._token = peer, hf_token
        self.membership: Membership | None = None
        self.stream = None  # no samples that all can read

    def ask(self) -> Admission:
        """Raises LoginError, AuthorityRefused, with the reason."""
        self.membership = Membership(self.run, self._config.identity_path, self._token, output.say)
        self.membership.ask(on_wait=lambda why, seconds: output.say(f"{why} It is asked again in {seconds:.0f} s."))
        return self.membership.admission

    def keep(self, peer: Peer) -> None:
        self.peer = peer
        self.membership.keep(peer)

    def node_terms(self, board: PeerBoard) -> NodeTerms:
        """Return the terms that the run's file and its authority set for a member's node."""
        admission = self.peer.admission
        return NodeTerms(
            rule=self.run.swarm.aggregation,
            account=account_name(admission.username_of(self.peer.peer_id) or ""),
            trust=admission.trust,
            admission=lambda: Admit(admission.own_token, admission.bans),
            judge=None if admission.is_open else judge_by(build_step_bound(self.run), None),
            username_of=admission.username_of,
            believe=None if admission.is_open else partial(speeds_among, self.run, board, admission),
        )

    def enter(self, optimizer: NodeOptimizer, board: PeerBoard) -> None:
        self.optimizer, self.board = optimizer, board
        optimizer.reach.ask_cause = self.membership.why_no_token
        self.membership.on_news = optimizer.tell_admission

    def emit(self, event: str, message: str = "", **fields: Any) -> None:
        if event == "warning":
            output.say(message)

    @property
    def why_sent_away(self) -> str | None:
        refused = self.membership is not None and self.membership.refused.is_set()
        return self.membership.why if refused else None

    def leave(self) -> None:
        if self.membership is not None:
            self.membership.close()
        self.membership = None
