"""Language modeling: a decoder predicts the next token of text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import cast

from memconsole.plan.errors import PlanError
from memconsole.plan.models.architecture import Architecture
from memconsole.plan.models.model import Model, Parameter
from memconsole.plan.sections import Plan
from memconsole.plan.tasks.task import Input, Measure

MASKED = -100
"""The target id of tokens that do not count in the loss."""


class Language:
    """Causal language modeling. The loss is in nats per unmasked token."""

    name = "language"
    model_type: type[Model] = Architecture
    unit, units, positions = "token", "tokens", "tokens"
    loss = Measure("loss", "loss", "nats")
    judges: tuple[Measure, ...] = ()
    files: tuple[str, ...] = ()
    measures: tuple[Measure, ...] = ()
    derived: tuple[Measure, ...] = (
        Measure("bits_per_byte", "bits/byte"),
        Measure("exact_match", "exact match", lower_is_better=False),
        Measure("token_f1", "token F1", lower_is_better=False),
        Measure("nearest_token_f1", "token F1 of the nearest record's", "", False, "nearest F1"),
        Measure("frequent_token_f1", "token F1 of the most frequent", "", False, "frequent F1"),
    )
    baselines: tuple[Measure, ...] = (
        Measure("unigram_loss", "unigram model", "nats", short="unigram"),
    )
    beside_base = ""

    def inputs(self, plan: Plan, model: Model) -> tuple[Input, ...]:
        """Token ids, the next tokens, and, if documents are isolated, each token's document."""
        row = (plan.data.sequence_length,)
        arrays = (Input("inputs", "int32", row), Input("targets", "int32", row, MASKED))
        isolated = plan.data.isolate_documents
        return (*arrays, Input("documents", "int32", row)) if isolated else arrays

    def sums(self, model: Model) -> int:
        return len(self.measures)

    def units_per_row(self, plan: Plan) -> int:
        return plan.data.sequence_length

    def trained(self, plan: Plan, model: Model) -> list[Parameter]:
        """Every weight that the loss depends on, or none if the base is frozen. Adapters are added separately."""
        o = plan.optimize
        return [] if o.freeze_base or o.lora_rank else list(_used(cast(Architecture, model)))

    def flops_per_row(self, plan: Plan, model: Model) -> float:
        """Two operations for each weight and token, and attention over half of the row
        (Kaplan et al. 2020, arXiv:2001.08361, table 1). Of experts, only those count that a token uses."""
        a, length = cast(Architecture, model), plan.data.sequence_length
        matrices = sum(p.size for p in a.parameters() if p.role == "matrix")
        experts = sum(p.size for p in a.parameters() if p.role == "experts")
        used = matrices + int(a.active_share * experts) + a.vocab_size * a.hidden_size
        attention_per_token = 2 * length * a.query_width * a.layers
        return 2.0 * length * used + length * attention_per_token

    def not_applicable(self, plan: Plan) -> Mapping[str, str]:
        return {}

    def check(self, plan: Plan, model: Model) -> None:
        """Raise `PlanError` for a setting that a model with experts is not trained with."""
        if cast(Architecture, model).experts:
            _check_experts(plan)
        elif plan.train.expert_balance is not None:
            raise PlanError(
                f"train.expert_balance = {plan.train.expert_balance:g}: {plan.model.name} has no experts; leave it out",
                "train.expert_balance",
            )


def _check_experts(plan: Plan) -> None:
    if plan.optimize.lora_targets == "mlp":
        raise PlanError(
            f'optimize.lora_targets = "mlp": {plan.model.name} has experts; experts get no adapters; expected attention',
            "optimize.lora_targets",
        )


@lru_cache(maxsize=256)
def _used(a: Architecture) -> tuple[Parameter, ...]:
    return tuple(p for p in a.parameters() if p.used)


LANGUAGE = Language()
