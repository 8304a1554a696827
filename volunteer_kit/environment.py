"""Every environment variable that the kit reads: one table, from which docs/environment.md is made.

tests/test_environment.py compares the table with the code: a variable that is read and not listed here is an error,
and so is one that is listed and never read.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Group = Literal["settings", "secrets", "libraries", "platforms", "development", "internal"]

GROUPS: dict[Group, str] = {
    "settings": "Settings that you may make",
    "secrets": "Secrets",
    "libraries": "Variables of the libraries underneath that matter here",
    "platforms": "Set by platforms, and read to recognize them",
    "development": "For tests and benchmarks",
    "internal": "Set by the kit for its own processes",
}


class Variable(NamedTuple):
    """One variable, or a family of them.

    :param name: a trailing `*` stands for any ending
    :param meaning: what it does, in one or two sentences; Markdown
    :param reader: who reads it
    """

    name: str
    meaning: str
    reader: str
    group: Group


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "VOLUNTEER_KIT_HOME",
        "Folder for everything that the kit keeps for you: identity, totals, tuned batch sizes, cached samples, "
        "converted tokenizers and run files from links. Default: `~/.cache/volunteer_kit`.",
        "every command",
        "settings",
    ),
    Variable(
        "VOLUNTEER_KIT_DATABASE",
        "Address of the authority's database, `postgresql://USER:PASSWORD@HOST/NAME`. Default: a SQLite file in the "
        "host's folder. Use the variable rather than `--database`: every account of a machine can list command lines.",
        "`host`, `authority`",
        "secrets",
    ),
    Variable(
        "HF_TOKEN",
        "Your token for the Hugging Face Hub. A volunteer's needs no rights; a host's must be able to write to the "
        "repository of `--push-to`. A worker gets it through a pipe, a host gives it to its monitor only, and no other "
        "process that the kit starts has it in its environment.",
        "`join`, `host`, `monitor`, `moderate`",
        "secrets",
    ),
    Variable("HUGGING_FACE_HUB_TOKEN", "An older name of `HF_TOKEN`.", "the same", "secrets"),
    Variable("HUGGINGFACE_TOKEN", "Another name of `HF_TOKEN`; the worker takes it too.", "`join`", "secrets"),
    Variable(
        "HF_TOKEN_PATH",
        "File with the token, in place of `HF_TOKEN`. With Docker, a mounted secret.",
        "huggingface_hub",
        "secrets",
    ),
    Variable(
        "HF_HOME",
        "Folder for downloads from the Hub and for the login. Default: `~/.cache/huggingface`.",
        "huggingface_hub, datasets",
        "libraries",
    ),
    Variable(
        "HF_ENDPOINT",
        "Address of the Hub, or of a mirror. `doctor` checks that it answers.",
        "huggingface_hub, `doctor`",
        "libraries",
    ),
    Variable(
        "CUDA_VISIBLE_DEVICES",
        "GPUs that a process may use. One Trainer peer uses one GPU; start one peer for each GPU.",
        "PyTorch",
        "libraries",
    ),
    Variable(
        "PJRT_DEVICE",
        "`TPU` or `CPU`: which device torch_xla takes. `CPU` leaves a TPU alone.",
        "torch_xla, `join`",
        "libraries",
    ),
    Variable(
        "OMP_NUM_THREADS",
        "Threads of each process for computation on the CPU. The monitor draws pictures with one thread.",
        "PyTorch",
        "libraries",
    ),
    Variable(
        "TMPDIR",
        "Folder for temporary files. Its path must be short (73 characters at most), because sockets lie below it.",
        "every command",
        "libraries",
    ),
    Variable(
        "REQUESTS_CA_BUNDLE",
        "File of certificates to trust, in a network that inspects https. `doctor` checks that it exists.",
        "requests, `doctor`",
        "libraries",
    ),
    Variable(
        "HTTPS_PROXY",
        "Proxy for reading data by https; `HTTP_PROXY` and `NO_PROXY` work as well. Names are looked up and checked "
        "before the proxy is asked.",
        "requests",
        "libraries",
    ),
    Variable(
        "NO_PROXY",
        "Hosts that are asked without a proxy. Where a proxy is named, the kit adds this machine's own addresses.",
        "requests, huggingface_hub",
        "libraries",
    ),
    Variable(
        "HIVEMIND_LOGLEVEL", "Level of hivemind's own log lines: `DEBUG` to `CRITICAL`.", "hivemind", "libraries"
    ),
    Variable("PYTHONPATH", "Passed on to processes that the kit starts, behind its own path.", "Python", "libraries"),
    Variable(
        "HOME",
        "The user's home folder. Where it is not set or cannot be written, and the user has none, the kit sets it for "
        "itself and its processes to the folder of `--home`, or `VOLUNTEER_KIT_HOME`.",
        "every command",
        "libraries",
    ),
    Variable(
        "LOGNAME", "The user's name. A user without one gets the user's number, for the kit's processes.",
        "every command", "libraries",
    ),
    Variable("USER", "A trainer's name, if it is given none.", "`swarm_trainer`", "libraries"),
    Variable("KAGGLE_*", "Kaggle sets several of these. Kaggle's image sets Colab's too, so it is asked first.",
             "`join`, the notebooks", "platforms"),
    Variable("COLAB_*", "Colab's release and, on older TPU runtimes, the TPU's address.", "`join`, the notebooks",
             "platforms"),
    Variable("BINDER_*", "Binder's server, which is for a short look at the demo.", "`join`", "platforms"),
    Variable("VSCODE_*", "VS Code, whose notebooks need another way to serve button clicks.", "the widgets",
             "platforms"),
    Variable("TPU_ACCELERATOR_TYPE", "Kind of TPU, such as `v5litepod-4`.", "`join`", "platforms"),
    Variable(
        "VOLUNTEER_KIT_EMOJI",
        "Folder of emoji shards. Tests and benchmarks that need them are skipped without it.",
        "tests, benchmarks",
        "development",
    ),
    Variable("VOLUNTEER_KIT_SCREENSHOTS", "Folder for the pictures that browser tests take.", "tests", "development"),
    Variable(
        "VOLUNTEER_KIT_OLDER",
        "Folder for packages of another time that tests use beside the installed ones. Default: the user's cache.",
        "tests",
        "development",
    ),
    Variable("VOLUNTEER_KIT_NODE_LOG", "How much a worker's node says in the log, as a level of `logging`: `DEBUG`.",
             "`join`, `demo`", "development"),
    Variable("VOLUNTEER_KIT_TPU_ENV", "Folder for the environment of `make test-tpu`.", "`.ci/test-tpu`",
             "development"),
    Variable("VOLUNTEER_KIT_WORKER", "Mark of a worker's processes, so that none outlives it.", "supervisor",
             "internal"),
    Variable("VOLUNTEER_KIT_FETCH", "Mark of the process that downloads.", "`fetch`", "internal"),
    Variable("VOLUNTEER_KIT_DEMO", "Mark of the demo's processes.", "`demo`", "internal"),
    Variable("VOLUNTEER_KIT_HOST", "Mark of all processes of one host's folder.", "`host`", "internal"),
    Variable("VOLUNTEER_KIT_PART", "Mark of one part of a host.", "`host`", "internal"),
)  # fmt: skip


def covers(name: str) -> bool:
    """Whether the table has this variable, by name or by family."""
    return any(
        name.startswith(row.name[:-1]) if row.name.endswith("*") else name == row.name for row in VARIABLES
    )  # fmt: skip


def as_markdown() -> str:
    """The table, a section for each group."""
    sections = []
    for group, title in GROUPS.items():
        rows = [row for row in VARIABLES if row.group == group]
        lines = [f"## {title}", "", "| variable | what it does | read by |", "|---|---|---|"]
        lines += [f"| `{row.name}` | {row.meaning} | {row.reader} |" for row in rows]
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"
