"""The run file that volunteers get: the host's own, with the addresses and the key filled in, comments kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from volunteer_kit.run_reader import read_small, read_yaml
from volunteer_kit.runs import RunConfig, checked

OPEN = {"open": True}  # of a run whose file does not say who may join


def read_given(path: Path, url: str | None, public_key: str) -> tuple[str, RunConfig]:
    """The host's run file and what it says, as if the authority's address and key stood in it. Raises RunError with
    the lines of that file.

    :param url: None: the run has no authority
    """
    text = read_small(path)
    run = read_yaml(text, str(path))
    authority = run.values.pop("authority", None)
    if url is not None:
        given = authority if isinstance(authority, dict) else OPEN
        run.values["authority"] = {**given, "url": url, "public_key": public_key}
    return text, checked(run)


def filled_in(text: str, url: str, public_key: str, initial_peers: Sequence[str]) -> str:
    """A good run file's text with these in it; what else stands there stays, comments too."""
    wanted = yaml.safe_load(text)
    said = {"url": url, "public_key": public_key, **({} if wanted.get("authority") else OPEN)}
    wanted["authority"] = {**(wanted.get("authority") or {}), **said}
    wanted.pop("initial_peers", None)
    peers = ["initial_peers:  # written by the host", *(f"  - {peer}" for peer in initial_peers)]
    if initial_peers:
        wanted["initial_peers"] = list(initial_peers)
    try:
        changed = _set_authority(text, said)
        changed = _set_block(changed, "initial_peers", peers if initial_peers else [])
        if yaml.safe_load(changed) == wanted:
            return changed
    except (yaml.YAMLError, ValueError, IndexError):
        pass
    return yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True)  # all on one line, or written in braces


def _set_authority(text: str, values: dict[str, Any]) -> str:
    """In a section written line by line only these lines change; one in braces is written anew."""
    found = _entry(text, "authority")
    new = [f"  {key}: {_scalar(value)}  # written by the host" for key, value in values.items()]
    if found is None or not isinstance(found[2], yaml.MappingNode) or found[2].flow_style:
        kept = yaml.safe_load(text).get("authority") or {} if found else {}
        kept = {key: value for key, value in kept.items() if key not in values}
        dumped = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True).splitlines() if kept else []
        return _set_block(text, "authority", ["authority:", *new, *(f"  {line}" for line in dumped)])
    first, last, node = found
    lines = text.splitlines()[first:last]
    indent = " " * node.value[0][0].start_mark.column
    drop: set[int] = set()
    for key, value in node.value:
        if key.value in values:
            drop |= set(range(key.start_mark.line - first, _last_line(value) + 1 - first))
    kept_lines = [line for number, line in enumerate(lines) if number not in drop]
    head, rest = kept_lines[0], kept_lines[1:]
    return _set_block(text, "authority", [head, *(indent + line.strip() for line in new), *rest])


def _set_block(text: str, key: str, block: list[str]) -> str:
    """Put these lines where the top-level `key` stands, or at the end."""
    lines, found = text.splitlines(), _entry(text, key)
    if found is None:
        gap = [""] if block and lines and lines[-1].strip() else []
        return "\n".join([*lines, *gap, *block]) + "\n"
    first, last, _ = found
    return "\n".join([*lines[:first], *block, *lines[last:]]) + "\n"


def _entry(text: str, key: str) -> tuple[int, int, Any] | None:
    """(first line, line after its last, value) of a top-level key. Comments and blanks after it are the next one's."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    for name, value in root.value:
        if name.value == key:
            return name.start_mark.line, _last_line(value) + 1, value
    return None


def _last_line(node: yaml.Node) -> int:
    """Of a value; a block's own end mark stands at the beginning of what follows it."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return _last_line(node.value[-1][1])
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _last_line(node.value[-1])
    if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        return max(node.start_mark.line, node.end_mark.line - 1)
    return node.end_mark.line


def _scalar(value: str | bool) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
