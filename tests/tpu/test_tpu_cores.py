"""Gradients from PJRT's devices beside the CPU's, and what is compiled on the way."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = [
    {"name": "demo", "model": "demo", "batch_size": 16, "microbatches": 12},
    {"name": "uneven", "model": "small", "batch_size": 6, "microbatches": 3},
    {"name": "after an error", "model": "small", "batch_size": 4, "microbatches": 3, "breaks_before": 1},
    {"name": "fewer than cores", "model": "small", "batch_size": 1, "microbatches": 2},
    {"name": "recomputed", "model": "small", "batch_size": 8, "microbatches": 3, "checkpointing": True},
    {"name": "reversible", "model": "as the original", "batch_size": 8, "microbatches": 3, "checkpointing": True},
    {"name": "in parts", "model": "small", "batch_size": 24, "microbatches": 3, "fits": 2},
    {"name": "in uneven parts", "model": "small", "batch_size": 9, "microbatches": 2, "fits": 4},
    {"name": "bf16", "model": "demo", "batch_size": 16, "microbatches": 3, "precision": "bf16"},
]


class Results:
    """What tests/tpu/cores_child.py said, case by case."""

    def __init__(self, folder: Path, devices: int, cases: list[dict]):
        self.dump = folder / "programs"
        flags = f"--xla_dump_to={self.dump} --xla_dump_hlo_as_text --xla_backend_optimization_level=0"
        environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), "XLA_FLAGS": flags}
        done = subprocess.run(
            [sys.executable, "-m", "tests.tpu.cores_child", json.dumps(cases)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        self.lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def __getitem__(self, case: str) -> list[dict]:
        return [line for line in self.lines if line["case"] == case]

    def exchanges(self) -> set[str]:
        """What the cores send each other, in any program."""
        programs = "".join(path.read_text() for path in self.dump.glob("*after_optimizations.txt"))
        return set(re.findall(r"= .* (all-[a-z]+|collective-[a-z]+|reduce-scatter)(?:-start)?\(", programs))


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Results:
    return Results(tmp_path_factory.mktemp("four"), 4, CASES)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Results:
    return Results(tmp_path_factory.mktemp("one"), 1, CASES[:1])


pytestmark = pytest.mark.timeout(1000)


@pytest.mark.parametrize("devices", ["one", "four"])
def test_gradients_of_the_demo_are_those_of_the_cpu(devices, request):
    found = request.getfixturevalue(devices)["demo"]
    assert len(found) == 12
    assert max(line["worst_gradient"] for line in found) < 1e-3, "of any parameter"
    assert max(line["gradients"] for line in found) < 1e-4
    assert max(line["loss"] for line in found) < 1e-5
    assert {line["on"] for line in found} == {"cpu"}, "where hivemind keeps its parameters"


@pytest.mark.parametrize(
    "case", ["uneven", "fewer than cores", "recomputed", "reversible", "after an error", "in parts", "in uneven parts"]
)
def test_so_are_those_of_other_shapes_of_recomputed_activations_and_after_an_error(four, case):
    assert four[case] and max(line["worst_gradient"] for line in four[case]) < 1e-3


def test_bf16_is_close(four):
    found = four["bf16"]
    assert max(line["loss"] for line in found) < 5e-3
    assert 1e-5 < max(line["gradients"] for line in found) < 0.03, "and not fp32 after all"


@pytest.mark.parametrize("devices", ["one", "four"])
def test_one_program_is_compiled_and_no_other_after_it(devices, request):
    """Though captions of other lengths come, and the parameters change."""
    found = request.getfixturevalue(devices)["demo"]
    assert [line["compilations"] for line in found] == [1] * 12


@pytest.mark.parametrize("case", [case["name"] for case in CASES[1:]])
def test_each_shape_compiles_once(four, case):
    counts = [line["compilations"] for line in four[case]]
    assert len(set(counts)) == 1


def test_all_parts_of_a_microbatch_are_one_program(tmp_path):
    case = {"name": "parts", "model": "small", "batch_size": 16, "microbatches": 3}
    whole = Results(tmp_path / "whole", 1, [case])
    parts = Results(tmp_path / "parts", 1, [{**case, "fits": 4}])
    assert max(line["worst_gradient"] for line in parts.lines) < 1e-3
    assert max(line["loss"] for line in parts.lines) < 1e-5
    assert {line["compilations"] for line in parts.lines} == {line["compilations"] for line in whole.lines}


def test_every_operation_is_compiled(one, four):
    assert all(line["computed_elsewhere"] == [] for line in one.lines + four.lines)


def test_rows_are_cut_over_the_cores_and_gradients_summed_on_them(one, four):
    assert all("devices=[4,1]" in line["cut"] for line in four["demo"])
    assert all("devices=" not in line["cut"] for line in four["uneven"] + one["demo"])
    assert one.exchanges() == set()
    assert four.exchanges() == {"all-reduce"}, "no core asks for activations of another"


def test_one_core_of_several_can_be_taken_and_programs_are_kept(tmp_path):
    kept = tmp_path / "kept"
    found = Results(tmp_path, 4, [{**CASES[1], "batch_size": 4, "cores": 1, "programs": str(kept)}])
    assert max(line["worst_gradient"] for line in found.lines) < 1e-3
    assert all("devices=" not in line["cut"] for line in found.lines)
    assert len(list(kept.iterdir())) == found.lines[-1]["compilations"]
