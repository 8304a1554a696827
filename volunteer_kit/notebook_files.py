"""`volunteer-kit notebook NAME`: the kit's own notebooks, for those who have no checkout of it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from volunteer_kit import output
from volunteer_kit.storage.places import expanded

NOTEBOOKS = Path(__file__).parent / "notebooks"  # in a checkout a link to notebooks/


class NotebookError(OSError):
    """A notebook cannot be written; the message says why and what to do."""


def notebook_names() -> list[str]:
    """join, host_a_run, gallery, finetune_with_trainer."""
    return sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def write_notebook(name: str, out: str | Path | None = None, say: Callable[[str], None] = output.say) -> Path:
    """Copy a notebook of the kit, and never over another file.

    :param out: a file, or a folder; default: ./NAME.ipynb
    :returns: what was written. Raises NotebookError.
    """
    source = NOTEBOOKS / f"{name.removesuffix('.ipynb')}.ipynb"
    if source.stem not in notebook_names():
        raise NotebookError(f"The kit has no notebook {name!r}.\n1. Choose one of: {', '.join(notebook_names())}")
    target = expanded(out or source.name)
    target = target / source.name if target.is_dir() else target
    content = source.read_bytes()
    try:
        with target.open("xb") as file:
            file.write(content)
    except FileExistsError:
        if not target.is_file() or target.read_bytes() != content:
            raise NotebookError(
                f"There is another {target} already, and it may have changes of yours.\n"
                f"1. Choose another name: volunteer-kit notebook {source.stem} --out FILE"
            ) from None
    except OSError as error:
        raise NotebookError(
            f"{target} cannot be written: {error.strerror}.\n"
            f"1. Choose another place: volunteer-kit notebook {source.stem} --out FILE"
        ) from None
    say(f"Written: {target}")
    say(f"Open it in Jupyter (jupyter lab {shlex.quote(str(target))}), or upload it to Colab or Kaggle.")
    return target
