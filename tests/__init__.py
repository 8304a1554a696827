"""Tests of the kit. A package, so that no other `tests` on the path takes its name; IPython 7 puts one there."""
