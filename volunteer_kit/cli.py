"""The command line: one verb a door. Doors are imported when they are opened, so that `--help` is quick."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from volunteer_kit import __version__, cli_dashboard, cli_host, cli_machine, cli_monitor, output, packages
from volunteer_kit.addressing import LISTEN
from volunteer_kit.cli_words import listed
from volunteer_kit.storage.places import adopt_home, keep_others_out
from volunteer_kit.widgets.words import plain_lines

app = typer.Typer(
    name="volunteer-kit",
    help="Train a text-to-image transformer together: volunteers over the internet, one swarm.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
MESSAGE = 20_000  # characters of one
_stderr = Console(stderr=True, highlight=False, soft_wrap=True)

Run = Annotated[
    str,
    typer.Argument(help="A run's name (demo, emoji), its link (its host's address), its file, or org/name."),
]
Data = Annotated[
    list[str] | None,
    typer.Option("--data", help="Shards of a run that reads shards: path, pattern or URL; may be repeated."),
]
Peers = Annotated[
    list[str] | None,
    typer.Option(help="Addresses of peers that are in the run; repeated, or with commas between them."),
]
HostMaddrs = Annotated[
    list[str] | None,
    typer.Option(help="Addresses to listen on; default: any free TCP port, by IPv4 and IPv6"),
]
AnnounceMaddrs = Annotated[
    list[str] | None,
    typer.Option(help="Addresses to tell others: the public ones of a machine behind a router."),
]
Identity = Annotated[
    Path | None,
    typer.Option(help="A file with this peer's key, made if it is not there: the same peer id every time."),
]


def explained(error: BaseException) -> str | None:
    """The text for a person, if this is an error that a person can do something about; None for a bug."""
    if type(error) is ModuleNotFoundError:
        return packages.explained(error)
    if type(error).__module__.startswith("volunteer_kit"):  # each exception of ours is a message
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
    return None


def _plain_errors(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Errors of ours become one message and exit code 2, of a missing package 78; anything else is a bug and keeps its
    traceback."""

    @functools.wraps(verb)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return verb(*args, **kwargs)
        except (typer.Exit, KeyboardInterrupt):
            raise
        except Exception as error:
            text = explained(error)
            if text is None:
                raise
            _complain(text)
            raise typer.Exit(packages.EXIT_CODE if isinstance(error, ImportError) else 2) from None

    return guarded


def _complain(text: str) -> None:
    """Strangers may have written some of it: no control characters reach the terminal."""
    _stderr.print(plain_lines(text, MESSAGE), style="red", markup=False)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"volunteer-kit {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the libraries' own log lines.")] = False,
) -> None:
    adopt_home(None)
    keep_others_out()
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING)


@app.command()
@_plain_errors
def demo(
    run: Annotated[str, typer.Option(help="demo, emoji, or the path of a run file.")] = "demo",
    data: Data = None,
    peers: Annotated[int, typer.Option(min=1, max=16, help="Volunteers that train.")] = 3,
    minutes: Annotated[float, typer.Option(min=0.1, max=600, help="Minutes of training.")] = 4.5,
    out: Annotated[Path | None, typer.Option(help="Folder for pictures, curve and summary.")] = None,
) -> None:
    """A whole swarm on this machine: volunteers train, one is killed, one comes late; pictures at the end."""
    packages.require("demo")  # here, too: the next line alone takes seconds
    from volunteer_kit.demo import run_demo

    result = run_demo(run=run, data=_one_or_many(data), peers=peers, minutes=minutes, out=out)
    raise typer.Exit(result.exit_code)


