"""Preferences: a language model learns by DPO which of two answers people prefer."""

from __future__ import annotations

import math
from collections.abc import Mapping

from memconsole.plan.errors import PlanError, quote
from memconsole.plan.models.model import Model
from memconsole.plan.sections import Plan
from memconsole.plan.tasks.language import Language
from memconsole.plan.tasks.task import Input, Measure

REFERENCE_LOSS = math.log(2.0)
"""The loss of the model that training starts from: it has no preference."""
_PAIR = "a row holds one answer of a pair"


class Preference(Language):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    Two rows in succession are a pair: the preferred answer, then the rejected one. The loss of a pair is -log sigmoid(chosen
    reward - rejected reward). The reward of an answer is `train.dpo_beta` times how much its log-likelihood has grown
    since the weights that training started from, the reference.
    """

    name = "preference"
    loss = Measure("loss", "DPO loss")
    measures: tuple[Measure, ...] = (
        Measure("reward_accuracy", "reward accuracy", lower_is_better=False, short="accuracy"),
        Measure("reward_margin", "reward margin", lower_is_better=False, short="margin"),
        Measure(
            "chosen_reward", "reward of chosen answers", "", False, headline=False, summed_up=True
        ),
        Measure("rejected_reward", "reward of rejected answers", headline=False, summed_up=True),
    )
    derived: tuple[Measure, ...] = tuple(m for m in Language.derived if m.key != "bits_per_byte")
    baselines: tuple[Measure, ...] = (
        Measure("reference_loss", "reference model", short="reference"),
    )

    def inputs(self, plan: Plan, model: Model) -> tuple[Input, ...]:
        """Those of language, and the reference's log-likelihood of each row's answer."""
        return (*super().inputs(plan, model), Input("reference", "float32", ()))

    def not_applicable(self, plan: Plan) -> Mapping[str, str]:
        return {"data.isolate_documents": _PAIR, "data.stride": _PAIR}

    def check(self, plan: Plan, model: Model) -> None:
        """Raise `PlanError` for rows that are no pairs, or settings that DPO does not train with."""
        super().check(plan, model)
        t, d = plan.train, plan.data
        if d.template is None:
            raise PlanError(
                "train.objective = dpo: needs data.template, which writes the prompt and the answers of a pair",
                "train.objective",
            )
        for key, rows in (
            ("train.batch_size", t.batch_size),
            ("train.evaluation_batch_size", plan.evaluation_batch),
        ):
            if rows % plan.rows_together:
                raise PlanError(
                    f"{key} = {rows:,}: with DPO two rows are a pair; expected an even number", key
                )
        refused = (
            ("data.isolate_documents", d.isolate_documents, False, f"{_PAIR}; expected false"),
            ("data.mix", d.mix, None, "DPO learns from one source of pairs; leave it out"),
            ("hybrid.mode", plan.hybrid.mode, "off", "weights are not predicted with DPO; expected off"),
        )  # fmt: skip
        for key, value, allowed, reason in refused:
            if value != allowed:
                raise PlanError(f"{key} = {quote(value)}: {reason}", key)


PREFERENCE = Preference()
