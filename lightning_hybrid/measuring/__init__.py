"""What is noted of each step while it runs; the figures are made in :mod:`lightning_hybrid.metrics`."""
