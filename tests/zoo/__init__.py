"""Architectures of transformers and timm, small and with random weights, on a CPU beside torch."""
