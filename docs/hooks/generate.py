"""Pages that are made while the site is built, from what they describe: nobody keeps them by hand.

run-file.md      the pydantic models of a run file, with the comments beside their fields
cli.md           the command line, as typer has it
environment.md   volunteer_kit/environment.py
api.md           the public names of volunteer_kit/__init__.py, for mkdocstrings
contributing.md, security.md, changelog.md: the files of the repository's root, with links that fit the site
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
import typing
from pathlib import Path
from types import UnionType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
FROM_ROOT = {"contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md", "changelog.md": "CHANGELOG.md"}
API = {  # heading: what stands under it, of volunteer_kit's public names
    "Lend a machine": ("join_swarm", "status", "Contribution", "Supervisor", "run_demo"),
    "Host": ("host_run", "HostError"),
    "Fine-tune": ("SwarmTrainer", "SwarmTrainingArguments", "SwarmCallback", "swarm_trainer"),
    "Runs": ("load_run", "RunConfig", "build_model", "build_stream", "generate_images"),
    "Errors": (
        "RunError", "LoginError", "SwarmError", "DataError", "CheckpointError", "ImageTokenizerError",
        "ConvertError", "DemoError", "MissingDependency",
    ),
}  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to the site's."""
    if str(ROOT) not in sys.path:  # the pages describe this checkout, whatever else is installed
        sys.path.insert(0, str(ROOT))
    from volunteer_kit.environment import as_markdown

    made = {
        "run-file.md": run_file_page(),
        "cli.md": cli_page(),
        "environment.md": ENVIRONMENT + as_markdown(),
        "api.md": api_page(),
        **{name: root_page(ROOT / source) for name, source in FROM_ROOT.items()},
    }
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links out of docs/ to files of the root lead to their pages."""
    for name, source in FROM_ROOT.items():
        markdown = markdown.replace(f"](../{source})", f"]({name})")
    return markdown


def root_page(path: Path) -> str:
    """A file of the root; its links to docs/ become links of the site."""
    text = path.read_text(encoding="utf-8").replace("](docs/", "](")
    for name, source in FROM_ROOT.items():
        text = text.replace(f"]({source})", f"]({name})")
    return text


# --- environment variables ---

ENVIRONMENT = """# Environment variables

Everything that the kit reads from the environment. This page is made from `volunteer_kit/environment.py`, and a test
compares that table with the code.

"""

# --- the run file ---

RUN_FILE = """# Run file

A run is one YAML file. It holds everything that all peers must share: model, data, optimizer, and how they average. The
*fingerprint* of these settings goes into every record, and peers with different fingerprints never average with each
other. A mistake in the file is reported with its line and its fix.

`volunteer-kit host init my-run.yaml` writes a commented file after a few questions. This page lists every setting. It
is made from the models that check the file.

```yaml
run_id: my-run
model: tiny
image_tokenizer: scenes32
text_tokenizer: words
data: {kind: scenes, level: 1}
optimizer: {lr: 3.0e-2, warmup_epochs: 10, total_epochs: 560}
target_batch_size: 256
```

The settings that do not enter the fingerprint may differ from machine to machine: addresses, `authority`, `captions`,
`description`, `help_url`, in `swarm` the settings in seconds, and in `data` where shards lie, caches, and time limits.

