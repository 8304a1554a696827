"""What a run file that somebody else wrote may ask of this machine: one rule for each field.

A run from a link or from the Hub reads public addresses and the Hub, never this machine's files; what it costs in
memory, disk and time has an upper bound. The fields in DataConfig.LOCAL are each machine's own choice, so that they are
lowered to their bound; of all others, which the run's peers share, a value above it is a mistake.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import psutil
from pydantic import BaseModel

from volunteer_kit.addressing import is_private_name
from volunteer_kit.data.addresses import AddressRefused, as_address, without_login
from volunteer_kit.data.errors import DataError
from volunteer_kit.data.settings import DataConfig
from volunteer_kit.data.shards import each_name, remote_places
from volunteer_kit.model.image_tokenizer_config import PUBLISHED, WEIGHTS
from volunteer_kit.model.repository import HUB_ID, ModelRefused, check_settings
from volunteer_kit.run_reader import KeyPath, Mistake, RunError
from volunteer_kit.run_sizes import parameters_of

if TYPE_CHECKING:
    from volunteer_kit.runs import RunConfig

MAX_PEERS = 64  # initial_peers
MAX_LAYER_IDS = 1024  # entries of a list about layers
BYTES_PER_PARAMETER = 16  # while training in fp32: the parameter, its gradient, and two statistics on the way

OWN_FILES = "a run from a link or from the Hub reads no files of this machine"
GIVE_DATA = "the host leaves it out; to train on files of your own, say so: --data FOLDER, or join_swarm(data=FOLDER)"

Check = Callable[["RunConfig", Any], str | None]  # what is wrong with a value, or None


class Rule(NamedTuple):
    """Of one field.

    :ivar why: what it is, in a word or two, for the documentation and for whoever adds a field
    :ivar most: a number above is lowered or refused
    :ivar check: says what is wrong with a value
    :ivar fix: of what `check` found
    """

    why: str
    most: float | None = None
    check: Check | None = None
    fix: str = "the host has to change it"


def _shards(config: RunConfig, value: Any) -> str | None:
    if value is None or config.origin.own_data:
        return None
    policy = config.origin.addresses
    seen: set[str] = set()
    try:
        for name in (name for pattern in ([value] if isinstance(value, str) else value) for name in each_name(pattern)):
            if not re.match(r"(https?|hf|s3|gs|gcs)://", name, re.IGNORECASE):
                return f"{OWN_FILES}, and {without_login(name)[:100]!r} is not an https address"
            if not re.match("http", name, re.IGNORECASE):
                (name,) = remote_places(name, policy)
            place = "/".join(name.split("/", 3)[:3])
            if place not in seen and not name.lower().startswith("hf:"):
                seen.add(place)
                policy.check_url(name)
    except (AddressRefused, DataError) as error:
        return f"{str(error).splitlines()[0].rstrip('.')}, and a run from a link reads from public addresses only"
    return None


def _nothing(config: RunConfig, value: Any) -> str | None:
    return None if value is None else "where this machine keeps its cache is not the host's choice"


def _image_tokenizer(config: RunConfig, value: Any) -> str | None:
    shipped = {path.stem for path in WEIGHTS.glob("*.safetensors")}
    if value is None or value in shipped | set(PUBLISHED):
        return None
    return f"{OWN_FILES}, and {value[:100]!r} is no image tokenizer that the kit knows"


def _text_tokenizer(config: RunConfig, value: Any) -> str | None:
    if value is None or value == "words" or re.fullmatch(f"hub:{HUB_ID}", value):
        return None
    return f"{OWN_FILES}, and {value[:100]!r} is neither `words` nor hub:NAME"


def _base_model(config: RunConfig, value: Any) -> str | None:
    if value is None or re.fullmatch(HUB_ID, value):
        return None
    return f"{OWN_FILES}, and {value[:100]!r} is not a repository of the Hub"


def _model_fields(config: RunConfig, value: Any) -> str | None:
    try:
        check_settings(value or {}, "the run file's model")
    except ModelRefused as error:
        return str(error).splitlines()[0].rstrip(".")
    return None


def _target_modules(config: RunConfig, value: Any) -> str | None:
    names = [value] if isinstance(value, str) else value
    if len(names) <= MAX_LAYER_IDS and all(re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", name) for name in names):
        return None
    return "the modules with adapters are not plain names, and a pattern can take for ever to match"


def _is_short(config: RunConfig, value: Any) -> str | None:
    return None if value is None or len(value) <= MAX_LAYER_IDS else f"it has {len(value)} entries"


def _peers(config: RunConfig, value: Any) -> str | None:
    if len(value) > MAX_PEERS:
        return f"it names {len(value)} peers, and {MAX_PEERS} are enough"
    protocols = "ip4|ip6|dns|dns4|dns6|dnsaddr|tcp|udp|quic|quic-v1|p2p|p2p-circuit|ws|wss|tls"
    form = rf"(/({protocols})(/[A-Za-z0-9_.:-]+)?){{2,16}}"
    bad = next((peer for peer in value if len(peer) > 300 or not re.fullmatch(form, peer)), None)
    return None if bad is None else f"{bad[:100]!r} is no address of a peer"


def _authority(config: RunConfig, value: Any) -> str | None:
    host = urlsplit(value).hostname or ""
    address = as_address(host)
    is_near = config.origin.endpoint is not None or config.origin.allow_private_data
    if is_near or not (is_private_name(host) if address is None else not address.is_global):
        return None
    return f"the authority {host} would be in this machine's own network, where the link does not lead"


SHARED = Rule("of the training, which all peers share; bounded where it is declared")
TEXT = Rule("shown as plain text; bounded by the size of a run file")
FILTER = Rule("which records are used")

RULES: dict[str, Rule] = {
    "run_id": Rule("a name of safe characters"),
    "description": TEXT,
    "seed": SHARED,
    "image_tokenizer": Rule("a name that the kit knows", check=_image_tokenizer),
    "text_tokenizer": Rule("`words` or the Hub's", check=_text_tokenizer),
    "target_batch_size": SHARED,
    "captions": TEXT,
    "help_url": TEXT,
    "initial_peers": Rule("addresses of peers", check=_peers),
    # the text-to-image model: memory, also checked as a whole by require_room
    "model.dim": Rule("memory", most=8192),
    "model.depth": Rule("memory", most=256),
    "model.heads": Rule("memory", most=128),
    "model.dim_head": Rule("memory", most=512),
    "model.ff_mult": Rule("memory", most=16),
    "model.text_seq_len": Rule("memory", most=2048),
    "model.num_text_tokens": Rule("memory", most=1_000_000),
    "model.image_fmap_size": Rule("memory", most=64),
    "model.num_image_tokens": Rule("memory", most=1_000_000),
    "model.attn_types": Rule("a list about layers", check=_is_short),
    "model.shared_attn_ids": Rule("a list about layers", check=_is_short),
    "model.shared_ff_ids": Rule("a list about layers", check=_is_short),
    "model.last_layer_conv_like": SHARED,
    "model.reversible": SHARED,
    "model.shift_tokens": SHARED,
    "model.rotary_emb": SHARED,
    "model.share_input_output_emb": SHARED,
    "model.loss_img_weight": SHARED,
    "model.padding": SHARED,
    # a model of transformers
    "model.transformers": Rule("a repository of the Hub", check=_base_model),
    "model.config": Rule("settings that load no code and no files", check=_model_fields),
    "model.max_length": SHARED,
    "model.lora.r": SHARED,
    "model.lora.alpha": SHARED,
    "model.lora.dropout": SHARED,
    "model.lora.target_modules": Rule("plain names", check=_target_modules),
    # data
    "data.kind": SHARED,
    "data.level": SHARED,
    "data.shards": Rule("public addresses; of stores without a login", check=_shards, fix=GIVE_DATA),
    "data.dataset": Rule("a repository of the Hub, by its pattern"),
    "data.subset": TEXT,
    "data.split": TEXT,
    **{f"data.columns.{name}": TEXT for name in (
        "caption", "code", "image", "nsfw", "width", "height", "similarity", "language",
    )},
    **{f"data.{name}": FILTER for name in (
        "min_caption", "nsfw_allowed", "max_aspect", "min_size", "min_similarity", "languages", "drop_duplicates",
    )},
    "data.range_length": Rule("memory", most=2**16),
    "data.cache_mb": Rule("memory", most=1024),
    "data.disk_cache_mb": Rule("disk; at most a share of what is free, too (sources.py)", most=10_240),
    "data.cache_dir": Rule("a folder of this machine", check=_nothing, fix="the host leaves it out"),
    "data.prefetch": Rule("memory", most=4096),
    "data.encode_batch": Rule("memory", most=256),
    "data.timeout": Rule("time", most=60),
    "data.retries": Rule("time", most=10),
    "data.patience": Rule("time", most=600),
    "data.max_member_mb": Rule("memory", most=128),
    # optimizer, swarm, verification: numbers with bounds of their own, names from lists
    **{f"optimizer.{name}": SHARED for name in (
        "lr", "betas", "eps", "weight_decay", "max_grad_norm", "clamp_value", "debias", "statistics_bits",
        "warmup_epochs", "total_epochs",
    )},
    **{f"swarm.{name}": SHARED for name in (
        "matchmaking_time", "allreduce_timeout", "averaging_timeout", "progress_expiration", "load_state_timeout",
        "average_state_every", "aggregation", "delay_optimizer_step", "delay_grad_averaging", "grad_compression",
        "state_compression", "small_compression", "grad_density", "grad_rank", "compress_above", "max_staleness",
    )},
    **{f"swarm.local_steps.{name}": SHARED for name in ("batch_size", "outer_lr", "outer_momentum")},
    **{f"verification.{name}": SHARED for name in ("share", "tolerance", "strikes", "window", "probation")},
    # who lets peers in
    "authority.url": Rule("https, or this machine where the link leads there", check=_authority),
    "authority.public_key": Rule("a key, by its pattern"),
    "authority.organization": Rule("a name, by its pattern"),
    "authority.users": Rule("names, by their pattern"),
    "authority.open": SHARED,
    "authority.moderators": Rule("names, by their pattern"),
    "authority.oauth_client_id": Rule("a name, by its pattern"),
}  # fmt: skip


def restricted(config: RunConfig) -> RunConfig:
    """A foreign run with the fields that are this machine's choice lowered to their bounds."""
    if config.data is None:
        return config
    lowered: dict[str, Any] = {}
    for name in DataConfig.LOCAL:
        value, most = getattr(config.data, name), RULES[f"data.{name}"].most
        if most is not None and value > most:
            lowered[name] = type(value)(most)
    return config.model_copy(update={"data": config.data.model_copy(update=lowered)}) if lowered else config


