"""Callbacks of lightning_hybrid: hooks only, one class a file. Import them from ``lightning_hybrid.callbacks``."""

if __name__ != "lightning_hybrid.callbacks":  # a top-level `callbacks` would shadow the user's own folder of that name
    raise ImportError("Import these callbacks as `lightning_hybrid.callbacks`, not as top-level `callbacks`.")
