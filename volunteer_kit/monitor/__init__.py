"""The run's monitor: an auxiliary peer that watches, judges, keeps checkpoints, signs them, and rolls back.

    volunteer-kit monitor RUN --folder F/monitor --keys F/keys --initial-peers ADDRESS

Its doors are in door.py (monitor_run, roll_back); nothing is imported here, for the processes that draw and push need
neither hivemind nor a swarm.
"""
