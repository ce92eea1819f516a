"""What data ranks keep alike besides the sharding of :mod:`lightning_hybrid.sharding`."""
