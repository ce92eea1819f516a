"""Whatever fails: all ranks end, with the first cause, and can begin again."""
