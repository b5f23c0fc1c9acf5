"""Triton kernels, one idea a file. No torch.distributed, no allocation, no stream."""
