"""The parts of benchmarks/hostile.py: the swarms under attack, the attackers, and what measures both."""