def foreign_mistakes(config: RunConfig) -> list[Mistake]:
    """What a run from a link or from the Hub may not say."""
    mistakes = []
    for path, value in _values(config):
        name = ".".join(map(str, path))
        rule = RULES[name]
        if rule.most is not None and value is not None and value > rule.most:
            what = f"{name} is {value:g}, and a run from a link may have at most {rule.most:g}"
            mistakes.append(Mistake(path, what, "the host lowers it"))
        elif rule.check is not None and (wrong := rule.check(config, value)) is not None:
            mistakes.append(Mistake(path, f"{name}: {wrong}", rule.fix))
    return mistakes


def require_room(config: RunConfig) -> None:
    """Raises RunError if the model of a foreign run cannot be trained in this machine's memory."""
    if not config.origin.is_foreign:
        return
    needed, has = parameters_of(config) * BYTES_PER_PARAMETER, psutil.virtual_memory().total
    if needed > has:
        raise RunError(
            f"The model of the run {config.run_id!r} needs about {needed / 1e9:.0f} GB of memory to be trained, and "
            f"this machine has {has / 1e9:.0f} GB.\n1. Join from a machine with more memory.\n"
            "2. Or join a smaller run: volunteer-kit join demo"
        )


def _values(config: RunConfig) -> Iterator[tuple[KeyPath, Any]]:
    """Each setting with its keys; sections that are left out have none."""

    def walk(section: BaseModel, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
        for name in type(section).model_fields:
            value = getattr(section, name)
            if isinstance(value, BaseModel):
                yield from walk(value, (*path, name))
            elif (*path, name) not in _SECTIONS:
                yield (*path, name), value

    return walk(config, ())


_SECTIONS: frozenset[KeyPath] = frozenset(
    {("model",), ("data",), ("optimizer",), ("swarm",), ("verification",), ("authority",)}
    | {("swarm", "local_steps"), ("model", "lora")}
)
