"""Recommends the next items, with the weights, sizes and item ids in this file's folder.

It needs torch and safetensors, and computes in float32:

    python model.py 31 7 112          # the ids of a person's items, the last one last

    from model import Recommender
    Recommender().recommend(["31", "7", "112"], top=10)
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


class Recommender:
    """Items become the inputs of a decoder. Its outputs are scored against all clusters and items."""

    def __init__(self, folder: Path = Path(__file__).parent) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.ids = json.loads((folder / "items.json").read_text(encoding="utf-8"))
        """The id of each row of the item table; null where there is none."""
        self.rows = {item: row for row, item in enumerate(self.ids) if item is not None}
        stored = load_file(folder / "model.safetensors")
        self.weights = {name: tensor.float() for name, tensor in stored.items()}
        self.items = self.adapter(self.weights["items.weight"])  # (rows, H)
        self.clusters = self.adapter(self.weights["clusters.weight"])  # (C, H)

    def recommend(
        self, history: list[str], top: int = 10, seen: bool = False
    ) -> list[tuple[str, float]]:
        """The most likely next items after `history`, with log P(item). Items of the history are left out
        unless `seen`; ids that the model does not know are ignored."""
        rows = [self.rows[item] for item in history if item in self.rows]
        if not rows:
            raise ValueError("the history holds no item that the model knows")
        left_out = set() if seen else set(rows)
        scores = self.scores(torch.tensor([rows[-self.config["sequence_length"] :]]))[0, -1]
        order = (scores.argsort(descending=True, stable=True) + 1).tolist()
        best = [row for row in order if self.ids[row] is not None and row not in left_out][:top]
        return [(self.ids[row], float(scores[row - 1])) for row in best]

    def scores(self, rows: Tensor) -> Tensor:
        """log P(item) of all items (B, T, rows - 1) after each of the items `rows` (B, T); row r of the table
        is column r - 1."""
        items, clusters = self.config["items"], self.config["clusters"]
        hidden = self.decoder(F.embedding(rows, self.items))  # (B, T, H)
        of_cluster = F.linear(hidden, self.clusters).log_softmax(-1)  # (B, T, C)
        of_item = F.linear(hidden, self.items[1:]).unflatten(-1, (clusters, -1))
        fewest, more = divmod(items, clusters)  # the first clusters have one item more
        members = fewest + (torch.arange(clusters) < more).long()
        present = torch.arange(of_item.shape[-1]) < members[:, None]
        present &= torch.tensor([item is not None for item in self.ids[1:]]).view_as(present)
        of_item = of_item.masked_fill(~present, -1e9).log_softmax(-1)
        return (of_item + of_cluster[..., None]).flatten(-2)

    def adapter(self, x: Tensor) -> Tensor:
        for name in ("adapter.up", "adapter.down"):
            x = F.gelu(self.linear(name, x), approximate="tanh")
        return x

    def decoder(self, x: Tensor) -> Tensor:
        """Run x (B, T, H) through the blocks and the last norm."""
        a, length = self.config["decoder"], x.shape[1]
        x = x * (a["hidden_size"] ** 0.5 if a["scale_embeddings"] else a["embedding_multiplier"])
        if a["positions"] == "learned":
            x = x + self.weights["positions.weight"][:length]
        for layer in range(a["layers"]):
            window = a["sliding_window"]
            local = window is not None and (layer + 1) % a["global_every"] != 0
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            seen = seen.triu(1 - window) if local else seen
            turn: str | None = "local" if local else "global"
            if a["unrotated_every"] and (layer + 1) % a["unrotated_every"] == 0:
                turn = None
            at = f"layers.{layer}"
            y = self.norm(f"{at}.attention_norm", x) if a["pre_norms"] else x
            y = self.attention(f"{at}.attention", y, seen, turn)
            y = self.norm(f"{at}.attention_post_norm", y) if a["post_norms"] else y
            summed = x + a["residual_multiplier"] * y
            x = x if a["parallel_residual"] else summed
            y = self.mlp(f"{at}.mlp", self.norm(f"{at}.mlp_norm", x) if a["pre_norms"] else x)
            y = self.norm(f"{at}.mlp_post_norm", y) if a["post_norms"] else y
            x = summed + a["residual_multiplier"] * y
        return self.norm("norm", x)

    def attention(self, name: str, x: Tensor, seen: Tensor, turn: str | None) -> Tensor:
        """Attention of x (B, T, H) over the positions that are `seen` (T, T). `turn` names its rotation."""
        a = self.config["decoder"]
        q, k, v = (self.linear(f"{name}.{part}", x) for part in ("query", "key", "value"))
        if a["joint_query_key_norm"]:
            q, k = self.norm(f"{name}.query_norm", q), self.norm(f"{name}.key_norm", k)
        q, k, v = (y.unflatten(-1, (-1, a["head_size"])) for y in (q, k, v))  # (B, T, A, D)
        if a["query_key_norm"] and not a["joint_query_key_norm"]:
            q, k = self.norm(f"{name}.query_norm", q), self.norm(f"{name}.key_norm", k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # (B, A, T, D)
        if a["positions"] == "rope" and turn is not None:
            q, k = self.rotated(q, turn) * self.growth(q.shape[2], turn), self.rotated(k, turn)
        k, v = (y.repeat_interleave(a["heads"] // a["kv_heads"], dim=1) for y in (k, v))
        scores = q @ k.mT * (a["attention_scale"] or a["head_size"] ** -0.5)
        if a["attention_cap"] is not None:
            scores = a["attention_cap"] * (scores / a["attention_cap"]).tanh()
        y = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
        return self.linear(f"{name}.output", y.transpose(1, 2).flatten(-2))

    def rotated(self, x: Tensor, turn: str) -> Tensor:
        """x (B, A, T, D), the first elements of each head rotated by their position (rotary positions)."""
        turns = torch.tensor(self.config["rotation"][turn]["angles"])
        angles = torch.outer(torch.arange(x.shape[2]), turns)
        factor = self.config["rotation"][turn]["factor"]
        cos, sin = angles.cos() * factor, angles.sin() * factor
        size = 2 * len(turns)
        first, second = x[..., :size].chunk(2, dim=-1)
        ahead, across = first * cos - second * sin, second * cos + first * sin
        return torch.cat((ahead, across, x[..., size:]), dim=-1)

    def growth(self, length: int, turn: str) -> Tensor:
        """What queries (B, A, T, D) are multiplied by, (T, 1)."""
        rotation = self.config["rotation"][turn]
        terms = torch.arange(length).div(rotation["original_positions"]).floor().log1p()
        return 1 + rotation["query_beta"] * terms[:, None]

    def mlp(self, name: str, x: Tensor) -> Tensor:
        a = self.config["decoder"]
        y = self.linear(f"{name}.{'gate' if a['gated_mlp'] else 'up'}", x)
        approximate = "none" if a["activation"] == "gelu" else "tanh"
        y = F.silu(y) if a["activation"] == "silu" else F.gelu(y, approximate=approximate)
        y = y * self.linear(f"{name}.up", x) if a["gated_mlp"] else y
        return self.linear(f"{name}.down", y)

    def norm(self, name: str, x: Tensor) -> Tensor:
        a = self.config["decoder"]
        if a["norm"] == "layernorm" and not name.endswith(("query_norm", "key_norm")):
            x = x - x.mean(-1, keepdim=True)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + a["norm_eps"])
        y = y * (self.weights[f"{name}.weight"] + (1.0 if a["norm_unit_offset"] else 0.0))
        return y + self.weights.get(f"{name}.bias", 0.0)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("usage: python model.py ITEM...   (the last one is the newest)")
    try:
        found = Recommender().recommend(sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
    for item, score in found:
        print(f"{item}\t{score:.6f}")
