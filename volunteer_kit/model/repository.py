"""A model of transformers from the Hub or a folder: looked through before transformers reads it.

transformers can run a repository's own code (`auto_map`), load compiled kernels from the Hub (an attention with a "/"
in its name, `kernel_config`, most quantization methods), follow an adapter to another base, and read files that a
configuration names. None of it is used here: what asks for it is refused, at the one commit that is loaded afterwards.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from volunteer_kit.http_client import blamed_on_proxy
from volunteer_kit.storage.places import expanded

HUB_ID = (
    r"(?!.*(\.\.|--))[A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})?"
    r"(@[A-Za-z0-9][A-Za-z0-9_./-]{0,99})?"
)
ADAPTER = "adapter_config.json"
KNOWN_NAMES = (
    "config.json", "generation_config.json", ADAPTER, "tokenizer_config.json", "processor_config.json",
    "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
MAX_JSON = 8 * 2**20  # bytes of a configuration; a tokenizer's with thousands of added tokens has one or two
MAX_DEPTH = 12  # levels of nesting
MAX_LAYERS = 1024  # layers, blocks and experts: each is built, even where it holds no numbers
MAX_NUMBER = 2**27  # of any other size; the longest context of a model so far is ten million

# Keys that make transformers load code, or files that the repository does not hold, if they hold anything.
REFUSED_KEYS = frozenset({
    "auto_map", "auto_mapping", "custom_pipelines", "custom_pipeline", "custom_generate", "trust_remote_code",
    "code_revision", "kernel_config", "kernels", "use_kernels", "hub_kernels", "fusion_config", "distributed_config",
    "transformers_weights", "base_model_name_or_path", "gguf_file", "device_map", "offload_folder", "cache_dir",
    "use_pretrained_backbone", "use_timm_backbone", "liger_kernel_config", "deepspeed", "local_files_only", "token",
})  # fmt: skip
ATTENTIONS = frozenset({"eager", "sdpa", "flex_attention"})
EXPERTS = frozenset({"eager", "batched_mm", "grouped_mm"})
DTYPES = frozenset({"auto", "float32", "float16", "bfloat16", "float64", "uint8", "int8"})
QUANTIZATIONS = frozenset({"bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit"})
LISTED = (
    (re.compile(r".*attn_implementation(_internal)?"), ATTENTIONS),
    (re.compile(r".*experts_implementation(_internal)?"), EXPERTS),
    (re.compile(r"(.*_)?dtype|bnb_4bit_quant_storage"), DTYPES),
    (re.compile(r"quant_method|quant_algo|quant_library"), QUANTIZATIONS),
)
LAYERS = re.compile(r"(.*_)?(n|num|number)_.*(layers?|blocks?|experts)|(.*_)?(layers|depth|depths|n_?layer)")


class ModelRefused(ValueError):
    """A model that would run code of others or read files of this machine; the message says what to do."""


class Place(NamedTuple):
    """Where a model is read: the arguments of from_pretrained."""

    pretrained_model_name_or_path: str
    revision: str | None = None  # of the Hub: a commit


def check_settings(values: Mapping[str, Any], source: str) -> None:
    """A model's configuration, as JSON values: it loads no code and names no files. Raises ModelRefused.

    :param source: what holds the values, for the message
    """
    for path, value in _walk(values):
        key = path[-1]
        name = ".".join(path)
        if key in REFUSED_KEYS and value not in (None, False, "", 0) and value != {} and value != []:
            raise _refused(source, name, "makes transformers load code or files from elsewhere")
        for pattern, known in LISTED:
            if pattern.fullmatch(key):
                unknown = next((word for word in _words(value) if word not in known), None)
                if unknown is not None:
                    raise _refused(source, name, f"is {unknown[:80]!r}, and may be {', '.join(sorted(known))}")
        if isinstance(value, int) and not isinstance(value, bool):
            most = MAX_LAYERS if LAYERS.fullmatch(key) else MAX_NUMBER
            if abs(value) > most and not re.search(r"token_id|seed", key):
                raise _refused(source, name, f"is {value}, more than {most}")


def look_through(name: str, *, weights: bool = True) -> Place:
    """A repository `org/name`, `org/name@REVISION`, or a folder, whose configurations have been checked; of the Hub, at
    the commit that was checked.

    :param weights: its weights are wanted, too: as safetensors, and there must be room for them
    Raises ModelRefused; OSError where it cannot be had.
    """
    if not re.fullmatch(HUB_ID, name):
        folder = expanded(name)
        if not folder.is_dir():
            raise ModelRefused(
                f"{name!r} is neither a folder nor a repository of the Hub.\n"
                "1. Write `org/name`, or a folder as ./FOLDER or /PATH/FOLDER."
            )
        for file in sorted(folder.glob("*.json")):
            if _is_about(file.name):
                _check_file(file, name)
        return Place(str(folder))
    repository, _, revision = name.partition("@")
    if Path(repository).exists():
        raise ModelRefused(
            f"There is a folder {repository} in {Path.cwd()}, which transformers would take for the Hub's repository.\n"
            f"1. If the folder is meant, write ./{repository}\n2. If not, start in another folder."
        )
    return Place(repository, _look_through_hub(repository, revision or None, weights))


def _look_through_hub(repository: str, revision: str | None, weights: bool) -> str | None:
    """:returns: the commit"""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        about = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=20)
    except Exception as error:
        if isinstance(error, (OfflineModeIsEnabled, ConnectionError)) or _is_network(error):
            return _look_through_cache(repository, revision, error)
        raise
    sizes = {file.rfilename: file.size or 0 for file in about.siblings or ()}
    for name in filter(_is_about, sizes):
        if sizes[name] > MAX_JSON:
            raise _refused(repository, name, f"has {sizes[name]} bytes, and a configuration at most {MAX_JSON}")
        _check_file(Path(hf_hub_download(repository, name, revision=about.sha)), repository)
    if weights:
        _require_weights(repository, sizes)
    return about.sha


def _look_through_cache(repository: str, revision: str | None, why: Exception) -> str | None:
    """What an earlier download has left here. Raises OSError if there is none.

    :param why: the Hub was not asked
    """
    from huggingface_hub import constants, hf_hub_download

    try:
        config = Path(hf_hub_download(repository, "config.json", revision=revision, local_files_only=True))
    except OSError:
        if trouble := blamed_on_proxy(constants.ENDPOINT, why):
            raise OSError(f"No copy of {repository} is here, and the Hub cannot be asked: {trouble}") from None
        raise
    for file in sorted(config.parent.glob("*.json")):
        if _is_about(file.name):
            _check_file(file, repository)
    return config.parent.name


def _require_weights(repository: str, sizes: Mapping[str, int]) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    if not set(WEIGHTS) & set(sizes):
        raise ModelRefused(
            f"The model {repository} has no weights in the safetensors format, and nothing else is read: a pickle can "
            "run code.\n1. Ask its owner to add model.safetensors.\n2. Or take another model."
        )
    needed = sum(size for name, size in sizes.items() if name.endswith(".safetensors") and "/" not in name)
    cache = Path(HF_HUB_CACHE)
    folder = next(folder for folder in (cache, *cache.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(folder).free
    is_here = any(cache.glob(f"models--{repository.replace('/', '--')}/snapshots/*/*.safetensors"))
    if needed > free and not is_here:
        raise ModelRefused(
            f"The model {repository} has {needed / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB left.\n"
            "1. Make room, or keep models elsewhere: export HF_HOME=FOLDER"
        )


def _is_about(name: str) -> bool:
    """Whether it is a configuration that transformers may read from a repository's root."""
    return "/" not in name and (name in KNOWN_NAMES or name.endswith("config.json"))


