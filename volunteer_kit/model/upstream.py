"""dalle-pytorch and taming-transformers without the imports of theirs that no longer work.

The packages are real dependencies: their transformer and their VQGAN layers do the computing. But their own
`__init__` and `vae.py` import pkg_resources, torchvision, pytorch-lightning and OmegaConf, and their lists of
requirements cannot be built any more. So `volunteer-kit setup` installs them with --no-deps, and the few modules needed
are imported here under a bare package that stands in for the real `__init__` while the import lasts.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import threading
import types

from volunteer_kit import packages
from volunteer_kit.packages import MissingDependency

_lock = threading.Lock()
_loaded: dict[str, types.ModuleType] = {}  # theirs, by full name; kept here so that each class exists once


def dalle_transformer() -> types.ModuleType:
    """The module dalle_pytorch.transformer. Raises MissingDependency."""
    return _import("dalle_pytorch", "transformer")


def dalle_attention() -> types.ModuleType:
    """The module dalle_pytorch.attention. Raises MissingDependency."""
    return _import("dalle_pytorch", "attention")


def dalle_reference() -> types.ModuleType:
    """The module dalle_pytorch.dalle_pytorch with the original DALLE class, to compare with. Raises MissingDependency.

    Its vae must be a `DiscreteVAE` of the same module; OpenAI's and VQGAN's classes are empty stand-ins.
    """
    return _import("dalle_pytorch", "dalle_pytorch")


def taming_layers() -> types.ModuleType:
    """taming.modules.diffusionmodules.model: VQGAN's Encoder and Decoder. Raises MissingDependency."""
    return _import("taming", "modules.diffusionmodules.model")


def taming_quantize() -> types.ModuleType:
    """taming.modules.vqvae.quantize: VectorQuantizer2 and GumbelQuantize. Raises MissingDependency."""
    return _import("taming", "modules.vqvae.quantize")


def _import(package: str, name: str) -> types.ModuleType:
    """Import package.name without running package/__init__.py, and leave sys.modules as it was found."""
    full_name = f"{package}.{name}"
    with _lock:
        if full_name in _loaded:
            return _loaded[full_name]
        spec = importlib.machinery.PathFinder.find_spec(package)
        if spec is None or spec.submodule_search_locations is None:
            packages.require_upstream()
            raise MissingDependency(f"The package {package!r} cannot be found. {packages.setup_command()}")
        others = _take_out(package)
        try:
            sys.modules[package] = _bare_package(package, list(spec.submodule_search_locations))
            sys.modules.update({key: module for key, module in _loaded.items() if key.startswith(package + ".")})
            importlib.import_module(full_name)
            _loaded.update({key: module for key, module in _take_out(package).items() if key != package})
        except ImportError as error:
            told = packages.explained(error) if isinstance(error, ModuleNotFoundError) else None
            raise MissingDependency(told or f"The package {package!r} cannot be used: {error}") from error
        finally:
            _take_out(package)
            sys.modules.update(others)
        return _loaded[full_name]


def _take_out(package: str) -> dict[str, types.ModuleType]:
    names = [name for name in sys.modules if name == package or name.startswith(package + ".")]
    return {name: sys.modules.pop(name) for name in names}


def _bare_package(package: str, path: list[str]) -> types.ModuleType:
    bare = types.ModuleType(package)
    bare.__path__ = path
    if package == "dalle_pytorch" and "dalle_pytorch.vae" not in _loaded:
        vae = types.ModuleType("dalle_pytorch.vae")
        for name in ("OpenAIDiscreteVAE", "VQGanVAE"):
            setattr(vae, name, type(name, (), {"__module__": vae.__name__}))
        _loaded["dalle_pytorch.vae"] = vae
    return bare
