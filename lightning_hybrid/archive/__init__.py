"""The archive of configurations: one JSON entry per run."""
