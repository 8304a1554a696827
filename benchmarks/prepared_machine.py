"""Does `volunteer-kit doctor RUN` name what is wrong with a machine that has all of it at once? In namespaces.

    python benchmarks/prepared_machine.py            some two minutes
    python benchmarks/prepared_machine.py --show     and what the doctor prints there, as a volunteer reads it

The first machine is a dual-stack home behind a router, with 64 MB of /dev/shm, a memory limit, no flock, forkserver,
an ISO-8859-1 terminal, a dead HTTP_PROXY, a busy Hub, a clock that jumps an hour while the doctor looks, umask 000, an
older kit than the others', and a volunteer that Ctrl-Z has stopped. A copy of its key takes part elsewhere. Some faults
exclude these, so a second machine has them: IPv6 only, a user without a home folder, no locks at all, an authority that
says "later", a Hub that is away, a clock that is behind from the start, logs that have grown. It takes root, iproute2
and gcc.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.netlab import NoNetlab
from benchmarks.netlab_parts.descendants import end_descendants_with_us
from benchmarks.prepared_parts.scenes import look_at_all_at_once, look_at_the_rest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print what the doctor says")
    options = parser.parse_args()
    result: dict[str, int | bool] = {"items": 0, "named": 0}
    print(f"{'machine':<8} {'item':<22} {'named':<6} what the doctor says of it")
    with tempfile.TemporaryDirectory(prefix="prepared-") as folder:
        Path(folder).chmod(0o755)
        for number, look in enumerate((look_at_all_at_once, look_at_the_rest), start=1):
            scene = look(Path(folder))
            for item, namings in scene.namings.items():
                is_named = all(naming.is_met(scene.found) for naming in namings)
                said = [scene.found[naming.finding] for naming in namings if naming.finding in scene.found]
                print(f"{number:<8} {item:<22} {'yes' if is_named else 'NO':<6} {said[0].text if said else '-'}")
                for one in said[1:]:
                    print(f"{'':<38} {one.text}")
                result["items"] += number == 1
                result["named"] += number == 1 and is_named
                result[item if number == 1 else f"second_{item}"] = is_named
            if scene.notes:
                print(f"{'':<38} {scene.notes}")
            if options.show:
                print(f"\n{scene.printed}\n")
    print(json.dumps(result))
    return 0 if all(result.values()) and result["named"] == result["items"] else 1


if __name__ == "__main__":
    end_descendants_with_us()
    try:
        sys.exit(main())
    except NoNetlab as e:
        sys.exit(str(e))
