"""Checkpoints: save, load and convert, keyed by parameter name and independent of degrees."""