@app.command()
@_plain_errors
def join(
    run: Run,
    initial_peers: Peers = None,
    data: Data = None,
    allow_private_data: Annotated[
        bool,
        typer.Option("--allow-private-data", help="A run from a link may read data from your own network, too."),
    ] = False,
    allow_http: Annotated[
        bool,
        typer.Option("--allow-http", help="Read a run from another machine by http://, which others can change."),
    ] = False,
    accept_terms: Annotated[
        bool,
        typer.Option("--accept-terms", "--yes", "-y", help="You know the terms; they are shown all the same."),
    ] = False,
    max_hours: Annotated[float | None, typer.Option(min=0.001, help="Leave after so many hours.")] = None,
    max_mbps: Annotated[
        float | None, typer.Option(min=0.1, help="Mbit/s for model and gradients, each way; reading data comes on top.")
    ] = None,
    max_gb: Annotated[
        float | None,
        typer.Option(min=0.001, help="Leave after so many GB of model and gradients, both ways; data comes on top."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The name that others see beside your numbers.")] = None,
    hide_name: Annotated[
        bool, typer.Option("--hide-name/--show-name", help='Be "a volunteer" on the run\'s public page.')
    ] = False,
    client_mode: Annotated[
        bool | None,
        typer.Option("--client-mode/--no-client-mode", help="Others cannot connect here; default: found out."),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(help="Folder of identity and totals; another one makes a second volunteer of this machine."),
    ] = None,
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints; a restart goes on from there."),
    ] = None,
    host_maddrs: HostMaddrs = None,
    announce_maddrs: AnnounceMaddrs = None,
    identity_path: Identity = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples at once; default: measured.")] = None,
    new_swarm: Annotated[bool, typer.Option("--new-swarm", help="Start without other peers.")] = False,
) -> None:
    """Lend this machine to a run. Ctrl-C leaves in good order, a second one ends at once."""
    from volunteer_kit.volunteer import join_swarm

    result = join_swarm(
        run,
        max_hours=max_hours,
        max_mbps=max_mbps,
        max_gb=max_gb,
        client_mode="auto" if client_mode is None else client_mode,
        name=name,
        hide_name=hide_name,
        data=_one_or_many(data),
        allow_private_data=allow_private_data,
        allow_http=allow_http,
        initial_peers=listed(initial_peers),
        accept_terms=accept_terms,
        batch_size=batch_size,
        home=home,
        checkpoint_dir=checkpoint_dir,
        host_maddrs=listed(host_maddrs) or [*LISTEN],
        announce_maddrs=listed(announce_maddrs),
        identity_path=identity_path,
        new_swarm=new_swarm,
    )
    if result.error:
        _complain(result.error)
        raise typer.Exit(2)


@app.command()
@_plain_errors
def generate(
    captions: Annotated[list[str], typer.Argument(help="Captions to draw, each in quotes.")],
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint, or a folder of them: the newest good one.")],
    run: Annotated[str, typer.Option(help="The run that the checkpoint was trained in.")] = "demo",
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("out"),
    copies: Annotated[int, typer.Option(min=1, max=64, help="Pictures of each caption.")] = 1,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal pictures.")] = 0,
    temperature: Annotated[float, typer.Option(min=0, max=10, help="Lower is safer, higher is livelier.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Choose among so many likeliest codes.")] = None,
    cond_scale: Annotated[float, typer.Option(min=0, max=20, help="Above 1: closer to the caption.")] = 1.0,
) -> None:
    """Draw captions with a trained checkpoint."""
    packages.require("train")
    from volunteer_kit.generate import generate_images

    result = generate_images(
        captions, checkpoint=checkpoint, run=run, out=out, copies=copies, seed=seed,
        temperature=temperature, top_k=top_k, cond_scale=cond_scale,
    )  # fmt: skip
    print(f"{len(result.images)} pictures by the checkpoint of epoch {result.epoch}:")
    for path in [*result.paths, result.grid]:
        print(f"  {path}")


@app.command()
@_plain_errors
def convert(
    source: Annotated[
        Path,
        typer.Argument(help="A VQGAN's or dalle-pytorch's checkpoint, or a folder of the kit's checkpoints."),
    ],
    target: Annotated[str, typer.Argument(help="A file, a folder, or the name vqgan-f8-8192, to be written.")],
    run: Annotated[str | None, typer.Option(help="The run that a dalle-pytorch checkpoint is of.")] = None,
    config: Annotated[Path | None, typer.Option(help="A VQGAN's model.yaml, if it has sizes of its own.")] = None,
) -> None:
    """Make a published VQGAN or a dalle-pytorch checkpoint the kit's, or a checkpoint dalle-pytorch's."""
    packages.require("train")
    from volunteer_kit.convert import convert as door

    door(source, target, run=run, config=config)


@app.command()
@_plain_errors
def encode(
    shards: Annotated[list[str], typer.Argument(help="Image shards: paths, folders, patterns or URLs.")],
    out: Annotated[Path, typer.Argument(help="Folder for the code shards.")],
    run: Annotated[str, typer.Option(help="The run whose image tokenizer and filters are taken.")],
    workers: Annotated[int | None, typer.Option(min=1, max=256, help="Processes; default: one a core.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=256, help="Threads of each process; default: 1.")] = None,
) -> None:
    """Make code shards of image shards, once, so that training needs no encoder. Goes on where it was stopped."""
    packages.require("encode")
    from volunteer_kit.encode.door import encode as door

    result = door(shards, out, run=run, workers=workers, threads=threads, say=output.say)
    if result.interrupted:
        raise typer.Exit(130)


@app.command("train-tokenizer")
@_plain_errors
def train_tokenizer(
    out: Annotated[Path, typer.Argument(help="The file to write, NAME.safetensors.")],
    recipe: Annotated[str, typer.Option(help="As a shipped one was made: scenes32 or emoji64.")] = "scenes32",
    image_size: Annotated[int | None, typer.Option(min=8, max=512, help="Pixels a side.")] = None,
    fmap: Annotated[int | None, typer.Option(min=2, max=64, help="Codes a side.")] = None,
    num_codes: Annotated[int | None, typer.Option("--codes", min=2, max=65536, help="Different codes.")] = None,
    hidden: Annotated[int | None, typer.Option(min=4, max=1024, help="Width of the network.")] = None,
    decoder_blocks: Annotated[int | None, typer.Option(min=0, max=16, help="Depth of the decoder.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of one batch of images.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and images.")] = 0,
    data: Data = None,
) -> None:
    """Train an image tokenizer on generated scenes, and on shards with --data. Numbers not given are the recipe's."""
    packages.require("encode")
    from volunteer_kit import train_tokenizer as door
    from volunteer_kit.run_reader import RunError

    sizes = {
        "image_size": image_size, "fmap": fmap, "num_codes": num_codes, "hidden": hidden,
        "decoder_blocks": decoder_blocks,
    }  # fmt: skip
    given = {name: number for name, number in sizes.items() if number is not None}
    try:
        door.train_tokenizer(out, recipe, steps=steps, seed=seed, data=_one_or_many(data), **given)
    except ValueError as error:  # sizes that do not fit each other, an unknown recipe, shards without pictures
        raise RunError(f"No tokenizer was trained: {_first_reason(error)}.") from None


def _first_reason(error: ValueError) -> str:
    """The words of an error, without what pydantic puts around them."""
    details = getattr(error, "errors", None)
    return str(details()[0]["msg"]).removeprefix("Value error, ") if details else str(error)


def _one_or_many(values: list[str] | None) -> str | list[str] | None:
    return values[0] if values and len(values) == 1 else values or None


for _more in (cli_host, cli_machine, cli_monitor, cli_dashboard):
    _more.add_verbs(app, _plain_errors)


def main() -> None:
    """The console script."""
    output.keep_up()
    if any(name.lower().endswith("_proxy") for name in os.environ):
        from volunteer_kit.http_client import ask_loopback_directly

        ask_loopback_directly()
    app()


if __name__ == "__main__":
    main()
