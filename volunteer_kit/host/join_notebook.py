"""`join.ipynb` of one run: its link is filled in, and its first cell installs exactly the host's kit.

It is made of the kit's own join.ipynb, without the lines about the demo, a checkout, or other notebooks: a volunteer of
this run has none of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from volunteer_kit.host.settings import HostError
from volunteer_kit.ways_in import is_reachable
from volunteer_kit.widgets.words import plain

PACKAGE = Path(__file__).resolve().parents[1]
SOURCE = PACKAGE / "notebooks" / "join.ipynb"
INSTALL_CELL = Path(__file__).with_name("install_cell.py")
ELSEWHERE = re.compile(r"`demo`|\]\([\w-]+\.ipynb\)|\]\(https://colab\.|mybinder\.org|^\[?!\[|checkout", re.IGNORECASE)
TITLE = re.compile(r"^#\s*@title")
# A volunteer is not faced with code: Colab shows a title and a button, JupyterLab and Kaggle fold the cell.
FORM = {"cellView": "form", "jupyter": {"source_hidden": True}, "_kg_hide-input": True}
_MARKUP = str.maketrans({c: f"\\{c}" for c in "\\`*_{}[]<>#|!$"})
GPU = (
    "**First choose a GPU.** Colab: *Runtime*, *Change runtime type*, *T4 GPU* (this notebook asks for one by itself). "
    "Kaggle: *Settings*, *Accelerator*, *GPU T4 x2*, and *Turn on internet*. Without one it trains on the processor, "
    "slowly."
)
GPU_HERE = (
    "**First choose a GPU**, if a machine in this network has one: start Jupyter there. Platforms on the internet "
    "cannot reach this run. Without a GPU it trains on the processor, slowly."
)


def join_notebook(
    run_id: str, link: str, wheel_urls: Sequence[str], sha256: str, version: str, *, description: str = ""
) -> bytes:
    """The notebook as the bytes of its file; equal arguments give equal bytes.

    :param link: of the run, which `join_swarm` takes
    :param wheel_urls: where the kit's wheel is, in the order to try
    :param sha256: of the wheel, hexadecimal
    Raises HostError if the kit's own notebook or its install cell is not as expected.
    """
    notebook = json.loads(SOURCE.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    joining = [cell for cell in code if re.search(r"^RUN = ", "".join(cell["source"]), re.MULTILINE)]
    if len(code) < 2 or len(joining) != 1 or joining[0] is code[0]:
        raise HostError(f"{SOURCE} is not as expected: a cell that installs, and one later with a line `RUN = ...`.")
    first_words, *others = [cell for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    _write(first_words, _intro(run_id, link, description, _kept(first_words)))
    for cell in others:
        _write(cell, _kept(cell))
    _write(code[0], install_cell(wheel_urls, sha256, version))
    _write(joining[0], _joining("".join(joining[0]["source"]), link))
    for cell in code:
        cell["metadata"] = {**cell["metadata"], **FORM}
        cell["outputs"], cell["execution_count"] = [], None
    notebook["cells"] = [cell for cell in notebook["cells"] if _has_words(cell)]
    notebook["metadata"] |= {
        "accelerator": "GPU",
        "colab": {"name": f"{run_id}.ipynb", "gpuType": "T4", "provenance": []},
        "kaggle": {"accelerator": "nvidiaTeslaT4", "isGpuEnabled": True, "isInternetEnabled": True},
    }
    return (json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n").encode()


def install_cell(wheel_urls: Sequence[str], sha256: str, version: str) -> str:
    """The first cell's code: install_cell.py with its three placeholders filled in. Raises HostError."""
    text = INSTALL_CELL.read_text(encoding="utf-8")
    for name, value in (("WHEEL_URLS", list(wheel_urls)), ("SHA256", sha256), ("VERSION", version)):
        line = f"{name} = {json.dumps(value)}"
        text, found = re.subn(rf"^{name}\b[^=\n]*=.*$", lambda _, line=line: line, text, flags=re.MULTILINE)
        if found != 1:
            raise HostError(f"{INSTALL_CELL} has {found} lines `{name} = ...`; one was expected.")
    return text if TITLE.match(text) else f"# @title 1. Install\n{text}"


def _joining(code: str, link: str) -> str:
    code = re.sub(r"^RUN = .*$", lambda _: f"RUN = {json.dumps(link)}", code, flags=re.MULTILINE)
    return code if TITLE.match(code) else f"# @title 2. Join\n{code}"


def _intro(run_id: str, link: str, description: str, kept: str) -> str:
    about = f"{plain(description, 600).translate(_MARKUP)}\n\n" if description else ""
    return (
        f"# Train {plain(run_id, 64).translate(_MARKUP)} together\n\n{about}"
        f"The run's page, with its pictures and everybody who takes part: <{link}>\n\n"
        f"{GPU if is_reachable(link) else GPU_HERE}\n\n{kept}"
    )


def _kept(cell: dict[str, Any]) -> str:
    """A text's lines but for its headline and for those that are not about this run; a line is a paragraph or an item
    of a list."""
    lines = "".join(cell["source"]).splitlines()
    lines = [line for line in lines if not line.startswith("# ") and not ELSEWHERE.search(line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _has_words(cell: dict[str, Any]) -> bool:
    """Whether more than a headline is left."""
    lines = "".join(cell["source"]).splitlines()
    return cell["cell_type"] == "code" or any(line.strip() and not line.startswith("#") for line in lines)


def _write(cell: dict[str, Any], text: str) -> None:
    cell["source"] = text.splitlines(keepends=True)
