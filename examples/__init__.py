"""Examples. Run them from the repository's root: ``python -m examples.gpt.train``."""
