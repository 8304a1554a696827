"""The parts of benchmarks/stream.py, each of which runs in processes of its own."""
