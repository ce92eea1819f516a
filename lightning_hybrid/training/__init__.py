"""How Lightning's steps, hooks and values run on one rank of a mesh."""
