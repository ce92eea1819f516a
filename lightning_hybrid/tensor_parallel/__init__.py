"""Tensor parallelism: where a plan comes from, and how it is applied."""
