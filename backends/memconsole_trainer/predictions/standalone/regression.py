"""Predicts outputs from windows, with the weights, sizes and constants in this file's folder.

It needs torch, numpy and safetensors, and computes in float32:

    python model.py windows.npy outputs.npy

    from model import Regressor
    model = Regressor()
    outputs = model.predict(windows)               # (n, length, features) to (n, outputs), both as in the data
    model.in_units(outputs, "cart_pendulum")       # (n, outputs of that system), in its own units
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


class Regressor:
    """A transformer with norms after attention and MLP; its last position gives the outputs."""

    def __init__(self, folder: Path = Path(__file__).parent) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        constants = folder / "normalization.json"
        self.normalization = {}
        """What the states (`state_max`) and outputs (`control_max`) of each system were divided by."""
        if constants.exists():
            self.normalization = json.loads(constants.read_text(encoding="utf-8"))
        standardization = folder / "standardization.json"
        self.standardization = {}
        """Means and deviations of features and outputs; empty if the model takes the data as they are."""
        if standardization.exists():
            found = json.loads(standardization.read_text(encoding="utf-8"))
            self.standardization = {name: torch.tensor(values) for name, values in found.items()}
        stored = load_file(folder / "model.safetensors")
        self.weights = {name: tensor.float() for name, tensor in stored.items()}

    def predict(self, windows: Tensor) -> Tensor:
        """Outputs (n, outputs) of windows (n, length, features), on the scale of the data that the model learned from."""
        x = windows.float()[:, -self.config["sequence_length"] :]
        scale = self.standardization
        if scale:
            x = (x - scale["feature_means"]) / scale["feature_deviations"]
        x = self.linear("input", x) + self.weights["positions.weight"][: x.shape[1]]  # (n, T, H)
        for layer in range(self.config["layers"]):
            at = f"layers.{layer}"
            x = self.norm(f"{at}.attention_norm", x + self.attention(f"{at}.attention", x))
            y = F.gelu(self.linear(f"{at}.mlp.up", x), approximate="tanh")
            x = self.norm(f"{at}.mlp_norm", x + self.linear(f"{at}.mlp.down", y))
        outputs = self.linear("head", x[:, -1])
        if scale:
            outputs = outputs * scale["output_deviations"] + scale["output_means"]
        return outputs

    def in_units(self, outputs: Tensor, system: str) -> Tensor:
        """The outputs (n, m) that a system has, in its own units."""
        largest = torch.tensor(self.normalization[system]["control_max"])
        return outputs[:, : len(largest)] * largest

    def attention(self, name: str, x: Tensor) -> Tensor:
        q, k, v = (
            self.linear(f"{name}.{part}", x).unflatten(-1, (self.config["heads"], -1))
            for part in ("query", "key", "value")
        )
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # (n, A, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.linear(f"{name}.output", y.transpose(1, 2).flatten(-2))

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, self.config["norm_eps"])

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python model.py WINDOWS.npy OUTPUTS.npy")
    windows = torch.from_numpy(np.load(sys.argv[1]))
    np.save(sys.argv[2], Regressor().predict(windows).numpy())
