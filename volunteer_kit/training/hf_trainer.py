"""`transformers.Trainer` over a swarm: one argument more, and what it calls a step is one of all peers together.

    trainer = SwarmTrainer(model=model, train_dataset=data, args=SwarmTrainingArguments(
        "out", max_steps=1000, hivemind_config={"dht": {}, "opt": {"run_id": "ours", "target_batch_size": 256}},
    ))

For a Trainer of another class (TRL's, or one's own): `trainer.add_callback(SwarmCallback(trainer, hivemind_config))`.

`global_step`, `max_steps`, warm-up, `logging_steps`, `eval_steps` and `save_steps` count the swarm's steps, of
target_batch_size samples each; `num_train_epochs` passes of all peers together over as much data as this one has.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from volunteer_kit import output, packages

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint, has_length
except ImportError as e:
    lacks = packages.lacking("finetune", strict=True)
    told = packages.in_words(lacks, ["finetune"]) if lacks else f"SwarmTrainer cannot be used: {e}"
    raise packages.MissingDependency(told) from e

from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net.children import broken
from volunteer_kit.swarm.options import StepReport
from volunteer_kit.training.hf_config import HivemindConfig, read_hivemind_config, read_json
from volunteer_kit.training.hf_data import OwnData, saved_state
from volunteer_kit.training.hf_examples import ExampleCounter
from volunteer_kit.training.hf_gpu import see_one_gpu, use_one_gpu
from volunteer_kit.training.hf_member import Member
from volunteer_kit.training.hf_optimizer import FirstRates

DATA_ORDERS = 2**20  # different ones for those who join
TRY_AGAIN = 10.0  # s between attempts to come back into a swarm
PASSING = ("dead_peers", "startup", "port_taken", "identity_taken", "clock")  # why one may fail, and the next may not


@dataclass
class SwarmTrainingArguments(TrainingArguments):
    """TrainingArguments, and whom to train with.

    :param hivemind_config: {"dht": arguments of hivemind.DHT, "opt": arguments of hivemind.Optimizer}; on a command
        line the same as JSON, or the path of a file with it

    Raises SwarmError for what is no JSON.
    """

    hivemind_config: dict | str | None = field(
        default=None, metadata={"help": 'The swarm: {"dht": {...}, "opt": {"run_id": ..., "target_batch_size": ...}}'}
    )

    def __post_init__(self):
        if isinstance(self.hivemind_config, str):
            self.hivemind_config = read_json(self.hivemind_config)
        index = see_one_gpu() if self.hivemind_config is not None and not self.use_cpu else None
        super().__post_init__()
        if self.hivemind_config is not None:
            use_one_gpu(self, index)

    def to_dict(self) -> dict[str, Any]:
        """For those who log it; compressions and other objects of the configuration by their names."""
        return super().to_dict() | {"hivemind_config": json.loads(json.dumps(self.hivemind_config, default=str))}


class SwarmTrainer(Trainer):
    """A Trainer whose steps are the swarm's. Without `hivemind_config` it is a plain Trainer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        config = getattr(self.args, "hivemind_config", None)
        if config is not None:
            self.add_callback(SwarmCallback(self, config))


