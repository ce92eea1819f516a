"""Pipeline parallelism: the user's own step, cut at block boundaries, run in the order of a schedule."""
