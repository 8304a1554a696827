"""Encode tensors as bytes, by the codecs that a run file names. Read `wire`, `dense`, `topk`, then `registry`."""
