"""A new run's file, made of a few answers: each has a default and is checked when it is given."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import yaml

from volunteer_kit.addressing import in_url, loopback
from volunteer_kit.host.settings import HostError, HostSettings, authority_url, require_help_url
from volunteer_kit.storage import part_folder, put_in_place

HUB_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
LOCAL = "http://127.0.0.1:8000"


class Recipe(NamedTuple):
    """A size of run that was tried; its lines go into the file as they are."""

    about: str
    model: str
    data_kind: str
    optimizer: str
    target_batch_size: int


RECIPES = {
    "tiny": Recipe(
        "generated scenes of 32x32 pixels; learns within minutes on two CPU cores",
        "model: tiny                # or the fields of your own, see volunteer_kit/model/dalle.py\n"
        "image_tokenizer: scenes32  # pictures to codes and back; ships with the kit\n"
        "text_tokenizer: words",
        "scenes",
        "  lr: 3.0e-2          # LAMB's: a share of each tensor's own norm\n"
        "  warmup_epochs: 10\n"
        "  total_epochs: 560   # an epoch is one step of the whole swarm; the run ends with the last one",
        256,
    ),
    "small": Recipe(
        "pictures of 64x64 pixels from shards; some hours on CPUs, minutes on a GPU",
        "model:\n"
        "  preset: tiny\n"
        "  dim: 96\n"
        "  heads: 3\n"
        "  text_seq_len: 24       # tokens of a caption\n"
        "  num_image_tokens: 512  # of the image tokenizer\n"
        "image_tokenizer: emoji64  # or one of your own: volunteer-kit train-tokenizer\n"
        "text_tokenizer: words",
        "shards",
        "  lr: 3.0e-2\n  warmup_epochs: 10\n  total_epochs: 2000",
        256,
    ),
    "original": Recipe(
        "the 125.9 M parameters of Training Transformers Together, on ready-made codes; weeks on many GPUs",
        "model:\n"
        "  preset: original\n"
        "image_tokenizer: vqgan-f8-8192  # only needed to encode and to draw\n"
        "text_tokenizer: hub:t5-small    # 32,100 words; the first use downloads it",
        "codes",
        "  lr: 2.5e-3\n"
        "  betas: [0.9, 0.96]\n"
        "  eps: 1.0e-6\n"
        "  weight_decay: 0.045\n"
        "  max_grad_norm: 4.0\n"
        "  clamp_value: 1.0e+4\n"
        "  warmup_epochs: 3125\n"
        "  total_epochs: 31250",
        4096,
    ),
}


@dataclass(frozen=True)
class Answers:
    """None: not answered, so the default.

    :param data: scenes; or where shards lie, "" for: each volunteer says it; or hub:ORG/DATASET
    :param who: open; an organization of the Hub; or names, with commas
    :param address: https://NAME of the authority; "" for this machine only
    """

    name: str | None = None
    model: str | None = None
    data: str | None = None
    who: str | None = None
    moderators: str | None = None
    address: str | None = None
    help_url: str | None = None


QUESTIONS = {
    "name": "Name of the run",
    "model": "Model (" + "; ".join(f"{name}: {recipe.about}" for name, recipe in RECIPES.items()) + ")",
    "data": "Data (scenes; path, pattern or URL of shards, empty: each volunteer says it; or hub:ORG/DATASET)",
    "who": "People to admit (open: everybody with an account at the Hub; an organization there; or names, with commas)",
    "moderators": "Moderators, who may ban (names at the Hub, with commas; yours first)",
    "address": "Address under which others reach this machine (https://NAME; empty: only this machine)",
    "help_url": "Where volunteers find you (https://..., may be empty)",
}


def default(question: str, answers: Answers) -> str:
    if question == "data":
        return "scenes" if RECIPES[answers.model or "tiny"].data_kind == "scenes" else ""
    return {"name": "my-run", "model": "tiny", "who": "open"}.get(question, "")


def check(question: str, answer: str, answers: Answers) -> None:
    """Raises HostError with what is wrong with it."""
    wrong = ""
    if question == "name" and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", answer):
        wrong = "letters, digits, dots, dashes; 64 at most"
    elif question == "model" and answer not in RECIPES:
        wrong = f"one of {', '.join(RECIPES)}"
    elif question == "data":
        wrong = _wrong_data(answer, answers)
    elif question in ("who", "moderators"):
        wrong = next((f"{n!r} is no name of the Hub" for n in _names(answer) if not re.fullmatch(HUB_NAME, n)), "")
    elif question == "address" and answer:
        authority_url(HostSettings(public_url=answer, behind_proxy=True))
    elif question == "help_url" and answer and not re.fullmatch(r"https://\S+", answer):
        wrong = "an address that begins with https://"
    elif question == "help_url":
        require_help_url(answer)
    if wrong:
        raise HostError(f"{QUESTIONS[question].partition(' (')[0]}: {answer!r} does not do: {wrong}.")


def _wrong_data(answer: str, answers: Answers) -> str:
    makes_own = RECIPES[answers.model or "tiny"].data_kind == "scenes"
    if makes_own and answer != "scenes":
        return "the tiny model draws its own scenes; choose the model small or original for data of yours"
    if not makes_own and answer == "scenes":
        return "scenes are for the tiny model; give a path, a URL, or nothing"
    if answer.startswith("hub:") and not re.fullmatch(rf"hub:{HUB_NAME}/{HUB_NAME}(@\S+)?", answer):
        return "write it as hub:ORGANIZATION/DATASET"
    if answer.startswith("hub:") and answers.model != "original":
        return "data sets of codes from the Hub are for the model original"
    return ""


def ask_all(given: Answers, ask: Callable[[str, str], str], say: Callable[[str], None]) -> Answers:
    """What was not given is asked, until the answer is good. `ask`: (question, default) -> answer."""
    answers = given
    for question, text in QUESTIONS.items():
        while (answer := getattr(answers, question)) is None:
            answer = ask(text, default(question, answers))
            try:
                check(question, answer, answers)
            except HostError as error:
                say(str(error))
                continue
            answers = replace(answers, **{question: answer})
    return answers


def write(out: Path, answers: Answers) -> list[str]:
    """Make the run's keys and write its file. :returns: what to do next. Raises HostError, KeysError, RunError."""
    from volunteer_kit.auth.access_token import KeyFolder
    from volunteer_kit.runs import load_run

    for field in fields(Answers):
        value = getattr(answers, field.name)
        answers = replace(answers, **{field.name: default(field.name, answers) if value is None else value})
        check(field.name, getattr(answers, field.name), answers)
    if answers.address:
        answers = replace(answers, address=authority_url(HostSettings(public_url=answers.address, behind_proxy=True)))
    if out.exists():
        raise HostError(f"{out} is there already.\n1. Write another one: volunteer-kit host init OTHER.yaml")
    folder = Path(f"{answers.name}-host")
    public_key = KeyFolder(folder / "keys").create(str(answers.name))
    out.parent.mkdir(parents=True, exist_ok=True)
    with part_folder(out) as part:
        (part / out.name).write_text(text_of(answers, public_key), encoding="utf-8")
        load_run(part / out.name)
        put_in_place(part / out.name, out)
    options = f" --public-url {answers.address} --behind-proxy" if answers.address else ""
    lines = [f"{out} is written, and the run's keys are in {folder / 'keys'}: keep a backup, show them to nobody."]
    if answers.address:
        name = in_url(urlsplit(answers.address).hostname or "")
        here = f"{in_url(loopback())}:8000"
        lines.append(f"For https, in another terminal: sudo caddy reverse-proxy --from {name} --to {here}")
    lines += [f"Next: volunteer-kit doctor {out}", f"Then: volunteer-kit host {out}{options}"]
    if answers.address:
        lines.append("For a link that opens the run's notebook in Colab: hf auth login, and add --push-to ORG/NAME")
    return lines


