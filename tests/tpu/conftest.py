"""These tests need torch_xla, which needs a torch of its own: `make test-tpu` runs them in their environment."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch_xla") else ["test_*.py"]
