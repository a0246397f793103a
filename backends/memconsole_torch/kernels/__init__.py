"""Triton kernels for GPUs, and the functions that call them. torch's wheels for Linux bring Triton. Where it is missing,
torch's own operations do the same work, in more memory and time."""
