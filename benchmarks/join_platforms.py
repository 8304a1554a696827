"""From a hosted run's notebook to the first credited sample, on each platform that volunteers use.

    python benchmarks/join_platforms.py [--only colab --only kaggle]

A host serves its page, its notebook and its own wheel from this machine; a stand-in for the Hub knows the volunteers.
Each platform is a fresh environment of the platform's own packages (tests/platforms, with the date of each list) in its
own Python and with its environment variables, and no checkout is on its path. In it the notebook is run from top to
bottom, as "run all" does: the install cell, then joining, until the run has credited a sample; then the stop button.

For each platform: seconds of the install cell; how many of the platform's packages it changed; seconds from joining to
the first credited sample; whether the volunteer left in good order and nothing stayed behind.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import urllib.request
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from join_platforms_parts.visit import Visit, visit  # noqa: E402

from tests.platforms import PLATFORMS, NoPlatform, Platform, cache_folder, make_environment  # noqa: E402


def main(only: list[str]) -> int:
    from tests.hub import Hub
    from tests.test_hosted_run import HostOfTwo, token_of

    console = Console()
    platforms = [PLATFORMS[name] for name in only or PLATFORMS]
    found: dict[str, Visit] = {}
    # beside the cache, so that files are linked from it and not copied
    with tempfile.TemporaryDirectory(prefix="visits-", dir=cache_folder()) as folder, Hub() as hub:
        scratch = Path(folder)
        for platform in platforms:  # each an account of its own: what the last one gave is credited for a while
            token = token_of(platform.key)
            hub.tokens[token], hub.rights[token] = platform.key, {"role": "read"}
        host = HostOfTwo(scratch, hub)
        try:
            host.start()
            notebook = scratch / "join.ipynb"
            with urllib.request.urlopen(f"http://127.0.0.1:{host.port}/join.ipynb", timeout=20) as answer:
                notebook.write_bytes(answer.read())
            for platform in platforms:
                console.print(f"{platform.name}, Python {platform.python} ...")
                try:
                    found[platform.name] = visited(platform, notebook, scratch, host, hub)
                except NoPlatform as reason:
                    console.print(f"[yellow]{platform.name} was left out: {reason}", soft_wrap=True)
                    continue
                show(console, found[platform.name])
        finally:
            host.close()
    return report(console, found, {platform.name for platform in platforms} - found.keys())


def visited(platform: Platform, notebook: Path, scratch: Path, host, hub) -> Visit:  # noqa: ANN001
    from tests.test_browser import of_hub
    from tests.test_hosted_run import token_of

    folder = scratch / platform.name
    folder.mkdir()
    python = make_environment(platform, folder / "environment")
    token = token_of(platform.key)
    environment = of_hub(hub, folder) | platform.variables | {"HF_TOKEN": token, "OMP_NUM_THREADS": "1"}
    return visit(
        python,
        notebook,
        folder,
        credited=lambda: host.credit_of(platform.key),
        environment=environment,
    )


def show(console: Console, found: Visit) -> None:
    first, leaving = found.first_sample_s, "in good order" if found.left_cleanly else "not in good order"
    console.print(f"  install {found.install_s:.0f} s; first credited sample after {first} s; left {leaving}")
    for name, (old, new) in sorted(found.changed.items()):
        console.print(f"  changed: {name} {old} -> {new or 'removed'}")
    console.print(f"  added: {', '.join(found.added) or 'nothing'}")
    if found.error or not found.left_cleanly:
        console.print(f"[red]{found.error or 'It did not leave in good order.'}", markup=False)
        lines = [line.rpartition("\r")[2] for line in found.said.splitlines()]
        console.print("\n".join(lines[-60:]), markup=False)


def report(console: Console, found: dict[str, Visit], left_out: set[str]) -> int:
    table = Table("platform", "install, s", "packages changed", "first credited sample, s", "left cleanly")
    figures: dict[str, float | int | bool | None] = {}
    for name, visit_ in found.items():
        first = visit_.first_sample_s
        table.add_row(
            name, f"{visit_.install_s:.0f}", str(len(visit_.changed)), "none" if first is None else f"{first:.0f}",
            "yes" if visit_.left_cleanly else "no",
        )  # fmt: skip
        key = PLATFORMS[name].key
        figures |= {
            f"{key}_install_s": visit_.install_s,
            f"{key}_changed": len(visit_.changed),
            f"{key}_first_sample_s": first,
            f"{key}_left_cleanly": visit_.left_cleanly,
        }
    console.print(table)
    if left_out:
        console.print(f"[yellow]Left out: {', '.join(sorted(left_out))}")
    print(json.dumps(figures | {"platforms": len(found), "left_out": len(left_out)}))
    is_good = all(v.left_cleanly and not v.changed and v.first_sample_s is not None for v in found.values())
    return 0 if is_good and found else 1


if __name__ == "__main__":
    from benchmarks.netlab_parts.descendants import end_descendants_with_us

    end_descendants_with_us()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PLATFORMS, default=[], help="this platform; may be repeated")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves nothing behind
    sys.exit(main(parser.parse_args().only))
