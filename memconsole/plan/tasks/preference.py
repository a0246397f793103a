"""Preferences: a language model learns which of two answers people prefer, by DPO, ORPO or SimPO."""

from __future__ import annotations

import math
from collections.abc import Mapping

from memconsole.plan.errors import PlanError, quote
from memconsole.plan.models.model import Model
from memconsole.plan.sections import Plan
from memconsole.plan.sections.train import OBJECTIVE_NAMES, Objective, TrainChoice
from memconsole.plan.tasks.language import Language
from memconsole.plan.tasks.task import Input, Measure

REFERENCE_LOSS = math.log(2.0)
"""The loss of DPO of the model that training starts from: it has no preference."""
LEAST_SHARE = 1e-6
"""ORPO takes the probability of all other answers as at least this, so that the odds of a certain answer are finite."""
_PAIR = "a row holds one answer of a pair"


class Preference(Language):
    """Two rows in succession are a pair: the preferred answer, then the rejected one. Each answer has a reward r, and the
    preference loss of a pair is -log sigmoid(r_chosen - r_rejected). Below, log p is the sum of the log-likelihoods of an
    answer's tokens, and m their mean.

    DPO (Rafailov et al. 2023, arXiv:2305.18290, equation 7): r = `train.dpo_beta` (log p - log p_reference), where the
    reference are the weights that training started from.

    ORPO (Hong et al. 2024, arXiv:2403.07691, equations 4 to 7): r = m - log(1 - exp m), the log odds of the answer. The
    preference loss is multiplied by `train.orpo_lambda`, and -m of the chosen answer is added.

    SimPO (Meng et al. 2024, arXiv:2405.14734, equation 6): r = `train.simpo_beta` m, and the margin that the sigmoid takes is
    smaller by `train.simpo_gamma`.
    """

    measures: tuple[Measure, ...] = (
        Measure("reward_accuracy", "reward accuracy", lower_is_better=False, short="accuracy"),
        Measure("reward_margin", "reward margin", lower_is_better=False, short="margin"),
        Measure(
            "chosen_reward", "reward of chosen answers", "", False, headline=False, summed_up=True
        ),
        Measure("rejected_reward", "reward of rejected answers", headline=False, summed_up=True),
    )
    derived: tuple[Measure, ...] = tuple(m for m in Language.derived if m.key != "bits_per_byte")

    def __init__(self, objective: Objective, name: str) -> None:
        self.name = name
        self.loss = Measure("loss", f"{OBJECTIVE_NAMES[objective]} loss")
        self.has_reference = objective == "dpo"
        """Whether the loss depends on the weights that training starts from."""
        self.baselines: tuple[Measure, ...] = ()
        if self.has_reference:
            self.baselines = (Measure("reference_loss", "reference model", short="reference"),)

    def inputs(self, plan: Plan, model: Model) -> tuple[Input, ...]:
        """Those of language, and the reference's log-likelihood of each row's answer, if there is a reference."""
        arrays = super().inputs(plan, model)
        return (*arrays, Input("reference", "float32", ())) if self.has_reference else arrays

    def not_applicable(self, plan: Plan) -> Mapping[str, str]:
        return {"data.isolate_documents": _PAIR, "data.stride": _PAIR}

    def check(self, plan: Plan, model: Model) -> None:
        """Raise `PlanError` for rows that are no pairs, or settings that preferences are not learned with."""
        super().check(plan, model)
        t, d, name = plan.train, plan.data, plan.objective_name
        if d.template is None:
            raise PlanError(
                f"train.objective = {t.objective}: needs data.template, which writes the prompt and the answers of a pair",
                "train.objective",
            )
        for key, rows in (
            ("train.batch_size", t.batch_size),
            ("train.evaluation_batch_size", plan.evaluation_batch),
        ):
            if rows % plan.rows_together:
                raise PlanError(
                    f"{key} = {rows:,}: with {name} two rows are a pair; expected an even number",
                    key,
                )
        refused = (
            ("data.isolate_documents", d.isolate_documents, False, f"{_PAIR}; expected false"),
            ("data.mix", d.mix, None, f"{name} learns from one source of pairs; leave it out"),
            ("hybrid.mode", plan.hybrid.mode, "off", f"weights are not predicted with {name}; expected off"),
        )  # fmt: skip
        for key, value, allowed, reason in refused:
            if value != allowed:
                raise PlanError(f"{key} = {quote(value)}: {reason}", key)


def weight_and_gamma(t: TrainChoice) -> tuple[float, float]:
    """What the preference loss of a pair is multiplied by, and what the margin of its rewards must reach."""
    weight = t.orpo_lambda if t.objective == "orpo" else 1.0
    return weight, t.simpo_gamma if t.objective == "simpo" else 0.0


PREFERENCES: dict[Objective, Preference] = {
    "dpo": Preference("dpo", "preference"),
    "orpo": Preference("orpo", "orpo"),
    "simpo": Preference("simpo", "simpo"),
}
"""The task of each objective."""
