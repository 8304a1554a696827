"""What a person can do something about."""

from __future__ import annotations

import importlib


class DashboardError(OSError):
    """The dashboard cannot be served or written; the message says why and what to do."""


def require_server_extra() -> None:
    """Raises DashboardError if one of the packages that only a host needs is missing."""
    for package in ("fastapi", "uvicorn", "jinja2", "prometheus_client"):
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            raise DashboardError(
                f"The dashboard needs the package {package}, which is not installed.\n"
                "1. In a checkout: make install\n2. Elsewhere: python -m pip install 'volunteer-kit[server]'"
            ) from None
