"""Convolutions of few channels a group on the CUDA cores: depthwise ones at the rate of memory."""
