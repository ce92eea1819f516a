"""What each rank holds, said before training."""
