"""References on whole arrays of PyTorch, for which nothing is compiled."""
