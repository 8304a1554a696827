"""What everybody may see of a run: one dict of the monitor's journal, and three views of it.

A page that is live without reload, JSON (`/api/state`) and Prometheus (`/metrics`); `export_page` writes the page as
files that need no server. It reads the journal and the pictures, and nothing else of the host's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from volunteer_kit.dashboard.door import serve
    from volunteer_kit.dashboard.errors import DashboardError
    from volunteer_kit.dashboard.export import export_page

__all__ = ["DashboardError", "export_page", "serve"]
_HOMES = {"serve": "door", "export_page": "export", "DashboardError": "errors"}


def __getattr__(name: str) -> object:
    """fastapi and jinja2 are an extra: they are imported when the door is opened."""
    if name not in _HOMES:
        raise AttributeError(name)
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
