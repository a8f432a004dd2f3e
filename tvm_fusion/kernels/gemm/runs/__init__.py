"""Products of few terms on tensor cores, whose rows are runs of memory, over each other or not."""
