"""python -m volunteer_kit.device: what is here, and how it would train."""

from __future__ import annotations

import torch

from volunteer_kit import output
from volunteer_kit.device import DEMO, ORIGINAL, Device, DevicePlan, detect_device, plan_device, usable_memory


def main() -> None:
    output.keep_up()
    device = detect_device()
    print(f"Device   {_described(device)}")
    ram = usable_memory()[0] / 1e9
    print(f"Machine  {device.cores} usable CPU cores, {device.ram_free_gb:.1f} of {ram:.1f} GB of RAM free")
    print(f"PyTorch  {torch.__version__}")
    for problem in device.problems:
        print(f"\nProblem  {problem}")
    for title, workload, target in (
        ("the demo's model", DEMO, 256),
        ("the original, 125.9 M parameters", ORIGINAL, 4096),
    ):
        plan = plan_device(device, workload, target_batch_size=target)
        words = [f"batch {plan.batch_size}", plan.precision, f"on {_where(plan)}"]
        words += ["recomputing activations"] * plan.checkpointing
        print(f"\nPlan for {title}: {', '.join(words)}, {plan.threads} CPU threads")
        for number, reason in enumerate(plan.why.split("; ")):
            print(f"{'because' if number == 0 else '':9}{reason}")
        if plan.warning:
            print(f"\nWarning  {plan.warning}")
    if device.kind == "tpu":
        print("\nTraining keeps this batch size, since a TPU compiles each one anew.")
    else:
        print("\nTraining starts like this; in its first minute it measures other batch sizes and keeps the fastest.")


def _where(plan: DevicePlan) -> str:
    if plan.devices == ("xla",):
        return f"{plan.count} core{'s' if plan.count > 1 else ''}"
    return " and ".join(plan.devices)


def _described(device: Device) -> str:
    each = " each" if device.count > 1 else ""
    number = f"{device.count} x " if device.count > 1 else ""
    capability = f", compute capability {'.'.join(map(str, device.capability))}" if device.capability else ""
    return f"{number}{device.name}, {device.memory_gb:.1f} GB{each}, {device.free_gb:.1f} GB free{capability}"


if __name__ == "__main__":
    main()
