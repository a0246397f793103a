"""Regression on windows: predicts a vector at the last step of a window of vectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from memconsole.plan import catalog
from memconsole.plan.catalog.windows import (
    DATASETS,
    WINDOW_FILES,
    too_long,
    window_problem,
    window_sizes,
)
from memconsole.plan.errors import PlanError, quote
from memconsole.plan.models.model import Model, Parameter
from memconsole.plan.models.regressor import Regressor
from memconsole.plan.sections import Plan
from memconsole.plan.tasks.task import Input, Measure

_NO_BASE = "a regressor trains all of its weights; it has no base to freeze"
_WINDOWS = "the data are windows of numbers, not text"

LISTED_OUTPUTS = 4
"""The most outputs whose errors are told one by one; of more, only the lowest and the highest."""


def rmse_key(output: int) -> str:
    """The key of the root mean squared error of an output, counted from 0."""
    return f"rmse_{output + 1}"


def _cost_ratios() -> Iterator[Measure]:
    """The cost of simulated systems over the optimal one, by system and by control, beside the headline."""
    controls = {"": "", "zero_": "no control", "linear_": "linear map"}
    controls["ridge_"] = "linear map of each family"
    for systems_key, systems in (("", "unseen systems"), ("seen_", "systems trained on")):
        for control_key, control in controls.items():
            if systems_key or control_key:
                yield Measure(
                    f"{systems_key}{control_key}cost_ratio",
                    f"x optimal cost on {systems}" + (f", {control}" if control else ""),
                    short=control,
                    headline=False,
                    summed_up=not systems_key,
                )


_COST_RATIOS = tuple(_cost_ratios())
_OUTPUT_ERRORS = tuple(
    Measure(key, f"RMSE of {output}", headline=False, summed_up=True)
    for key, output in (
        *((rmse_key(output), f"output {output + 1}") for output in range(LISTED_OUTPUTS)),
        ("least_rmse", "the best output"),
        ("most_rmse", "the worst output"),
    )
)


class Regression:
    """The loss is the squared error of the outputs that the mask keeps, divided by their number."""

    name = "regression"
    model_type: type[Model] = Regressor
    unit, units, positions = "window", "windows", "steps"
    loss = Measure("loss", "masked MSE")
    files: tuple[str, ...] = WINDOW_FILES
    measures: tuple[Measure, ...] = ()
    derived: tuple[Measure, ...] = (
        Measure("mean_absolute_error", "mean absolute error", short="MAE"),
        Measure("units_loss", "masked MSE in the file's units", short="MSE in units"),
        Measure("cost_ratio", "x optimal cost on unseen systems", short="x optimal cost"),
        Measure("unseen_loss", "masked MSE on unseen systems", short="unseen"),
        Measure("ridge_loss", "loss of a linear map of each family", short="family map"),
        *_COST_RATIOS,
        Measure("unseen_zero_loss", "zero output on unseen systems", headline=False),
        Measure("unseen_mean_loss", "mean output on unseen systems", headline=False),
        Measure("unseen_linear_loss", "linear map on unseen systems", headline=False),
        *_OUTPUT_ERRORS,
    )
    """Errors are in the units of the file, also if the numbers are standardized for training; the loss is not. In closed
    loop: the median cost of the model's control over that of the optimal control. A linear map of each family knows the
    family, which the model does not; its loss is no baseline that the model must beat."""
    judges: tuple[Measure, ...] = (
        Measure("cost_ratio", "x optimal cost on unseen systems", short="x optimal cost"),
        Measure("seen_cost_ratio", "x optimal cost on systems trained on", short="x optimal cost"),
    )
    baselines: tuple[Measure, ...] = (
        Measure("zero_loss", "zero output", short="zero"),
        Measure("mean_loss", "mean output", short="mean"),
        Measure("linear_loss", "linear map of the last step", short="linear"),
        Measure("window_loss", "linear map of the window", short="window map"),
    )
    beside_base = ""

    def inputs(self, plan: Plan, model: Model) -> tuple[Input, ...]:
        """Windows, the target outputs at their last step, and a mask of the outputs that count (1 or 0)."""
        assert isinstance(model, Regressor)
        return (
            Input("windows", "float32", (plan.data.sequence_length, model.features)),
            Input("targets", "float32", (model.outputs,)),
            Input("mask", "float32", (model.outputs,)),
        )

    def sums(self, model: Model) -> int:
        """The squared error of each output, and then the absolute error of each."""
        assert isinstance(model, Regressor)
        return 2 * model.outputs

    def units_per_row(self, plan: Plan) -> int:
        return 1

    def trained(self, plan: Plan, model: Model) -> list[Parameter]:
        return list(model.parameters())

    def flops_per_row(self, plan: Plan, model: Model) -> float:
        """Two operations for each weight and step, and attention over half of the window."""
        assert isinstance(model, Regressor)
        length = plan.data.sequence_length
        matrices = sum(p.size for p in model.parameters() if p.role in ("input", "matrix"))
        attention = 2 * length * model.hidden_size * model.layers
        return 2.0 * length * matrices + length * attention

    def not_applicable(self, plan: Plan) -> Mapping[str, str]:
        return {
            "optimize.fused_loss": "the loss is over a few outputs; there are no logits to cut",
            "optimize.tiled_mlp": "windows have few steps, so that the MLP holds little",
            "optimize.lora_rank": _NO_BASE,
            "optimize.freeze_base": _NO_BASE,
            "optimize.base_storage": _NO_BASE,
            "data.isolate_documents": _WINDOWS,
            "data.stride": "the file holds the windows as they are",
            "data.streaming": "windows are always read as they are needed",
            "train.sample_tokens": _WINDOWS,
        }

    def check(self, plan: Plan, model: Model) -> None:
        """Raise `PlanError` for heads that do not share the width equally, a frozen base, a window that is longer than the
        model's positions or the file's windows, or data that are no windows to learn from."""
        known = catalog.datasets().get(plan.data.source)
        where = plan.data.source if known is None else known.where or ""
        if not where.lower().endswith(WINDOW_FILES):
            windows, controls = DATASETS[:2]
            raise PlanError(
                f"data.source = {quote(plan.data.source)}: {plan.model.name} learns from windows of numbers; "
                f"expected an HDF5 file ({', '.join(WINDOW_FILES)}) with {windows} (rows, steps, features) and {controls} "
                "(rows, outputs)",
                "data.source",
            )
        if (problem := window_problem(where)) is not None:
            raise PlanError(f"{where}: {problem}", "data.source")
        assert isinstance(model, Regressor)
        if model.hidden_size % model.heads:
            raise PlanError(
                f"model.hidden_size = {model.hidden_size:,}: expected a multiple of model.heads = {model.heads:,}",
                "model.hidden_size",
            )
        o, length = plan.optimize, plan.data.sequence_length
        if o.lora_rank or o.freeze_base:
            key = "lora_rank" if o.lora_rank else "freeze_base"
            raise PlanError(f"optimize.{key}: {_NO_BASE}", f"optimize.{key}")
        if length > model.max_positions:
            raise PlanError(
                f"data.sequence_length = {length:,}: {plan.model.name} has "
                f"{model.max_positions:,} positions; expected at most {model.max_positions:,}",
                "data.sequence_length",
            )
        sizes = window_sizes(where)
        if sizes is not None and length > sizes.length:
            raise too_long(where, length, sizes.length)


REGRESSION = Regression()