def text_of(answers: Answers, public_key: str) -> str:
    """The file. `answers`: complete and good."""
    recipe = RECIPES[str(answers.model)]
    parts = [
        f"# The run {answers.name}: what all of its volunteers share. Written by `volunteer-kit host init`.\n"
        "# Peers average with each other only if everything here is equal, but for addresses, authority and captions.",
        f"run_id: {_scalar(str(answers.name))}\n"
        f"description: {_scalar('A text-to-image model that volunteers train together.')}  # volunteers read it\n"
        "seed: 0  # of the first weights and of the order of the data",
        f"help_url: {_scalar(str(answers.help_url))}  # where volunteers find you" if answers.help_url else "",
        recipe.model,
        "captions:  # drawn while it trains, for volunteers to see; 8 at most\n"
        "  - a large red circle on the left of a grey background\n"
        "  - a small blue square in the centre of a white background\n"
        "  - a large green triangle at the top of a black background\n"
        "  - a small yellow circle at the bottom of a blue background",
        _data(recipe, str(answers.data)),
        f"optimizer:\n{recipe.optimizer}",
        f"target_batch_size: {recipe.target_batch_size}  # samples, of all volunteers together, that make one epoch",
        _swarm(recipe, is_local=not answers.address),
        _authority(answers, public_key),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _data(recipe: Recipe, data: str) -> str:
    if recipe.data_kind == "scenes":
        return "data:\n  kind: scenes  # drawn on the spot\n  level: 1      # 1: one object; 2: two objects"
    if data.startswith("hub:"):
        return f"data:\n  kind: hub\n  dataset: {_scalar(data.removeprefix('hub:'))}"
    written_by = "img2dataset" if recipe.data_kind == "shards" else "volunteer-kit encode"
    where = f"{_scalar(data)}" if data else "null  # every volunteer says where they are: --data"
    return (
        f"data:\n  kind: {recipe.data_kind}  # webdataset files as {written_by} writes them\n  shards: {where}\n"
        "  min_caption: 3            # characters\n  nsfw_allowed: [UNLIKELY]\n"
        "  max_aspect: 2.0           # longer side : shorter side of the original image"
    )


def _swarm(recipe: Recipe, is_local: bool) -> str:
    if is_local:
        return (
            "swarm:  # seconds; for one machine or a local network. Remove all of it for the internet\n"
            "  allreduce_timeout: 6\n  load_state_timeout: 60"
        )
    slow = recipe.data_kind == "codes"
    return (
        "swarm:  # seconds\n"
        f'  allreduce_timeout: {240 if slow else 60}    # raise it when peers report "received < 100 %"\n'
        "  aggregation: centered_clip  # who sends something else than the others moves the average by little\n\n"
        "verification:  # volunteers compute some of each other's samples again; who cheats is banned\n"
        "  share: 0.0625  # of all contributions; raise it for a run of fewer than ten volunteers"
    )


def _authority(answers: Answers, public_key: str) -> str:
    who = str(answers.who)
    names = _names(who)
    if who == "open":
        door = "  open: true  # everybody with an account at the Hub may join"
    elif "," in who:
        door = f"  users: [{', '.join(map(_scalar, names))}]  # who may join"
    else:
        door = f"  organization: {_scalar(who)}  # of the Hub; its members may join"
    moderators = _names(str(answers.moderators))
    judges = f"  moderators: [{', '.join(map(_scalar, moderators))}]  # may ban, and add people"
    return (
        "authority:  # lets people in, and removes who does harm; the host fills in where it is\n"
        f"  url: {_scalar(str(answers.address or LOCAL))}\n"
        f"  public_key: {public_key}\n{door}\n"
        + (judges if moderators else "  # moderators: [YOUR-NAME-AT-THE-HUB]  # nobody can ban as it is")
    )


def _names(text: str) -> list[str]:
    return [name for name in re.split(r"[,\s]+", text) if name]


def _scalar(text: str) -> str:
    return yaml.safe_dump(text, width=10_000).removesuffix("\n").removesuffix("\n...")
