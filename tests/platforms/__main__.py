"""Makes a platform's environment for good, and prints its Python; see the package's docstring."""

from __future__ import annotations

import argparse
import sys

from tests.platforms import PLATFORMS, NoPlatform, cache_folder, check_disk, find_python, make_environment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PLATFORMS)
    parser.add_argument("packages", nargs="*", help="to be installed beside the platform's own")
    parser.add_argument("--fits", action="store_true", help="make nothing; say whether it can be made")
    given = parser.parse_args()
    platform = PLATFORMS[given.name]
    try:
        find_python(platform.python)
        check_disk(platform)
        if not given.fits:
            print(make_environment(platform, cache_folder() / "made" / platform.name, given.packages))
    except NoPlatform as reason:
        print(reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