"""


def run_file_page() -> str:
    """Every setting of a run file: its type, its default, and what the source says of it."""
    from volunteer_kit import run_sections, runs
    from volunteer_kit.data.settings import Columns, DataConfig
    from volunteer_kit.model.dalle import PRESETS, DalleConfig
    from volunteer_kit.model.transformers_model import LoraSettings, TransformersConfig
    from volunteer_kit.optim.recipe import OptimizerConfig

    presets = ", ".join(f"`{name}`" for name in PRESETS)
    sections = [
        ("The file", "", runs.RunConfig),
        (
            "model",
            f"A preset's name ({presets}), or these fields, with `preset: NAME` for those not given.",
            DalleConfig,
        ),
        ("model, of a fine-tune", "A causal language model, in place of the section above.", TransformersConfig),
        ("model: lora", "Low-rank adapters, as peft makes them.", LoraSettings),
        ("data", "Where samples come from, and which of them are used.", DataConfig),
        ("data: columns", "Names of a table's columns, or of the keys in a record's json.", Columns),
        ("optimizer", "LAMB, and its schedule. An epoch is one optimizer step of the whole swarm.", OptimizerConfig),
        ("swarm", "How the peers average. Times are in seconds.", run_sections.SwarmConfig),
        (
            "swarm: local_steps",
            "Several steps of each peer between two rounds (DiLoCo).",
            run_sections.LocalStepsSection,
        ),
        ("verification", "Members compute parts of each other's work again.", run_sections.VerificationConfig),
        (
            "authority",
            "Access control. `volunteer-kit host` fills in `url` and `public_key`.",
            run_sections.AuthorityConfig,
        ),
    ]
    return RUN_FILE + "\n\n".join(_section(*section) for section in sections) + "\n"


def _section(title: str, about: str, model: type) -> str:
    comments = comments_of(model)
    rows = ["| setting | type | default | what it does |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else f"`{_value(field.get_default(call_default_factory=True))}`"
        bounds = _bounds(field.metadata)
        kind = f"`{_type(field.annotation)}`" + (f", {bounds}" if bounds else "")
        text = field.description or comments.get(name, "")
        rows.append(f"| `{name}` | {_cell(kind)} | {_cell(default)} | {_cell(text)} |")
    return f"## {title}\n\n{about}\n\n" + "\n".join(rows)


def comments_of(model: type) -> dict[str, str]:
    """Describe each field: the comment above it, the comment behind it, or its line in the class's docstring."""
    lines, first = inspect.getsourcelines(model)
    source = inspect.cleandoc("".join(lines)) if lines[0].startswith(" ") else "".join(lines)
    found: dict[int, str] = {}
    alone: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found[token.start[0]] = token.string.lstrip("# ").strip()
            if not token.line[: token.start[1]].strip():
                alone.add(token.start[0])
    texts = dict(re.findall(r":param (\w+): (.+?)(?=\n\s*:param|\Z)", model.__doc__ or "", re.S))
    texts = {name: text[:1].upper() + " ".join(text.split())[1:] for name, text in texts.items()}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above, line = [], node.lineno - 1
            while line in alone:
                above.insert(0, found[line])
                line -= 1
            beside = [found[line] for line in range(node.lineno, node.end_lineno + 1) if line in found]
            if above or beside:
                texts[node.target.id] = ". ".join(
                    part[:1].upper() + part[1:].rstrip(".") for part in (" ".join(above), " ".join(beside)) if part
                )
    return texts


def _type(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _type(typing.get_args(annotation)[0])
    if origin is typing.Literal:
        return " | ".join(str(value) for value in typing.get_args(annotation))
    if origin in (typing.Union, UnionType):
        kinds = [_type(part) for part in typing.get_args(annotation) if part is not type(None)]
        return " | ".join(dict.fromkeys(kinds))
    if origin in (tuple, list):
        inner = dict.fromkeys(_type(part) for part in typing.get_args(annotation) if part is not Ellipsis)
        return f"list of {', '.join(inner)}"
    if origin is dict:
        return "mapping"
    names = {"str": "text", "bool": "true | false", "int": "integer", "float": "number"}
    name = getattr(annotation, "__name__", str(annotation))
    return names.get(name, "section" if hasattr(annotation, "model_fields") else name)


def _bounds(metadata: list[Any]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = []
    for part in metadata:
        for name, sign in signs.items():
            value = getattr(part, name, None)
            if value is not None:
                found.append(f"{sign} {value:,}" if isinstance(value, int) and value < 2**53 else f"{sign} {value:g}")
    return ", ".join(found)


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_value, value))}]"
    if hasattr(type(value), "model_fields"):
        return "as below"
    return str(value) or '""'


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace(
        "|", "\\|"
    )  # fmt: skip


