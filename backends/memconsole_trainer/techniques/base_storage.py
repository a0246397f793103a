"""Storage of a frozen base's matrices in 8 or 4 bits: the specification of both backends.

After Dettmers et al. 2023, "QLoRA" (arXiv:2305.14314):

- A matrix, flattened row by row, is cut into blocks of 64 elements; the last block is padded with
  zeros. Each block has one fp32 scale.
- `int8`: the scale is the block's largest magnitude divided by 127. A code is the element divided
  by the scale, rounded half to even.
- `nf4`: the scale is the block's largest magnitude. A code is the index of the nearest of 16 values
  (appendix E); a tie goes to the lower one. Two codes share a byte, the first in the upper four
  bits.
- A weight is its code's value times its block's scale, in fp32, then rounded to the compute
  precision.
- A block is zero if its scale or the reciprocal of its scale is not a normal number.

Codes are made on the host, one tensor at a time, so that every backend holds the same codes. Double
quantization of the scales (§3) would save another 0.05 bytes per element and is not implemented.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.models.model import STORED_MATRICES, Parameter
from memconsole.plan.plan import BaseStorage, Plan

BLOCK = 64
"""Elements that share a scale."""
SCALES = "_scales"
"""Suffix of the name of a matrix's scales. Its codes have the name of the matrix."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of the normal distribution, scaled to [-1, 1] and including zero (QLoRA, appendix
E)."""
_CHUNK = 1024
"""Blocks quantized at a time, so that temporaries stay in the cache."""
_TINY = np.finfo(np.float32).tiny
UInt8 = NDArray[np.uint8]
Float32 = NDArray[np.float32]


def is_quantized(plan: Plan, parameter: Parameter) -> bool:
    """Whether a weight of the base is stored as codes: only matrices inside the blocks are, never
    the embedding, head or norms."""
    o = plan.optimize
    frozen = o.freeze_base or o.lora_rank > 0
    return frozen and o.base_storage != "none" and parameter.role in STORED_MATRICES


def blocks_of(size: int) -> int:
    """Number of blocks of a matrix of `size` elements."""
    return -(-size // BLOCK)


def code_bytes(storage: BaseStorage) -> int:
    """Bytes of one block's codes."""
    return BLOCK if storage == "int8" else BLOCK // 2


def quantize(array: NDArray[np.generic], storage: BaseStorage) -> tuple[UInt8, Float32]:
    """Quantize a matrix to codes (blocks, bytes) and scales (blocks,). int8 codes are two's
    complement."""
    flat = array.reshape(-1)
    count = blocks_of(flat.size)
    codes, scales = np.empty((count, code_bytes(storage)), np.uint8), np.empty(count, np.float32)
    encode = _int8 if storage == "int8" else _nf4
    for start in range(0, count, _CHUNK):
        part = flat[start * BLOCK : (start + _CHUNK) * BLOCK]
        blocks = np.zeros((blocks_of(part.size), BLOCK), np.float32)
        blocks.reshape(-1)[: part.size] = part
        places = slice(start, start + len(blocks))
        codes[places], scales[places] = encode(blocks)
    return codes, scales


def dequantize(
    codes: UInt8, scales: Float32, shape: tuple[int, ...], storage: BaseStorage
) -> Float32:
    """The fp32 matrix that codes and scales represent."""
    if storage == "int8":
        values = codes.view(np.int8).astype(np.float32)
    else:
        values = pairs()[codes].reshape(len(codes), BLOCK)
    size = int(np.prod(shape))
    return (values * scales[:, None]).reshape(-1)[:size].reshape(shape)


def pairs() -> Float32:
    """The two nf4 values of every byte, (256, 2)."""
    table, byte = np.array(NF4, np.float32), np.arange(256)
    return np.stack([table[byte >> 4], table[byte & 15]], axis=1)


def stored(plan: Plan, parameter: Parameter, array: Float32) -> Float32:
    """The value of a frozen weight after storage, before it is rounded to the compute precision."""
    if not is_quantized(plan, parameter):
        return array
    storage = plan.optimize.base_storage
    return dequantize(*quantize(array, storage), array.shape, storage)


def parts(
    plan: Plan, parameter: Parameter, array: NDArray[np.generic]
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """The names and arrays in which a weight of the base is stored."""
    if not is_quantized(plan, parameter):
        yield parameter.name, array
        return
    codes, scales = quantize(array, plan.optimize.base_storage)
    yield parameter.name, codes
    yield parameter.name + SCALES, scales


def _int8(blocks: Float32) -> tuple[UInt8, Float32]:
    scales = np.abs(blocks).max(axis=1) / np.float32(127)
    scales, reciprocals = _usable(scales)
    return np.rint(blocks * reciprocals[:, None]).astype(np.int8).view(np.uint8), scales


def _nf4(blocks: Float32) -> tuple[UInt8, Float32]:
    scales, reciprocals = _usable(np.abs(blocks).max(axis=1))
    shares = blocks * reciprocals[:, None]
    table = np.array(NF4)
    codes = np.zeros(blocks.shape, np.uint8)
    for middle in (table[:-1] + table[1:]) / 2:
        codes += shares > np.float32(middle)
    return (codes[:, 0::2] << 4 | codes[:, 1::2]).astype(np.uint8), scales


def _usable(scales: Float32) -> tuple[Float32, Float32]:
    """Scales and their reciprocals; both are zero if either is not a normal number."""
    usable = (scales >= _TINY) & (scales <= np.float32(1) / _TINY)
    scales = np.where(usable, scales, np.float32(0))
    return scales, np.where(usable, np.float32(1) / np.where(usable, scales, 1), np.float32(0))
