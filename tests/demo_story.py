"""Events of a demo, and a short one told by them."""

from __future__ import annotations

from volunteer_kit.demo.state import DemoState


def event(event_name: str, time: float = 0.0, **fields) -> dict:
    return {"event": event_name, "time": time, **fields}


def epoch(number: int, samples: int, loss: float | None, time: float, received: float = 1.0) -> dict:
    return event(
        "epoch", time, epoch=number, samples=samples, total_samples=0, loss=loss, group_size=2, received=received,
        seconds=0.4, sent_bytes=1000,
    )  # fmt: skip


def step(number: int, loss: float = 3.0, speed: float = 50.0) -> dict:
    return event(
        "step", epoch=number, samples=16, samples_per_second=speed, loss=loss, num_peers=2, swarm_samples=96,
        target_batch_size=256,
    )  # fmt: skip


def started(state: DemoState, name: str, source: str = "new", at: int = 0) -> None:
    state.apply(name, event("starting", pid=1, name=name))
    state.apply(name, event("device", device="CPU", batch_size=16, precision="fp32", threads=1, why="2 cores"))
    state.apply(name, event("connected", peer_id="Qm", maddrs=[], client_mode=False))
    state.apply(name, event("state_loaded", epoch=at, source=source))


def tell_story() -> DemoState:
    """Two volunteers; the second is killed and returns, a third comes late."""
    state = DemoState()
    for name in ("volunteer 1", "volunteer 2"):
        state.add(name)
        started(state, name)
    for number in (1, 2, 3):
        state.apply("volunteer 1", step(number - 1))
        state.apply("volunteer 1", epoch(number, 100, 5.0 - number, 100.0 + 2 * number))
        state.apply("volunteer 2", epoch(number, 156, 4.0 - number, 100.1 + 2 * number))
    state.killed("volunteer 2", 107.0)
    state.apply("volunteer 2", event("restarting", 107.2, exit_code=-9, delay=1.0, restarts=1, message="killed"))
    state.apply("volunteer 1", epoch(4, 256, 1.5, 110.0, received=0.9))
    started(state, "volunteer 2", "peers", 4)
    state.add("volunteer 3", late=True)
    started(state, "volunteer 3", "peers", 4)
    state.apply("volunteer 1", epoch(5, 90, 1.2, 115.0))
    state.apply("volunteer 2", epoch(5, 90, 1.1, 115.0))
    state.apply("volunteer 3", epoch(5, 76, 1.3, 115.1))
    return state
