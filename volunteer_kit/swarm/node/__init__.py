"""A peer's node: the synchronization core in a real process.

The node process has the streams, the files and the core; the training process has the model and the optimizer. Read
`talk` (what the two say to each other), `engine` (the core's actions, executed), `transport`, `store`, then `member`
(the training process's side). `docs/architecture.md` follows one gradient from backward to the applied step.
"""
