"""A byte-level GPT: ``model`` (plain PyTorch), ``module`` and ``data`` (ordinary Lightning), ``train`` (the demo)."""
