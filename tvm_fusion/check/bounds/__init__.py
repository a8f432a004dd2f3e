"""What roundings do to the results of right kernels: how large they are, functions disturbed so."""
