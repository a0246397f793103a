"""BitNet b1.58 weights (Ma et al. 2024, arXiv:2402.17764, §2): a model's matrices as -1, 0 and 1
with one scale each.

    γ = mean |W|, at least 1e-5        code = clip(round(W / γ), -1, 1)        W ≈ γ · code

The format is a Hugging Face directory whose matrices inside the blocks are stored as

    NAME.weight        uint8 (⌈rows/4⌉, columns): with R = ⌈rows/4⌉, the code of row r plus 1 is in
                       byte row r mod R, in bits 2·⌊r/R⌋ and 2·⌊r/R⌋+1, the lowest first; bits
                       beyond the last row are 0
    NAME.weight_scale  fp32 (1,): γ

in the layout of the family (including GPT-2's fused and transposed matrices). Embeddings, head,
norms and biases stay fp32. transformers can read such a directory (`quantization_config`) if layers
are linear modules without biases, which it would multiply by γ, and rows a multiple of 4; it then also rounds
activations to 8 bits. For other models the directory has no `quantization_config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memconsole.plan.models.architecture import Architecture, parameters
from memconsole_trainer.engine import WeightsError
from memconsole_trainer.weights.huggingface import tensor_files
from memconsole_trainer.weights.huggingface_names import StoredParameter, extract, stored_as

SCALE = "_scale"
"""Suffix of the name of a matrix's scale."""
PER_BYTE = 4
LEAST = 1e-5
_CONFIG: dict[str, Any] = {
    "quantization_config": {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "offline",
        "modules_to_not_convert": ["lm_head", "embed_out"],  # names of the head
    }
}
Array = NDArray[np.generic]


def config(architecture: Architecture) -> dict[str, Any]:
    """What config.json says of the format; nothing if transformers would read another model."""
    fits = all(rows % PER_BYTE == 0 for rows in matrices(architecture).values())
    return _CONFIG if fits and not architecture.biases_projections else {}


def ternary(matrix: Array) -> tuple[NDArray[np.int8], np.float32]:
    """Codes (rows, columns) and γ of a matrix."""
    wide = np.asarray(matrix, np.float32)
    scale = np.float32(max(float(np.abs(wide).mean(dtype=np.float64)), LEAST))
    return np.clip(np.rint(wide / scale), -1, 1).astype(np.int8), scale


def pack(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Pack codes (rows, columns) into bytes (⌈rows/4⌉, columns)."""
    rows = -(-len(codes) // PER_BYTE)
    packed = np.zeros((rows, codes.shape[1]), np.uint8)
    for place in range(PER_BYTE):
        part = codes[place * rows : (place + 1) * rows]
        packed[: len(part)] |= (part + 1).astype(np.uint8) << np.uint8(2 * place)
    return packed


def unpack(packed: NDArray[np.uint8], rows: int) -> NDArray[np.int8]:
    """Unpack bytes to the codes (rows, columns) of `rows` rows."""
    parts = [(packed >> np.uint8(2 * place)) & np.uint8(3) for place in range(PER_BYTE)]
    return np.concatenate(parts)[:rows].astype(np.int8) - np.int8(1)


def matrices(architecture: Architecture) -> dict[str, int]:
    """Hugging Face names of the tensors that are stored as codes, and their numbers of rows."""
    return {
        stored.name: _rows(p.shape, stored)
        for p in parameters(architecture)
        if p.role == "matrix" and (stored := stored_as(p, architecture)) is not None
    }


class Packing:
    """Converts each tensor of an export. `codes` counts the weights stored as codes, `zeros` the
    zeros among them."""

    def __init__(self, architecture: Architecture) -> None:
        self._matrices = matrices(architecture)
        self.codes = self.zeros = 0

    def __call__(self, name: str, array: Array) -> Iterator[tuple[str, Array]]:
        if name not in self._matrices:
            yield name, array
            return
        codes, scale = ternary(array)
        self.codes += codes.size
        self.zeros += int((codes == 0).sum())
        yield name, pack(codes)
        yield name + SCALE, np.array([scale], np.float32)


class BitNetWeights:
    """A `WeightSource` over such a directory: each matrix is its codes times their scale.

    Raises `WeightsError` if the directory is not in this format.
    """

    def __init__(self, directory: Path, architecture: Architecture) -> None:
        self._directory, self._architecture = directory, architecture
        self._files = {name: file for file in tensor_files(directory) for name in file.names()}
        self._parameters = {p.name: p for p in parameters(architecture)}
        self._matrices = matrices(architecture)

    def tensor(self, name: str) -> Array:
        """The fp32 tensor of a canonical name."""
        parameter = self._parameters[name]
        stored = stored_as(parameter, self._architecture)
        if stored is None:
            return np.full(parameter.shape, parameter.fill, dtype=np.float32)
        whole = self._read(stored.name)
        if stored.name in self._matrices:
            if whole.dtype != np.uint8:
                raise WeightsError(f"{self._directory}: {stored.name} is not stored in codes")
            codes = unpack(whole.view(np.uint8), self._matrices[stored.name])
            whole = codes * np.float32(np.asarray(self._read(stored.name + SCALE)).item())
        return extract(whole, stored, parameter.shape[0])

    def _read(self, name: str) -> Array:
        if name not in self._files:
            raise WeightsError(f"{self._directory}: no tensor {name}")
        return self._files[name].tensor(name, widen=True)


def _rows(shape: tuple[int, ...], stored: StoredParameter) -> int:
    return shape[1] if stored.transpose else stored.rows(shape[0])
