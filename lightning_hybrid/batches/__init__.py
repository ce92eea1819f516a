"""What a batch is made of, how it is cut, who reads it, and the random streams."""