# --- the command line ---

CLI = """# Commands

`volunteer-kit --help` lists the commands, and `volunteer-kit COMMAND --help` the options of one. This page is made from
the same source. An error is one message with what to do, and exit code 2, or 78 for a missing package.

"""


def cli_page() -> str:
    """Every command with its arguments and options."""
    import typer

    from volunteer_kit.cli import app

    command = typer.main.get_command(app)
    parts: list[str] = []
    _command(command, "volunteer-kit", parts)
    return CLI + "\n\n".join(parts) + "\n"


def _command(command: Any, path: str, parts: list[str]) -> None:
    children = getattr(command, "commands", {})
    if " " in path:
        level = "##" if path.count(" ") == 1 else "###"
        parts.append(f"{level} {path.removeprefix('volunteer-kit ')}\n\n{_text(command.help)}")
        if not children:
            parts.append(_parameters(command, path))
    for name, child in children.items():
        if not getattr(child, "hidden", False):
            _command(child, f"{path} {name}", parts)


def _parameters(command: Any, path: str) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not getattr(p, "hidden", False)]
    usage = [path, *(_argument(p) for p in arguments), *(["[OPTIONS]"] if options else [])]
    lines = [f"```console\n{' '.join(usage)}\n```"]
    rows = [f"| `{p.name.upper()}` | {_help(p)} |" for p in arguments]
    rows += [f"| {', '.join(f'`{name}`' for name in [*p.opts, *p.secondary_opts])} | {_help(p)} |" for p in options]
    if rows:
        lines.append("\n".join(["| argument, option | meaning |", "|---|---|", *rows]))
    return "\n\n".join(lines)


def _argument(parameter: Any) -> str:
    name = parameter.name.upper() + ("..." if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def _help(parameter: Any) -> str:
    text = _cell(_text(parameter.help))
    default = getattr(parameter, "default", None)
    is_shown = isinstance(default, (int, float, str, Path)) and not isinstance(default, bool) and default != ""
    if is_shown and "default" not in text:
        text += f" Default: `{default}`."
    if getattr(parameter, "envvar", None):
        text += f" Environment: `{parameter.envvar}`."
    return text


def _text(text: str | None) -> str:
    return inspect.cleandoc(text or "").replace("<", "&lt;")


# --- Python ---

API_PAGE = """# Python

The names below are public: `from volunteer_kit import NAME`. A name is imported when it is first used, so that
`import volunteer_kit` takes no time and needs no torch.

Every exception of the kit has a message that says what happened and what to do:

| exception | base | meaning |
|---|---|---|
| `RunError` | `ValueError` | a run file that cannot be used: file, line, reason and fix |
| `ConvertError` | `ValueError` | a checkpoint of another program that cannot be converted |
| `LoginError` | `PermissionError` | a login that did not succeed, or an account that may not take part |
| `DemoError` | `RuntimeError` | a demo whose volunteers cannot go on |
| `DataError` | `OSError` | shards or captions that cannot be read |
| `CheckpointError` | `OSError` | a checkpoint that is damaged, missing, or cannot be written |
| `HostError` | `OSError` | a run that cannot be hosted here as asked |
| `ImageTokenizerError` | `OSError` | weights of an image tokenizer that cannot be used |
| `SwarmError` | `ConnectionError` | a swarm that cannot be joined or used |
| `MissingDependency` | `ImportError` | a package that is not installed, with the command that installs it |

"""


def api_page() -> str:
    """One entry of mkdocstrings for each public name. Raises ValueError for a name without a heading."""
    import volunteer_kit

    homes = volunteer_kit._HOMES
    listed = {name for names in API.values() for name in names}
    groups = {**API, "More": tuple(name for name in homes if name not in listed)}
    parts = []
    for title, names in groups.items():
        if names:
            parts.append(f"## {title}")
        for name in names:
            parts.append(f"::: volunteer_kit.{homes[name]}.{name}")
    return API_PAGE + "\n\n".join(parts) + "\n"
