"""`make fuzz`: coverage-guided fuzzing of each decoder, one after another, by atheris (libFuzzer).

    python -m tests.fuzz [--seconds 60] [--target NAME ...]   fuzz; what was found is in build/fuzz/found
    python -m tests.fuzz --store [--target NAME ...]          take what was learnt into the stored corpus

An exception that is none of the target's refusals is noted, and fuzzing goes on. A crash, an input without end or too
much memory ends the target's process, which is started again for the time that is left.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys

from tests.fuzz.frozen_clock import freeze
from tests.fuzz.minimise import minimise
from tests.fuzz.replay import FOUND, HERE, store, stored, targets
from tests.fuzz.target import MODULES

WORK = HERE.parents[1] / "build" / "fuzz"
HEAD = f"{'target':32} {'seconds':>8} {'of cpu':>8} {'executions':>12} {'new':>6} {'findings':>9}"
NO_ATHERIS = f"""Nothing is fuzzed: this Python has no atheris. Wheels are for Linux on x86-64, Python 3.11 to 3.13.
1. Install it: {sys.executable} -m pip install atheris
2. The stored inputs are decoded without it: make test TEST=tests/test_fuzz.py"""


def main() -> int:
    """0: nothing was found, or this Python has no atheris, and that is printed; 1: something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--target", action="append", default=[], help="one of them; all without it")
    parser.add_argument("--store", action="store_true", help="take what was learnt into tests/fuzz/corpus")
    options = parser.parse_args()
    if options.store:
        return _store(options.target)
    if importlib.util.find_spec("atheris") is None:
        print(NO_ATHERIS)
        return 0
    known = _instrumented()
    if unknown := set(options.target) - known.keys():
        parser.error(f"there is no target {', '.join(sorted(unknown))}. There are: {', '.join(known)}")
    return _fuzz({name: known[name] for name in options.target or known}, options.seconds)


def _instrumented() -> dict:
    from tests.fuzz.engine import load

    return load(MODULES)


def _fuzz(chosen: dict, seconds: float) -> int:
    from tests.fuzz.engine import fuzz

    print(HEAD, flush=True)
    results = []
    for name, target in chosen.items():
        corpus, found = WORK / "corpus" / name, WORK / "found" / name
        for place in (corpus, found):
            place.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate([*target.seeds(), *(data for _, data in stored(name))]):
            (corpus / f"stored-{number:04d}").write_bytes(data)
        before = len(list(corpus.iterdir()))
        result = fuzz(target, seconds, corpus, found, WORK / f"{name}.log")
        results.append(result)
        new = len(list(corpus.iterdir())) - before
        times = f"{result.seconds:8.0f} {result.cpu_seconds:8.1f}"
        print(f"{name:32} {times} {result.executions:12,} {new:6} {len(result.found):9}", flush=True)
    print(f"\n{sum(r.executions for r in results):,} executions in {sum(r.seconds for r in results):,.0f} s.")
    found = [str(WORK / "found" / result.name / file) for result in results for file in sorted(result.found)]
    if found:
        print("These inputs do what no input may:\n" + "\n".join(found))
        print(f"Mend the decoder, and keep each input under a name of its own: {FOUND}/TARGET/WHAT-IT-DID")
    return int(bool(found))


def _store(names: list[str]) -> int:
    known = targets()
    for name in names or known:
        place = WORK / "corpus" / name
        inputs = [path.read_bytes() for path in sorted(place.glob("*"))] + [data for _, data in stored(name)]
        kept = minimise(known[name], inputs)
        print(f"{name:32} {len(inputs):6} -> {len(kept):4}, {store(name, kept).stat().st_size:7,} bytes", flush=True)
    return 0


if __name__ == "__main__":
    freeze()
    sys.exit(main())
