"""The regression transformer in torch: it maps windows of vectors to a vector of numbers.

Module names spell the canonical parameter names of `memconsole.plan.models.regressor`. The residual
stream, norms and the output projection are fp32 in any autocast precision. Attention never
materializes its scores.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memconsole.plan.models.regressor import Regressor as Shape
from memconsole_torch.models.linear import Linear
from memconsole_torch.models.table import table


class Regressor(nn.Module):
    """Maps windows (B, T, features) to outputs (B, outputs) of the last step, fp32."""

    def __init__(self, model: Shape) -> None:
        super().__init__()
        self.model = model
        self.input = Linear(model.features, model.hidden_size)
        self.positions = table(model.max_positions, model.hidden_size)
        self.layers = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.head = Linear(model.hidden_size, model.outputs)

    def forward(self, windows: Tensor) -> Tensor:
        x = self.embed(windows)
        for block in self.layers:
            x = block(x)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x[:, -1], self.head.weight.float(), self.head.bias.float())

    def embed(self, windows: Tensor) -> Tensor:
        """Input of the first block, fp32 (B, T, H)."""
        return self.input(windows).float() + self.positions.weight[: windows.shape[1]]


class Block(nn.Module):
    """``norm(x + attention(x))``, then ``norm(x + mlp(x))`` (Vaswani et al. 2017, section 3.1)."""

    def __init__(self, model: Shape) -> None:
        super().__init__()
        width = model.hidden_size
        self.attention = Attention(model)
        self.attention_norm = Norm(width, eps=model.norm_eps)
        self.mlp = MLP(width, model.intermediate_size)
        self.mlp_norm = Norm(width, eps=model.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x).float())
        return self.mlp_norm(x + self.mlp(x).float())


class Norm(nn.LayerNorm):
    """LayerNorm in fp32, also if several devices gather its weights in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(
            x, self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        )


class Attention(nn.Module):
    """Causal self-attention without biases."""

    def __init__(self, model: Shape) -> None:
        super().__init__()
        width = model.hidden_size
        self.head_size = model.head_size
        self.query = Linear(width, width, bias=False)
        self.key = Linear(width, width, bias=False)
        self.value = Linear(width, width, bias=False)
        self.output = Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, self.head_size).transpose(1, 2)  # (B, A, T, D)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # scale: D ** -0.5
        return self.output(attended.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """Up, tanh-approximated GELU, down."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.up = Linear(width, intermediate)
        self.down = Linear(intermediate, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))
