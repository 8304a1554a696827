"""The command `volunteer-kit`, and `python -m volunteer_kit`: what starts where packages are missing, too."""

from __future__ import annotations

import sys

from volunteer_kit import output, packages


def main() -> None:
    """The command line. Without the packages that it is made of, their install line and exit code 78."""
    output.keep_up()
    try:
        from volunteer_kit.cli import main as run
    except ModuleNotFoundError as error:
        text = packages.explained(error)
        if text is None:
            raise
        if sys.argv[1:2] == ["setup"]:
            _set_up_plainly()
            return
        print(text, file=sys.stderr)
        sys.exit(packages.EXIT_CODE)
    run()


def _set_up_plainly() -> None:
    """`volunteer-kit setup [FOR ...]` without the library that reads command lines."""
    from volunteer_kit.installer import SetupError, set_up

    try:
        set_up(sys.argv[2:])
    except SetupError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