class SwarmCallback(TrainerCallback):
    """Makes a Trainer a member of a swarm, from the beginning of train() to its end.

    Raises SwarmError for a configuration that cannot be.
    """

    def __init__(self, trainer: Trainer, hivemind_config: dict[str, Any] | HivemindConfig):
        is_read = isinstance(hivemind_config, HivemindConfig)
        self.config: HivemindConfig = hivemind_config if is_read else read_hivemind_config(hivemind_config)
        refuse_other_ways(trainer)
        self.trainer, self.member = trainer, None
        self._at_hand: tuple[int, float, Sequence[Hashable]] = (0, 0.0, ())  # of the gradients: samples, weight, names
        self._last_step = self._joined_at = 0  # of the swarm's steps
        self._steps = self._samples = 0  # of this peer, since train() began
        self._logged: tuple[int, float] = (0, 0.0)  # steps of this peer, and the sum of their losses, in the log so far
        self._data: OwnData | None = None
        self._examples: ExampleCounter | None = None
        self._held: list[list[torch.Tensor]] | None = None  # by an optimizer, with what is frozen
        self._before: Member | None = None  # that this peer was, while it comes back
        self._scratch: tempfile.TemporaryDirectory | None = None  # of an identity that nobody has named
        self._first: FirstRates | None = None  # of this train()
        self._saved: dict[str, Any] = {}  # the Trainer's state in the checkpoint that we go on from
        _wrap(trainer, "train", self._train)
        _wrap(trainer, "get_batch_samples", self._count)
        _wrap(trainer, "set_initial_training_values", self._set_out)
        _wrap(trainer, "_load_optimizer_and_scheduler", self._note_rates)
        _wrap(trainer, "evaluate", self._up_to_date)
        _wrap(trainer, "_save_checkpoint", self._of_one_moment)

    # --- what the Trainer asks itself ---

    def _train(self, original: Callable, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Whatever happens in it, this peer leaves the swarm at its end. Raises SwarmError (broken) when one of its
        processes has died."""
        last = resume_from_checkpoint is True and get_last_checkpoint(self.trainer.args.output_dir)
        self._saved = saved_state(last or resume_from_checkpoint)
        try:
            found = original(resume_from_checkpoint, *args, **kwargs)
            return found._replace(training_loss=found.metrics.get("train_loss", found.training_loss))
        except Exception as e:
            if self.member is not None and (why := self.member.why_broken) is not None:
                raise broken(why, self._how_to_resume()) from e
            raise
        finally:
            self._leave()
            if self._scratch is not None:
                self._scratch.cleanup()
                self._scratch = None
            if self._held is not None:
                for group, held in zip(self.trainer.optimizer.param_groups, self._held, strict=True):
                    group["params"] = held
                self._held = None

    def _how_to_resume(self) -> str:
        last = get_last_checkpoint(self.trainer.args.output_dir)
        resume = f"resume_from_checkpoint={last!r}" if last else ""
        return (
            "This peer has left the swarm; the others go on.\n"
            f"1. Start this program again, with: trainer.train({resume})\n"
            "2. Where it was killed for a lack of memory: close other programs, or use a smaller batch.\n"
            "3. If it happens again, report these lines."
        )

    def _count(self, original: Callable, iterator: Iterator, *args: Any, **kwargs: Any) -> tuple:
        """Examples of the next step of this peer, and what their loss is a mean over."""
        batches, items = found = original(self._examples.counted(self._data.iterator(iterator)), *args, **kwargs)
        if not batches:
            self._data.ended()
        samples = self._examples.take()
        self._samples += samples
        names = [name for batch in batches for name in self.names_of(batch)]
        self._at_hand = samples, self.member.weight_of(samples, None if items is None else float(items)), names
        return found

    def names_of(self, batch: Any) -> Sequence[Hashable]:
        """What the samples of a batch are called, in the reports of the steps that they enter. Seam; by default
        nothing."""
        return ()

    def on_report(self, report: StepReport) -> None:
        """Told of each of the swarm's steps that this peer took. Seam; by default nothing."""

    def _note_rates(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Before a checkpoint's are loaded."""
        self._first = FirstRates.of(self.trainer.lr_scheduler, self.trainer.optimizer)
        return original(*args, **kwargs)

    def _up_to_date(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """What is evaluated has the last step in it, and no half of one."""
        if self.member is not None:
            self.member.finish_updates()
        return original(*args, **kwargs)

    def _of_one_moment(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Model and statistics that are saved are of the last step, and nothing changes them meanwhile."""
        if self.member is None:
            return original(*args, **kwargs)
        self.member.finish_updates()
        with self.member.up_to_date():
            return original(*args, **kwargs)

    def _set_out(self, original: Callable, args: TrainingArguments, dataloader: Any, *rest: Any) -> tuple:
        """How long to train: by the swarm's steps, however often this peer goes through its data meanwhile."""
        self._leave()  # an attempt that ran out of memory
        self._leave_out_what_is_frozen()
        callbacks = self.trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(1, self)  # after the one that decides what is due, before those who tell it
        _, own_steps, *values, max_steps = original(args, dataloader, *rest)
        self._examples = ExampleCounter(self.trainer, dataloader)
        if args.max_steps <= 0:
            max_steps = max(1, math.ceil(args.num_train_epochs * self._steps_of_a_pass(args, dataloader, own_steps)))
        saved = {} if args.ignore_data_skip else self._saved
        self._data = OwnData(dataloader, own_steps, args.gradient_accumulation_steps, saved)
        return sys.maxsize, self._data.steps, *values, max_steps

    def _steps_of_a_pass(self, args: TrainingArguments, dataloader: Any, own_steps: int) -> int:
        """Steps of the swarm; as many as a plain Trainer takes whose whole batch is target_batch_size. All peers have
        the same number, whatever their batches."""
        size, target = self.trainer._train_batch_size, self.config.options.target_batch_size
        is_whole = size * args.gradient_accumulation_steps == target
        generated = self._examples.steps_of_generating(target)
        if generated is not None:
            return own_steps if is_whole else generated
        rows, examples = self.trainer.num_examples(dataloader), self._examples.of_a_pass()
        if examples == rows and args.dataloader_drop_last:
            return own_steps if is_whole else max(1, rows // target)
        return math.ceil(examples / target)

    def _leave_out_what_is_frozen(self) -> None:
        """An optimizer that was passed in may hold the whole model: torch's skip what has no gradient, and in the swarm
        all has one."""
        groups = getattr(self.trainer.optimizer, "param_groups", [])
        if self._held is None and any(not p.requires_grad for group in groups for p in group["params"]):
            self._held = [group["params"] for group in groups]
            for group in groups:
                group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]

    # --- what it tells ---

    def on_train_begin(self, args, state, control, model=None, train_dataloader=None, **_):
        self._refuse_a_batch_of_more_than_a_step(args)
        self._enter(self._with_identity(self.config), args, state, model, train_dataloader, self.trainer.optimizer)
        self._last_step = self._joined_at = state.global_step = self.member.epoch
        self._steps = self._samples = 0
        self._logged = 0, 0.0
        if self.config.peer.initial_peers:
            self._read_in_another_order(train_dataloader, args.seed)

    def _with_identity(self, config: HivemindConfig) -> HivemindConfig:
        """A peer that comes back is the one that was there, under an address that others have."""
        if config.peer.identity_path is not None:
            return config
        self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="volunteer-kit-")
        identity = os.path.join(self._scratch.name, "identity.key")
        return replace(config, peer=replace(config.peer, identity_path=identity))

    def _enter(
        self, config: HivemindConfig, args: TrainingArguments, state: Any, model: Any, dataloader: Any, wrapped: Any
    ) -> None:
        """Become a member, in the place of the Trainer's optimizer.

        :param wrapped: what accelerate has in that place
        """
        trainer, before = self.trainer, self._before
        shown = trainer.optimizer
        shown = shown.optimizer if isinstance(shown, AcceleratedOptimizer) else shown
        member = Member(
            config, model, shown, trainer.lr_scheduler, lambda: self._at_hand,
            max_grad_norm=args.max_grad_norm, max_steps=state.max_steps, epoch=state.global_step,
            schedule=_word(args.lr_scheduler_type), first=self._first, on_report=self.on_report,
            ends_pass=lambda: has_length(dataloader) and trainer.accelerator.gradient_state.end_of_dataloader,
        )  # fmt: skip
        if before is not None:
            member.go_on_from(before)
        member.start()
        self.member = member
        ours = AcceleratedOptimizer(member.step, device_placement=False, scaler=trainer.accelerator.scaler)
        own = trainer.accelerator._optimizers
        own[:] = [ours if one is wrapped else one for one in own] or [ours]
        trainer.optimizer = trainer.callback_handler.optimizer = ours
        self._clip = trainer.accelerator.clip_grad_norm_
        trainer.accelerator.clip_grad_norm_ = lambda *_, **__: member.clip.norm  # the swarm's gradient is clipped
        member.step.await_turn(trainer._train_batch_size * args.gradient_accumulation_steps)

    def _come_back(self, why: str, args: TrainingArguments, state: Any, model: Any, dataloader: Any) -> None:
        """Leave the swarm and enter it anew, in the middle of the training; as often as it takes. The samples that
        this peer had accumulated of a step are lost."""
        output.say(f"{why} This peer meets the others anew.")
        self.member.finish_updates()
        self.member.take_reports()
        state.global_step = self.member.epoch
        again, wrapped, self._before = self.member.config_once_more, self.trainer.optimizer, self.member
        configs = [again]
        if not self.config.peer.initial_peers:  # they may be gone, or call us again
            configs.append(replace(again, peer=replace(again.peer, initial_peers=[])))
        elsewhere = replace(again, peer=replace(again.peer, host_maddrs=self.config.peer.host_maddrs))
        if self.member.must_change_key:  # the others know another peer at the old address, and could not call this one
            configs = [elsewhere]
        else:
            configs.append(elsewhere)
        self.member.comes_back = True
        self._leave()
        try:
            for config in itertools.cycle(configs):
                try:
                    self._enter(config, args, state, model, dataloader, wrapped)
                    break
                except SwarmError as error:
                    if error.kind not in PASSING:
                        raise
                    output.say(f"{str(error).splitlines()[0]} It is tried again in {TRY_AGAIN:.0f} s.")
                    time.sleep(TRY_AGAIN)
        finally:
            self._before = None

    def _refuse_a_batch_of_more_than_a_step(self, args: TrainingArguments) -> None:
        size = self.trainer._train_batch_size  # with auto_find_batch_size it is not that of the arguments
        own = size * args.gradient_accumulation_steps
        target = self.config.options.target_batch_size
        if own > target:
            raise SwarmError(
                f"This peer's batch is {own} samples ({size} x {args.gradient_accumulation_steps} "
                f"accumulated), and target_batch_size of all peers together is {target}.\n"
                f"1. Set target_batch_size to {own} or more; the same on all peers.\n"
                "2. Or lower per_device_train_batch_size or gradient_accumulation_steps here.",
                kind="bad_config",
            )

    def _read_in_another_order(self, dataloader: Any, seed: int) -> None:
        """Those who join read other samples first than those who are there; whoever is alone is as a plain Trainer."""
        offset = 1 + int.from_bytes(self.member.peer.peer_id.to_bytes()[-4:], "big") % DATA_ORDERS
        torch.manual_seed(seed + offset)
        sampler = getattr(getattr(dataloader, "batch_sampler", None), "sampler", None)
        owner = sampler if hasattr(sampler, "set_epoch") else dataloader  # a resumed Trainer makes another loader
        if hasattr(owner, "set_epoch"):
            _wrap(owner, "set_epoch", lambda original, epoch: original(epoch + offset))

    def on_optimizer_step(self, args, state, control, **_):
        self._steps += 1
        state.global_step = self.member.epoch - 1  # the Trainer adds one
        self.trainer.optimizer._is_overflow = True  # the schedule goes by the swarm's steps, and is not the Trainer's

    def on_step_end(self, args, state, control, model=None, train_dataloader=None, **_):
        self.member.peer.processes.raise_if_broken()
        before, now = self._last_step, state.global_step
        self._last_step = now
        if (passes := self._data.passes(self._steps)) is not None:
            state.epoch = passes
        if now == before:
            control.should_log = control.should_evaluate = control.should_save = False
        elif now > before + 1:  # caught up with others
            control.should_log |= _is_due(args.logging_strategy, state.logging_steps, before, now)
            control.should_save |= _is_due(args.save_strategy, state.save_steps, before, now)
            if now > (args.eval_delay or 0):
                control.should_evaluate |= _is_due(args.eval_strategy, state.eval_steps, before, now)
        self.member.take_reports()
        if self.member.why_sent_away is not None:
            output.say(self.member.why_sent_away)
            control.should_training_stop = True
        elif not control.should_training_stop and (why := self.member.why_anew):
            self._come_back(why, args, state, model, train_dataloader)
        elif not control.should_training_stop and self.member.must_change_key:
            self._come_back(self.member.give_up_key(), args, state, model, train_dataloader)

    def on_epoch_end(self, args, state, control, **_):
        if control.should_training_stop:
            if state.global_step >= state.max_steps:
                self.member.settle()
            else:  # stopped early; the others go on
                self.member.finish_updates()
            self.member.take_reports()
            state.global_step = max(state.global_step, min(self.member.epoch, state.max_steps))

    def on_log(self, args, state, control, logs=None, **_):
        if self.member is None or logs is None:
            return
        shown: dict[str, float] = {}
        steps, total = self._steps, self.trainer._total_loss_scalar  # the Trainer divides this by the swarm's steps
        if "loss" in logs:
            shown = self.member.figures()
            logged_steps, logged = self._logged
            if steps > logged_steps:
                shown["loss"] = (total - logged) / (steps - logged_steps)
                self.member.loss = shown["loss"] if 0 <= shown["loss"] < math.inf else None
            self._logged = steps, total
        elif "train_loss" in logs and steps:
            seconds = max(logs["train_runtime"], 1e-3)
            shown = {
                "train_loss": total / steps,
                "train_samples_per_second": round(self._samples / seconds, 3),
                "train_steps_per_second": round((state.global_step - self._joined_at) / seconds, 3),
            }
        logs |= shown
        if state.log_history:
            state.log_history[-1] |= shown

    def on_train_end(self, args, state, control, **_):
        self.member.linger()
        self._leave()

    def _leave(self) -> None:
        member, self.member = self.member, None
        if member is not None:
            self.trainer.accelerator.clip_grad_norm_ = self._clip
            member.close()
            self.trainer.optimizer = self.trainer.callback_handler.optimizer = member.step.shown


def refuse_other_ways(trainer: Trainer) -> None:
    """Raises SwarmError where the Trainer is told to share the work in another way already; of several GPUs that it
    would spread batches over it uses one."""
    for name, is_asked in (("DeepSpeed", trainer.is_deepspeed_enabled), ("FSDP", trainer.is_fsdp_enabled)):
        if is_asked:
            raise SwarmError(
                f"{name} and hivemind_config are both asked for: each divides the training in its own way.\n"
                f"1. Leave {name} out of the arguments, or\n2. leave hivemind_config out.",
                kind="bad_config",
            )
    if trainer.args.world_size > 1:
        raise SwarmError(
            "A peer trains on one GPU, and a launcher (torchrun, accelerate launch) has started a process for each.\n"
            "1. Start one peer for each: CUDA_VISIBLE_DEVICES=0 python train.py, CUDA_VISIBLE_DEVICES=1 python ...\n"
            "2. From the second on, give them the first one's initial_peers.",
            kind="bad_config",
        )
    if use_one_gpu(trainer.args):
        trainer._train_batch_size = trainer.args.train_batch_size  # was for all of them


def _is_due(strategy: Any, every: int, before: int, now: int) -> bool:
    return _word(strategy) == "steps" and every > 0 and now // every > before // every


def _word(choice: Any) -> str:
    """Of an argument that transformers keeps as an enum."""
    return str(getattr(choice, "value", choice))


def _wrap(owner: Any, name: str, around: Callable) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))
