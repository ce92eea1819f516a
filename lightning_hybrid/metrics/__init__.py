"""Pure metrics: numbers in, dict out. No torch, no process group."""
