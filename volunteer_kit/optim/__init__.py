"""Optimizers and their settings. Knows nothing of models, data or the swarm."""

from .exact_state import ExactStateOptimizer
from .lamb import Lamb
from .lamb8bit import Lamb8bit
from .outer import OuterNesterov
from .recipe import OptimizerConfig, build_optimizer_factory, param_groups, parameter_names
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
