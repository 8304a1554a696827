"""volunteer_kit: a text-to-image transformer trained together, by volunteers, over the internet.

    from volunteer_kit import join_swarm, run_demo
    run_demo(minutes=4.5)                                # a whole swarm on this machine
    join_swarm("org/name")                               # lend this machine to a run
    SwarmTrainer(..., args=SwarmTrainingArguments(..., hivemind_config={...}))   # fine-tune with others

Exceptions, each with a message that says what happened and what to do:

    ValueError
      RunError               a run file that cannot be used: file, line, reason and fix
      ConvertError           a checkpoint of another program that cannot be converted
    PermissionError
      LoginError             who you are could not be shown, or you may not take part
    RuntimeError
      DemoError              a demo whose volunteers cannot go on
    OSError
      DataError              shards or captions that cannot be read
      CheckpointError        a checkpoint that is damaged, missing or cannot be written
      HostError              a run that cannot be hosted here as asked
      ImageTokenizerError    weights of an image tokenizer that cannot be used
      ConnectionError
        SwarmError           a swarm that cannot be joined or used
    ImportError
      MissingDependency      a package is not installed; the message is the line that installs it

Names are imported when they are first used: `import volunteer_kit` takes no time and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "run_demo": "demo",
    "join_swarm": "volunteer",
    "status": "volunteer",
    "Contribution": "volunteer",
    "host_run": "host",
    "HostError": "host",
    "generate_images": "generate",
    "load_run": "runs",
    "RunConfig": "runs",
    "build_model": "runs",
    "build_stream": "runs",
    "SwarmTrainer": "training.hf_trainer",
    "SwarmTrainingArguments": "training.hf_trainer",
    "SwarmCallback": "training.hf_trainer",
    "swarm_trainer": "finetune",
    "Supervisor": "supervisor",
    "RunError": "run_reader",
    "ConvertError": "convert",
    "DemoError": "demo",
    "DataError": "data.errors",
    "CheckpointError": "checkpoint",
    "ImageTokenizerError": "model.image_tokenizer",
    "SwarmError": "swarm.errors",
    "LoginError": "auth.login",
    "MissingDependency": "packages",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"volunteer_kit has no {name!r}; it has: {', '.join(sorted(_HOMES))}")
    try:
        home = import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        from volunteer_kit import packages

        if (text := packages.explained(error)) is None:
            raise
        raise packages.MissingDependency(text) from None
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