def _check_file(file: Path, source: str) -> None:
    if file.name == ADAPTER:
        raise _refused(source, file.name, "makes it an adapter, which names a base of its own; a run adds its adapters")
    try:
        if file.stat().st_size > MAX_JSON:
            raise ValueError("too large")
        values = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("no mapping")
    except (ValueError, RecursionError) as error:
        raise _refused(source, file.name, f"cannot be read ({str(error)[:80]})") from None
    check_settings(values, f"{source} ({file.name})")


def _walk(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each key of nested mappings with its value; a list's entries have the list's key."""
    if len(path) > MAX_DEPTH:
        raise ModelRefused(f"The model's settings are nested more than {MAX_DEPTH} levels deep.")
    if isinstance(values, Mapping):
        for key, value in values.items():
            inner = (*path, str(key)[:100])
            yield inner, value
            yield from _walk(value, inner)
    elif isinstance(values, (list, tuple)):
        for value in values:
            if isinstance(value, (Mapping, list, tuple)):
                yield from _walk(value, (*path, "-"))


def _words(value: Any) -> Iterator[str]:
    """The strings in a value: implementations may be given for each part of a model."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _words(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _words(inner)


def _refused(source: str, name: str, why: str) -> ModelRefused:
    return ModelRefused(
        f"The model in {source} was refused: {name} {why}. Code of others is never run here.\n"
        "1. Take a model that transformers supports itself, without code of its own.\n"
        "2. Or make a copy of the repository without that setting, and name the copy."
    )


def _is_network(error: BaseException) -> bool:
    """The Hub's client has changed its HTTP library twice; each has errors of its own."""
    if getattr(getattr(error, "response", None), "status_code", None) is not None:
        return False
    return type(error).__module__.split(".")[0] in (
        "httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3",
    )  # fmt: skip
