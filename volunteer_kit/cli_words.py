"""What the command line's rooms share: a verb that may be left out, and lists of addresses."""

from __future__ import annotations

import typer
from typer.core import TyperGroup


def group_for(default: str) -> type[TyperGroup]:
    """`host RUN.yaml` means `host start RUN.yaml`, where `default` is "start"."""

    class Group(TyperGroup):
        def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
            if args and args[0] not in self.commands and args[0] != "--help":
                args = [default, *args]
            return super().parse_args(ctx, args)

    return Group


def listed(values: list[str] | None) -> list[str]:
    """Addresses given with repeated options, commas or spaces."""
    return [part for value in values or [] for part in value.replace(",", " ").split()]
