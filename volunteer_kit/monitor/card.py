"""The model card: what the model is, how and by whom it was trained, how to use it, and what it cannot do."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from volunteer_kit.monitor import fine_tune_card
from volunteer_kit.run_sizes import parameters_of
from volunteer_kit.runs import FineTuneConfig, RunConfig
from volunteer_kit.ways_in import ENVIRONMENT, Offer, install_line, is_reachable, ways_in
from volunteer_kit.widgets.words import plain

LEADERS = 50  # names on the card
CURVE = "loss.png"
HIDDEN = "a volunteer"
_SAFE = str.maketrans({c: f"\\{c}" for c in "\\`*_{}[]<>#|!"})


def model_card(
    config: RunConfig,
    repo: str,
    epoch: int | None,
    history: Sequence[Mapping[str, Any]],
    leaders: Sequence[Mapping[str, Any]],
    pictures: Sequence[tuple[str, str]] = (),
    now: float | None = None,
    offer: Offer | None = None,
) -> str:
    """README.md.

    :param epoch: of the checkpoint; None: there is none yet
    :param history: the journal's metrics, oldest first
    :param leaders: its leaderboard; `hidden` ones are counted and not named
    :param pictures: (caption, file in the repository)
    :param offer: what the run's host gives to those who want to join
    """
    parts = [
        _front(config),
        f"# {_text(config.run_id)}" + (f", step {epoch:,}" if epoch is not None else ""),
        _text(config.description),
        _what(config),
        _shown(pictures),
        _join(offer) if epoch is None or epoch < config.optimizer.total_epochs else "",
        _use(config, repo, offer) if epoch is not None else "",
        _how(config, epoch, history, now),
        _who(leaders),
        _limits(config),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


def _what(config: RunConfig) -> str:
    together = (
        "that volunteers trained together over the internet, with "
        "[hivemind](https://github.com/learning-at-home/hivemind) and volunteer-kit."
    )
    if isinstance(config, FineTuneConfig):
        return f"{fine_tune_card.what(config.model)} {together}"
    return (
        f"A text-to-image transformer {together} It reads a caption and writes image codes, one after another; an "
        "image tokenizer turns them into pixels."
    )


def _front(config: RunConfig) -> str:
    """What the Hub reads. No licence is claimed for others' data: the run's host adds what holds."""
    if isinstance(config, FineTuneConfig):
        return fine_tune_card.front(config.model)
    lines = ["---", "library_name: volunteer-kit", "pipeline_tag: text-to-image", "tags:", "- hivemind",
             "- collaborative-training"]  # fmt: skip
    if config.data.dataset:
        lines += ["datasets:", f"- {config.data.dataset.partition('@')[0]}"]
    return "\n".join([*lines, "---"])


def _shown(pictures: Sequence[tuple[str, str]]) -> str:
    if not pictures:
        return ""
    cells = [f"![{_text(caption)}]({path})<br>{_text(caption)}" for caption, path in pictures[:8]]
    rows = [cells[i : i + 4] for i in range(0, len(cells), 4)]
    width = len(rows[0])
    table = ["| " + " | ".join(row + [""] * (width - len(row))) + " |" for row in rows]
    return "\n".join([table[0], "|" + "---|" * width, *table[1:]])


def _join(offer: Offer | None) -> str:
    """For readers of the Hub: nothing of a run that only its own network can reach."""
    if offer is None or not is_reachable(offer.url):
        return ""
    parts = [f"## Take part\n\nThe training goes on, and you can join: <{offer.url}>"]
    for way in ways_in(offer):
        links = {"colab": "[Open the notebook in Colab]", "kaggle": "[join.ipynb]", "notebook": "[join.ipynb]"}
        link = f" {links[way.kind]}({way.link})" if way.kind in links else ""
        code = "\n\n" + _code("python" if way.kind == "trainer" else "bash", way.lines) if way.lines else ""
        parts.append(f"**{way.title}.** {way.note}{link}{code}")
    return "\n\n".join(parts)


def _code(language: str, lines: Sequence[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _use(config: RunConfig, repo: str, offer: Offer | None) -> str:
    if isinstance(config, FineTuneConfig):
        return fine_tune_card.use(config.model, repo)
    caption = config.captions[0] if config.captions else "a caption of yours"
    of_hub = offer.wheel_urls[1:] if offer is not None else []  # the host may be gone when the model is used
    install = [ENVIRONMENT, install_line(of_hub, offer.sha256), "volunteer-kit setup"] if offer and of_hub else []
    lines = [
        *install,
        f"hf download {repo} --local-dir model",
        f"volunteer-kit generate {shlex.quote(caption)} --run model/run.yaml --checkpoint model",
    ]
    before = "" if of_hub else "With volunteer-kit installed:\n\n"
    return (
        f"## How to draw with it\n\n{before}{_code('bash', lines)}\n\n"
        "`model.safetensors` has the weights and, under `optimizer/`, the optimizer's statistics, so that training can "
        "go on from it; `meta.json` says what it is of. Nothing in here is pickled."
    )


def _how(config: RunConfig, epoch: int | None, history: Sequence[Mapping[str, Any]], now: float | None) -> str:
    optimizer, day = config.optimizer, time.strftime("%Y-%m-%d (UTC)", time.gmtime(now))
    rows = [
        ("Parameters", f"{parameters_of(config):,}"),
        *(fine_tune_card.rows(config.model) if isinstance(config, FineTuneConfig) else _sizes(config)),
        ("Optimizer", f"LAMB, learning rate {optimizer.lr:g}, {optimizer.warmup_epochs:,} steps of warm-up"),
        ("Step", f"{config.target_batch_size:,} samples of all volunteers together"),
        ("Steps so far", f"{epoch or 0:,} of {optimizer.total_epochs:,}, on {day}"),
        ("Settings", f"fingerprint `{config.fingerprint}`; all of them are in `run.yaml`"),
    ]  # fmt: skip
    known = [row for row in history if row.get("loss") is not None]
    if known:
        rows.append(("Loss", f"{known[0]['loss']:.2f} at step {known[0]['epoch']:,}, {known[-1]['loss']:.2f} at step "
                             f"{known[-1]['epoch']:,}"))  # fmt: skip
    table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
    curve = f"![The loss over the steps]({CURVE})\n\n" if len(known) > 1 else ""
    return f"## How it was trained\n\n{table}\n\n{curve}### Data\n\n{_data(config)}"


def _sizes(config: RunConfig) -> list[tuple[str, str]]:
    model = config.model
    return [
        ("Layers", f"{model.depth}, {model.dim} wide, {model.heads} heads"),
        ("Caption", f"{model.text_seq_len} tokens ({_text(config.text_tokenizer)})"),
        ("Image", f"{model.image_fmap_size} × {model.image_fmap_size} codes of {model.num_image_tokens:,} "
                  f"({_text(config.image_tokenizer)})"),
    ]  # fmt: skip


def _data(config: RunConfig) -> str:
    if isinstance(config, FineTuneConfig):
        return fine_tune_card.DATA
    data = config.data
    if data.kind == "scenes":
        return "Coloured shapes with captions, drawn by volunteer-kit itself: nobody else has rights in them."
    filters = (
        f"Left out were captions of fewer than {data.min_caption} characters, images longer than {data.max_aspect:g} "
        "times their width"
        + (f", and all that is not marked {', '.join(data.nsfw_allowed)}." if data.nsfw_allowed else ".")
    )
    if data.dataset:
        name = data.dataset.partition("@")[0]
        return (
            f"[{name}](https://huggingface.co/datasets/{name}): its page says where the pictures come from and under "
            f"which licence. {filters}"
        )
    return f"Image shards of the run's host, who knows where they come from and under which licence. {filters}"


def _who(leaders: Sequence[Mapping[str, Any]]) -> str:
    total = sum(leader["samples"] for leader in leaders)
    if not total:
        return ""
    shown = [leader for leader in leaders if not leader.get("hidden")][:LEADERS]
    rows = [
        f"| {_text(leader['username'])} | {leader['samples']:,} | {leader['samples'] / total:.1%} | "
        f"{leader['seconds'] / 3600:,.1f} |"
        for leader in shown
    ]
    rest = len(leaders) - len(shown)
    more = f"\n\nand {rest:,} more." if rest else ""
    head = "| | samples | share | hours |\n|---|---|---|---|\n"
    return "## By whom\n\n" + (head + "\n".join(rows) + more if rows else f"{rest:,} volunteers.")


def _limits(config: RunConfig) -> str:
    is_fine_tune = isinstance(config, FineTuneConfig)
    text = fine_tune_card.LIMITS if is_fine_tune else (
        "It draws what its data showed, faults and prejudices too, and reads only the language of its captions. "
        "Numbers, places of things and writing in pictures are mostly wrong."
    )  # fmt: skip
    text += (
        " It was trained by strangers: states were signed, checked and rolled back where they were ruined, but nobody "
        "can promise that no volunteer has taught it something in secret. Judge "
        f"{'what it says' if is_fine_tune else 'its pictures'} before you show it to others."
    )
    help_line = f"\n\nThe run's host: <{config.help_url}>" if config.help_url else ""
    return f"## Limits\n\n{text}{help_line}"


def _text(value: object) -> str:
    """Strangers may have written it: one line, no markup, no links."""
    return plain(str(value), 600).replace("://", ":\u200b//").translate(_SAFE)


def draw_curve(history: Sequence[Mapping[str, Any]], path: Path, title: str) -> Path | None:
    """The loss over the steps, as a PNG; None while there is none."""
    points = [(row["epoch"], row["loss"]) for row in history if row.get("loss") is not None]
    if len(points) < 2:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([x for x, _ in points], [y for _, y in points], color="#2563a8", linewidth=1.8)
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_xlabel("step of the whole swarm")
    axes.set_ylabel("loss, median of the volunteers")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    return path
