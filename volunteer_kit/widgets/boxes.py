"""Boxes of ipywidgets in a notebook's page: shown once, replaced by HTML that stays, and closed."""

from __future__ import annotations

import contextlib
from typing import Any


class ShownBox:
    """A box in the output of the cell that runs now."""

    def __init__(self, box: Any) -> None:
        """`box` is an ipywidgets box of version 7 or 8.

        ipywidgets 7 displays itself and drops the display id, so that no later update finds the output. Its view is
        therefore sent here as the plain data that it is.
        """
        from IPython.display import display

        self._box = box
        view = {"text/plain": "", "application/vnd.jupyter.widget-view+json": box.get_view_spec()}
        self._handle = display(view, raw=True, display_id=True)

    def replace(self, html: str) -> None:
        """Put `html` in the box's place, where it is there when the notebook is opened again without a kernel, and
        close the box with everything in it, so that kernel and page keep nothing."""
        from IPython.display import HTML

        if self._handle is not None:
            self._handle.update(HTML(html))
        _close_all(self._box)


def _close_all(box: Any) -> None:
    """Layouts and styles are models too."""
    for child in getattr(box, "children", ()):
        _close_all(child)
    parts = [box, *(getattr(box, name, None) for name in ("layout", "style"))]
    for part in parts:
        if hasattr(part, "close"):
            with contextlib.suppress(Exception):  # the page may be gone
                part.close()
