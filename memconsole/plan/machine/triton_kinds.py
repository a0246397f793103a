"""The kinds of device on which torch runs Triton kernels (`memconsole_torch.kernels`)."""

TRITON_KINDS = ("gpu", "rocm")
