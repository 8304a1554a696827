"""Rounds: parts travel to the reducers of their slices, and answers come back.

Read `layout`, `parts`, `reducer`, `error_feedback`, then `exchange`.
"""
