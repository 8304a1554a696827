"""Optimizers and their settings. Knows nothing of models, data or the swarm."""

from .exact_state import ExactStateOptimizer
from .lamb import Lamb
from .recipe import OptimizerConfig, build_optimizer_factory, param_groups, parameter_names

__all__ = [
    "ExactStateOptimizer",
    "Lamb",
    "OptimizerConfig",
    "build_optimizer_factory",
    "param_groups",
    "parameter_names",
]
