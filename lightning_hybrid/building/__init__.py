"""What is done to a model besides cutting and splitting it."""
