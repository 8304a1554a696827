"""Optimizers and their settings. Knows nothing of models, data or the swarm. Each name is imported when it is used, so
that the settings can be read without torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import OptimizerConfig
    from .exact_state import ExactStateOptimizer
    from .lamb import Lamb
    from .lamb8bit import Lamb8bit
    from .outer import OuterNesterov
    from .recipe import build_optimizer_factory, param_groups, parameter_names
    from .step_bound import LambStepBound

__all__ = [
    "ExactStateOptimizer",
    "Lamb",
    "Lamb8bit",
    "LambStepBound",
    "OptimizerConfig",
    "OuterNesterov",
    "build_optimizer_factory",
    "param_groups",
    "parameter_names",
]

_MODULES = {
    "ExactStateOptimizer": "exact_state",
    "Lamb": "lamb",
    "Lamb8bit": "lamb8bit",
    "LambStepBound": "step_bound",
    "OptimizerConfig": "config",
    "OuterNesterov": "outer",
    "build_optimizer_factory": "recipe",
    "param_groups": "recipe",
    "parameter_names": "recipe",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
