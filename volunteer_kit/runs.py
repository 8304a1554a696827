"""A run: what every peer must share, read from one YAML file, and the parts composed from it.

A run trains the kit's own text-to-image model, or is a fine-tune of a language model (FineTuneConfig).
`load_run("demo")` reads volunteer_kit/run_files/demo.yaml; a path works as well, and so does a Hub
repository, `org/name`, with a run.yaml. What each machine chooses for itself is the DevicePlan of device/. To read a
run brings no torch along: a host's authority, its dashboard and a volunteer's notebook do without.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from volunteer_kit.data.settings import DataConfig
from volunteer_kit.data.shards import expand_shards
from volunteer_kit.model.dalle_config import PRESETS, DalleConfig
from volunteer_kit.model.transformers_config import TransformersConfig
from volunteer_kit.optim.config import OptimizerConfig
from volunteer_kit.run_guarantees import why_not_verified
from volunteer_kit.run_origin import Origin
from volunteer_kit.run_reader import RunError, RunText, explain, find_run, impossible, origin_of, read_small, read_yaml
from volunteer_kit.run_restrictions import foreign_mistakes, require_room, restricted
from volunteer_kit.run_sections import AuthorityConfig, SwarmConfig, VerificationConfig
from volunteer_kit.run_sizes import least_mbps
from volunteer_kit.run_tokenizers import (
    build_stream_tokenizers,
    image_identity,
    needs_images,
    require_tokenizers,
    text_identity,
    tokenizer_mistakes,
)

if TYPE_CHECKING:
    import torch

    from volunteer_kit.data.stream import SampleStream

PROTOCOL_VERSION = 5  # raise it when peers of two releases can no longer average with each other

ORIGIN = "origin"  # the key of a run's origin in what one process of a machine gives to another

Caption = Annotated[str, Field(min_length=3, max_length=200)]


class RunConfig(BaseModel):
    """What every peer of a run shares. Peers average with each other only if their fingerprints are equal."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    run_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")  # the run's name: letters, digits, `_`, `.`, `-`
    description: str = Field("", max_length=2000)  # a sentence for volunteers
    seed: int = Field(0, ge=0, lt=2**63)  # seed of the initial weights and of the order of the data
    model: DalleConfig  # a preset's name, or its fields, with `preset: NAME` for those not given
    # Tokenizer of pictures: scenes32, emoji64, vqgan-f8-8192, or the path of a file of your own.
    image_tokenizer: str = Field(max_length=200)
    text_tokenizer: str = Field(max_length=200)  # tokenizer of captions: words, or hub:NAME for one of the Hub
    data: DataConfig  # where samples come from
    optimizer: OptimizerConfig  # LAMB and its schedule
    target_batch_size: int = Field(ge=1, le=2**24)  # samples, of all peers together, that make one epoch
    swarm: SwarmConfig = SwarmConfig()  # how peers average
    verification: VerificationConfig | None = None  # without this section no member's work is checked
    captions: tuple[Caption, ...] = Field((), max_length=8)  # drawn now and then, for volunteers to see
    help_url: str = Field("", max_length=500, pattern=r"^(https://\S+)?$")  # where volunteers find the host
    initial_peers: tuple[str, ...] = ()  # addresses of peers that are in the run; the host fills them in
    authority: AuthorityConfig | None = None  # who may join; may change during a run
    _origin: Origin = PrivateAttr(default_factory=Origin)  # no setting: a file cannot say it, and no dump holds it

    def __eq__(self, other: object) -> bool:
        """Whether their settings are equal, wherever each was read."""
        return type(self) is type(other) and dict(self) == dict(other)  # type: ignore[call-overload]

    __hash__ = None  # type: ignore[assignment]  # it holds lists

    @property
    def origin(self) -> Origin:
        """Where the file came from, which decides what it may name on this machine."""
        return self._origin

    def with_origin(self, origin: Origin) -> RunConfig:
        """The same run, with another origin."""
        copy = self.model_copy()
        copy._origin = origin
        return copy

    def dumped_for_worker(self) -> dict[str, Any]:
        """For another process of this machine, whose load_run() takes it: with the origin."""
        return {**self.model_dump(mode="json"), ORIGIN: self._origin.model_dump(mode="json")}

    @field_validator("model", mode="before")
    @classmethod
    def _preset(cls, value: Any) -> Any:
        if isinstance(value, DalleConfig):
            return value
        if value is not None and not isinstance(value, (str, dict)):
            return value  # pydantic says what is wrong with it
        fields: dict[Any, Any] = {"preset": value} if isinstance(value, str) else dict(value or {})
        name = fields.pop("preset", None)
        if name is None:
            return fields
        if not isinstance(name, str) or name not in PRESETS:
            known = ", ".join(sorted(PRESETS))
            fix = f"use one of {known}, or write its fields"
            raise impossible("", f"there is no model preset {name!r}", fix)
        return {**PRESETS[name].model_dump(), **fields}

    @field_validator("initial_peers")
    @classmethod
    def _multiaddrs(cls, peers: tuple[str, ...]) -> tuple[str, ...]:
        for peer in peers:
            if not peer.startswith("/") or "/p2p/" not in peer:
                fix = "write it as /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID"
                raise impossible("", f"{peer!r} is no peer address", fix)
        return peers

    @model_validator(mode="after")
    def _finite(self) -> RunConfig:
        path = _first_not_finite(self.model_dump())
        if path is not None:
            raise impossible(path, "the number is not finite", "write an ordinary number")
        return self

    @model_validator(mode="after")
    def _can_be_verified(self) -> RunConfig:
        if self.verification is None:
            return self
        for technique, is_used, fix in (
            ("fine-tunes with data of one's own", not self.draws, "leave verification out"),
            (
                "4 bit",
                bool({"uniform4", "blockwise4"} & {self.swarm.grad_compression, self.swarm.small_compression}),
                "set swarm: grad_compression: blockwise8 and small_compression: float16",
            ),
            (
                "top-k with error feedback",
                "sparse" in (self.swarm.grad_compression, self.swarm.small_compression),
                "set swarm: grad_compression: blockwise8 and small_compression: float16",
            ),
            ("PowerSGD", self.swarm.grad_compression == "powersgd", "set swarm: grad_compression: blockwise8"),
            ("outer optimizer (local steps)", self.swarm.local_steps is not None, "leave swarm: local_steps out"),
            ("uniform8", self.swarm.grad_compression == "uniform8", "set swarm: grad_compression: blockwise8"),
            (
                "aggregation: median, trimmed_mean, krum",
                self.swarm.aggregation not in ("mean", "centered_clip"),
                "set swarm: aggregation: centered_clip",
            ),
        ):
            if is_used:
                why = why_not_verified(technique)
                raise impossible("verification", f"it does not go with {technique}: {why}", fix)
        return self

    @property
    def draws(self) -> bool:
        """Is it a text-to-image model's? Else a language model's, whose members have data of their own."""
        return True

    @property
    def marks_unused(self) -> bool:
        """Do members tell each other which parameters they used, and average the model's buffers? The kit's own model
        uses all of them in each sample, and has no buffers that move."""
        return not self.draws

    @property
    def fingerprint(self) -> str:
        """32 hex digits of all that must be equal to average: no addresses, not where the data lie."""
        shared = {
            "protocol": PROTOCOL_VERSION,
            "seed": self.seed,
            "model": self.model.model_dump(mode="json"),
            "optimizer": self.optimizer.model_dump(mode="json"),
            "target_batch_size": self.target_batch_size,
            "swarm": self.swarm.model_dump(mode="json", include=_AVERAGING_FIELDS),
            "verification": self.verification.model_dump(mode="json") if self.verification else None,
            **self._samples(),
        }
        text = json.dumps(shared, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _samples(self) -> dict[str, Any]:
        return {
            "image_tokenizer": image_identity(self.image_tokenizer),
            "text_tokenizer": text_identity(self.text_tokenizer),
            "data": self.data.model_dump(mode="json", exclude=set(DataConfig.LOCAL)),
        }


class FineTuneConfig(RunConfig):
    """A run that fine-tunes a model of transformers. Its data are each peer's own, and its door is Python's:
    finetune.swarm_trainer. Authority, monitor and dashboard serve it as they serve the others."""

    # Overrides: captions, image_tokenizer, text_tokenizer

    model: TransformersConfig
    image_tokenizer: None = None
    text_tokenizer: None = None
    data: None = None
    captions: tuple[Caption, ...] = Field((), max_length=0)

    @field_validator("model", mode="before")
    @classmethod
    def _preset(cls, value: Any) -> Any:
        return value

    @model_validator(mode="after")
    def _steps_with_all(self) -> FineTuneConfig:
        if self.swarm.local_steps is not None:
            what = "a Trainer has one optimizer, which would be the outer one, of its plain gradients"
            raise impossible(("swarm", "local_steps"), what, "leave swarm: local_steps out")
        return self

    @property
    def draws(self) -> bool:
        return False

    def _samples(self) -> dict[str, Any]:
        return {"marks_unused": self.marks_unused}  # of kits that do not, rounds have other shapes


_AVERAGING_FIELDS = {
    "grad_compression", "small_compression", "compress_above", "delay_optimizer_step", "delay_grad_averaging",
    "aggregation", "grad_density", "grad_rank", "max_staleness", "local_steps",
}  # fmt: skip


def load_run(
    source: str | Path | dict[str, Any], *, allow_http: bool = False, allow_private_data: bool = False
) -> RunConfig:
    """A run by name ("demo"), by path of a YAML file, by address, by Hub id ("org/name"), or dumped (a WorkerSpec's).

    A run from a link or from the Hub reads its data from public addresses and the Hub only.

    :param allow_http: read a link's file from another machine by http:// too
    :param allow_private_data: let a run from a link read data from this machine's own network, too
    Raises RunError, whose message names file, line, reason and fix.
    """
    if isinstance(source, dict):
        values = dict(source)
        origin = Origin.model_validate(values.pop(ORIGIN, {}))
        run = RunText("the run that this process was given", values)
    else:
        path, origin = find_run(str(source), allow_http=allow_http)
        is_link = origin.kind == "link" and "://" in str(source)
        run = read_yaml(read_small(path), str(source)[:300] if is_link else str(path))
    if allow_private_data:
        origin = origin.model_copy(update={"allow_private_data": True})
    return checked(run, origin)


def checked(run: RunText, origin: Origin | None = None) -> RunConfig:
    """What a parsed file says. Raises RunError, with the lines of its mistakes.

    :param origin: where the file came from; None: as the path says
    """
    model = run.values.get("model")
    is_fine_tune = isinstance(model, dict) and bool({"transformers", "config"} & model.keys())
    kind = FineTuneConfig if is_fine_tune else RunConfig
    try:
        config = kind.model_validate(run.values)
    except ValidationError as error:
        raise explain(error, run, kind) from None
    config = config.with_origin(origin if origin is not None else origin_of(Path(run.source)))
    if config.origin.is_foreign:
        config = restricted(config)
        if mistakes := foreign_mistakes(config):
            raise run.error(mistakes)
    if not is_fine_tune and (mistakes := tokenizer_mistakes(config)):
        raise run.error(mistakes)
    return config


def with_data(config: RunConfig, shards: str | Sequence[str] | None) -> RunConfig:
    """The same run with this machine's shards; its fingerprint stays. RunError if it reads none."""
    if not shards:
        return config
    require_pictures(config)
    if config.data.kind not in ("shards", "codes"):
        its_own = "makes its own data" if config.data.kind == "scenes" else f"reads {config.data.dataset} from the Hub"
        raise RunError(
            f"The run {config.run_id!r} {its_own}: --data has no use in it.\n"
            "1. Leave --data out.\n2. Or choose a run that reads shards: --run emoji."
        )
    listed = shards if isinstance(shards, str) else list(shards)
    own = config.model_copy(update={"data": config.data.model_copy(update={"shards": listed})})
    return own.with_origin(config.origin.model_copy(update={"own_data": True}))


def require_data(config: RunConfig) -> None:
    """Raises RunError when the run reads shards and nobody said where they are."""
    require_pictures(config)
    if config.data.kind in ("shards", "codes") and not config.data.shards:
        what, by = ("image", "img2dataset") if config.data.kind == "shards" else ("code", "volunteer-kit encode")
        raise RunError(
            f"The run {config.run_id!r} trains on {what} shards, and its file does not say where they are.\n"
            f"1. Say it with --data: paths, pattern or URLs of webdataset shards as {by} writes them.\n"
            f"   volunteer-kit demo --run {config.run_id} --data 'PATH/{{00000..00003}}.tar'"
        )


def require_pictures(config: RunConfig) -> None:
    """Raises RunError for a run that is no text-to-image model's."""
    if not config.draws:
        raise RunError(
            f"The run {config.run_id!r} fine-tunes a language model, each peer on data of its own: it is joined from "
            "Python.\n1. from volunteer_kit import swarm_trainer\n"
            "   swarm_trainer(RUN, train_dataset=YOURS).train()\n"
            "2. A notebook shows it step by step: volunteer-kit notebook finetune_with_trainer"
        )


def require_ready(config: RunConfig, draws: bool = False, max_mbps: float | None = None) -> None:
    """Raises RunError or DataError when this machine cannot begin the run as it stands, before anything starts.
    `draws`: it will make pictures too, for which a run that reads codes needs more than for training. `max_mbps`: what
    its line may be used for."""
    require_pictures(config)
    if max_mbps is not None and max_mbps < (least := least_mbps(config)):
        raise RunError(
            f"max_mbps is {max_mbps:g}, and the run {config.run_id!r} needs {least:.2g}: gradients would take longer "
            f"than the {config.swarm.allreduce_timeout:g} s that the others wait for them.\n"
            f"1. Give {math.ceil(least)} or more, or leave it out.\n2. On a slower line, join a smaller run."
        )
    if draws or needs_images(config):
        require_tokenizers(config)
    require_data(config)
    require_room(config)
    if config.data.shards:
        expand_shards(config.data.shards, config.origin.addresses)


def run_key_of(config: RunConfig) -> str:
    """Prefix of the DHT's keys of this run and its settings."""
    return f"{config.run_id}-{config.fingerprint[:16]}".replace(".", "-")  # hivemind's keys may hold no dots


def build_model(config: RunConfig) -> torch.nn.Module:
    """The run's model, with the same initial weights on every machine; beside the adapters of a fine-tune its base has
    shapes only. Raises MissingDependency."""
    import torch

    if isinstance(config, FineTuneConfig):
        from volunteer_kit.model.transformers_model import build_transformers

        return build_transformers(config.model, config.seed, weights=False)
    from volunteer_kit.model.dalle import Dalle

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return Dalle(config.model)


def build_stream(
    config: RunConfig,
    *,
    peer_seed: int,
    data: str | Sequence[str] | None = None,
    device: torch.device | str = "cpu",
) -> SampleStream:
    """The run's samples as this peer reads them; `peer_seed` decorrelates peers, `data` names shards, `device`
    encodes images.

    Raises RunError if the run needs shards and none are named, the stream's DataError if they cannot be read.
    """
    from volunteer_kit.data.stream import open_stream

    config = with_data(config, data)
    require_data(config)
    tokenizers = build_stream_tokenizers(config, device)
    return open_stream(
        config.data,
        tokenizer=tokenizers.text,
        encode_images=tokenizers.encode_images,
        image_size=tokenizers.image_size,
        text_seq_len=config.model.text_seq_len,
        image_seq_len=config.model.image_seq_len,
        num_codes=config.model.num_image_tokens,
        image_tokenizer=image_identity(config.image_tokenizer),
        seed=config.seed,
        peer_seed=peer_seed,
        addresses=config.origin.addresses,
    )


def build_optimizer(config: RunConfig) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(params -> optimizer, optimizer -> learning rate schedule), as NodeOptimizer takes them: of what all peers
    hold. With local steps, the outer optimizer, whose rate stays."""
    if config.swarm.local_steps is None:
        from volunteer_kit.optim.recipe import build_optimizer_factory

        return build_optimizer_factory(config.optimizer)
    from volunteer_kit.run_optimizers import build_outer_optimizer

    return build_outer_optimizer(config.swarm.local_steps)


def build_param_groups(config: RunConfig, model: torch.nn.Module) -> list[dict[str, Any]]:
    """The model's parameters in groups: weight decay spares norms, biases and LayerScale."""
    from volunteer_kit.optim.recipe import param_groups

    return param_groups(model, config.optimizer.weight_decay)


def _first_not_finite(value: Any, path: tuple[str | int, ...] = ()) -> tuple[str | int, ...] | None:
    """The path of the first nan or infinity in nested dicts and lists, or None."""
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    return next((found for key, item in items if (found := _first_not_finite(item, (*path, key)))), None)
