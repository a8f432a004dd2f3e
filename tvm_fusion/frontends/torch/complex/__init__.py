"""Complex numbers of PyTorch, and Fourier transforms."""
