"""Recommendation: predicts the next item of a person's history, through a decoder that may be frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping

from memconsole.plan import catalog
from memconsole.plan.catalog.item_counts import item_count
from memconsole.plan.catalog.ratings import NAMES, RATING_FILES, check_ratings, rating_file
from memconsole.plan.errors import PlanError, quote
from memconsole.plan.models.model import Model, Parameter
from memconsole.plan.models.recommender import Recommender, is_of_decoder
from memconsole.plan.sections import Plan
from memconsole.plan.tasks.task import Input, Measure

PADDING = 0
"""The item at positions without an item. As a target it does not count."""
ABSENT = -1e9
"""The logit of a place of a cluster that holds no item."""
CUTOFFS = (1, 5, 10)
RANKED = tuple(f"{kind}_at_{k}" for kind in ("recall", "mrr", "ndcg") for k in CUTOFFS)
"""Keys of the measures of a ranking, in the order in which backends return their sums."""
GAINS = tuple(
    tuple(gain * (rank <= k) for gain in (1.0, 1 / rank, 1 / math.log2(rank + 1)) for k in CUTOFFS)
    for rank in range(1, max(CUTOFFS) + 1)
)
"""What an item at each rank from 1 adds to each of `RANKED`. Items with equal scores share their ranks evenly."""
BASELINES = {"popularity": "popularity", "knn": "item-kNN"}
"""Label of each baseline that ranks items, by the prefix of its measures."""
_TEXT = "the data are histories of items, not text"
_HEADLINES = {"recall_at_10": "R@10", "ndcg_at_10": "NDCG@10"}
_NAMES = {"recall": "Recall", "mrr": "MRR", "ndcg": "NDCG"}


def _measure(key: str, prefix: str = "") -> Measure:
    kind, _, cutoff = key.partition("_at_")
    of = f"{BASELINES[prefix]} " if prefix else ""
    return Measure(
        f"{prefix}_{key}" if prefix else key,
        f"{of}{_NAMES[kind]}@{cutoff}",
        lower_is_better=False,
        short=f"{of}{_HEADLINES[key]}" if key in _HEADLINES else "",
        headline=key == "recall_at_10" if prefix else key in _HEADLINES,
    )


class Recommendation:
    """The loss is in nats per item: of its cluster, and of the item among those of its cluster."""

    name = "recommendation"
    model_type: type[Model] = Recommender
    files: tuple[str, ...] = RATING_FILES
    unit, units, positions = "interaction", "interactions", "items"
    loss = Measure("loss", "loss", "nats")
    measures: tuple[Measure, ...] = tuple(_measure(key) for key in RANKED)
    derived: tuple[Measure, ...] = tuple(
        _measure(key, prefix) for prefix in BASELINES for key in RANKED
    )
    judges: tuple[Measure, ...] = (_measure("ndcg_at_10"), _measure("recall_at_10"))
    """NDCG tells the order of items that Recall counts alike. Checkpoints may hold Recall@10 alone."""
    baselines: tuple[Measure, ...] = (
        Measure("popularity_loss", "popularity", "nats", short="popularity"),
    )
    beside_base = "the item table and its adapter"

    def inputs(self, plan: Plan, model: Model) -> tuple[Input, ...]:
        """Items, and the item that follows each of them; 0 where there is none."""
        row = (plan.data.sequence_length,)
        return (Input("items", "int32", row), Input("targets", "int32", row))

    def sums(self, model: Model) -> int:
        return len(self.measures)

    def units_per_row(self, plan: Plan) -> int:
        return plan.data.sequence_length

    def trained(self, plan: Plan, model: Model) -> list[Parameter]:
        """Everything, or with a frozen base only what lies outside the decoder."""
        whole = plan.optimize.freeze_base
        return [p for p in model.parameters() if not (whole and is_of_decoder(p))]

    def flops_per_row(self, plan: Plan, model: Model) -> float:
        """Two operations for each weight of the decoder and position, attention over half of the row,
        the scores of clusters and of a cluster's items, and the adapter, shared by a micro-batch's rows."""
        assert isinstance(model, Recommender)
        a, length = model.decoder, plan.data.sequence_length
        matrices = sum(p.size for p in model.parameters() if p.role == "matrix")
        adapter = sum(p.size for p in model.parameters() if p.role == "input")
        scores = a.hidden_size * (model.clusters + model.cluster_size)
        attention = 2 * length * a.query_width * a.layers
        projected = adapter * (model.rows + model.clusters) / plan.train.batch_size
        return 2.0 * length * (matrices + scores) + length * attention + 2.0 * projected

    def not_applicable(self, plan: Plan) -> Mapping[str, str]:
        return {
            "optimize.fused_loss": "the loss is always computed in chunks",
            "optimize.tiled_mlp": "histories are short, and the table of items decides the memory",
            "optimize.lora_rank": f"{self.beside_base} are trained instead of adapters in the decoder",
            "data.isolate_documents": "a row holds the history of one person",
            "data.streaming": "histories are held in memory",
            "data.shuffle_buffer": "all rows are shuffled",
            "train.sample_tokens": _TEXT,
        }

    def check(self, plan: Plan, model: Model) -> None:
        """Raise `PlanError` for adapters, rows that are too long, or data that are not ratings, or of more items than the
        model's."""
        assert isinstance(model, Recommender)
        known = catalog.datasets().get(plan.data.source)
        file = rating_file(plan.data.source if known is None else known.where, plan.data)
        if file is None:
            raise PlanError(
                f"data.source = {quote(plan.data.source)}: {plan.model.name} learns from ratings; "
                f"expected a table ({' '.join(RATING_FILES)}), or a folder with {' or '.join(NAMES)}",
                "data.source",
            )
        check_ratings(file, plan.data)
        if plan.optimize.lora_rank:
            raise PlanError(
                f"optimize.lora_rank: {self.not_applicable(plan)['optimize.lora_rank']}",
                "optimize.lora_rank",
            )
        count = item_count(file, plan.data) if plan.model.items is not None else None
        if count is not None and count > model.items:
            raise PlanError(
                f"model.items = {model.items:,}: {file} holds {count:,} items; expected at least {count:,}, or none",
                "model.items",
            )
        counting = catalog.ratings_to_count(plan) and catalog.assumed_items(plan)
        if model.clusters > model.items and not counting:
            raise PlanError(
                f"model.clusters = {model.clusters:,}: expected at most model.items = {model.items:,}",
                "model.clusters",
            )
        length, a = plan.data.sequence_length, model.decoder
        if a.positions == "learned" and length > a.max_positions:
            raise PlanError(
                f"data.sequence_length = {length:,}: the decoder of {plan.model.name} has "
                f"{a.max_positions:,} learned positions; expected at most {a.max_positions:,}",
                "data.sequence_length",
            )


RECOMMENDATION = Recommendation()
