"""A safetensors file that holds no tensors."""

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
