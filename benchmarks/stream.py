"""The stream: its speed beside the bare libraries, its memory, what kills cost it, and whether peers read the same.

    python benchmarks/stream.py [--quick]

Shards lie behind a real HTTP server on this machine (the tests' stand-in for the Hub, in a process of its own). Images
are decoded and scaled to 256 pixels; in place of an image tokenizer stands a constant, on both sides.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from stream_parts import material

RECORDS = 40_000  # of code shards
PARTS = ("images", "codes", "table", "memory", "kill_codes", "kill_images", "peers")


def run_part(part: str, url: str, folder: Path, quick: bool) -> dict[str, float]:
    """One measurement, in this process."""
    from stream_parts import kills, peers, speed

    rounds = 3 if quick else 5
    if part in ("images", "codes", "table"):
        count = {"images": 1500, "codes": 15_000, "table": 15_000}[part]
        return speed.compare(part, url, folder, count // (3 if quick else 1), rounds)
    if part == "memory":
        return speed.memory(url, folder, 20_000 if quick else 200_000)
    if part.startswith("kill"):
        return kills.kill_at_random(part.removeprefix("kill_"), url, folder, 5 if quick else 50)
    return peers.come_and_go(url, folder, peers=8, seconds=30 if quick else 180, every=7, records=RECORDS)


def measure(part: str, url: str, folder: Path, quick: bool) -> dict[str, float]:
    """The same in a process of its own, whose Hub the server is."""
    command = [sys.executable, __file__, "--part", part, "--url", url, "--folder", folder, *["--quick"] * quick]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=material.environment(url, folder))
    if done.returncode:
        sys.exit(f"The part {part!r} failed; see above.")
    return json.loads(done.stdout.splitlines()[-1])


def show(found: dict[str, dict[str, float]], console: Console) -> None:
    table = Table("what is read over HTTP", "samples/s", "bare library", "ratio", "first batch", title="Speed")
    names = {"images": "images, webdataset", "codes": "codes, webdataset", "table": "codes, datasets (Hub)"}
    for part, name in names.items():
        one = found[part]
        first = f"{one['first']:.2f} s (slowest {one['first_slowest']:.2f})"
        table.add_row(name, f"{one['ours']:,.0f}", f"{one['theirs']:,.0f}", f"{one['ratio']:.2f}", first)
    console.print(table)
    table = Table("what", "figure", title="What it stands")
    memory, peers = found["memory"], found["peers"]
    table.add_row(f"memory grown over {memory['samples']:,} samples", f"{memory['growth_mb']:.1f} MB")
    for part in ("kill_codes", "kill_images"):
        one = found[part]
        lost = f"{one['lost']} lost, {one['repeated']} repeated of {one['samples']:,}"
        table.add_row(f"{part.removeprefix('kill_')}: killed at random", lost)
        table.add_row("  next batch after", f"{one['seconds_median']:.2f} s (slowest {one['seconds_slowest']:.2f})")
    change = f"{peers.get('peers_killed', 0)} killed, {peers.get('peers_left', 0)} left, {peers['peers']} came"
    table.add_row(f"8 peers, {change}", f"{peers['duplicates']} of {peers['samples']:,} samples twice")
    table.add_row("  of the epochs they finished, read", f"{100 * peers['read_of_finished_epochs']:.1f} %")
    console.print(table)


def main(quick: bool) -> int:
    console = Console()
    with tempfile.TemporaryDirectory(prefix="stream-") as scratch:
        folder = Path(scratch) / "served"
        material.make(folder, images=2000, codes=RECORDS, rows=20_000)
        with material.server(folder) as url:
            found = {}
            for part in PARTS:
                console.print(f"measuring: {part} ...", style="dim")
                found[part] = measure(part, url, folder, quick)
    show(found, console)
    killed = [found["kill_codes"], found["kill_images"]]
    figures = {
        "first_batch_s": max(found[part]["first"] for part in ("images", "codes", "table")),
        "samples_per_s": found["codes"]["ours"],
        "images_per_s": found["images"]["ours"],
        "hub_samples_per_s": found["table"]["ours"],
        "ratio_vs_webdataset": min(found[part]["ratio"] for part in ("images", "codes")),
        "ratio_vs_webdataset_images": found["images"]["ratio"],
        "ratio_vs_webdataset_codes": found["codes"]["ratio"],
        "ratio_vs_datasets": found["table"]["ratio"],
        "rss_growth_mb": found["memory"]["growth_mb"],
        "resume_lost": sum(one["lost"] for one in killed),
        "resume_repeated": sum(one["repeated"] for one in killed),
        "resume_same_order": all(one["same_order"] for one in killed),
        "resume_s": max(one["seconds_slowest"] for one in killed),
        "resume_s_median": max(one["seconds_median"] for one in killed),
        "duplicate_rate_8_peers": found["peers"]["rate"],
        **{name: found["peers"][name] for name in found["peers"] if name != "rate"},
    }
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))
    return 0


if __name__ == "__main__":
    from netlab_parts.descendants import end_descendants_with_us

    end_descendants_with_us()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="minutes less, figures worth less")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--peer", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        material.serve(options.serve)
    elif options.peer:
        from stream_parts.peers import be_peer

        be_peer(*options.peer)
    elif options.part:
        print(json.dumps(run_part(options.part, options.url, options.folder, options.quick)))
    else:
        sys.exit(main(options.quick))
