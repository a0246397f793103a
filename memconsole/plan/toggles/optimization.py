"""The record of one memory optimization: everything that the console, the solver and the trainers know about it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan
from memconsole.plan.tasks import task_of

Values = Callable[[Plan], tuple[Any, ...]]

HOST_MEMORY = "host memory"
"""In `Optimization.touches`: the machine's own memory, which is not a row of the memory table."""


class Result(enum.Enum):
    """What a change does to the training result, the least harmful first. The values are the words shown to users."""

    SAME = ""
    """The same up to the order of rounding."""
    ARITHMETIC = "16-bit arithmetic"
    STATE_16_BITS = "16-bit optimizer state"
    STATE_8_BITS = "8-bit optimizer state"
    OPTIMIZER = "another optimizer"
    CODES = "quantized frozen weights"
    ADAPTERS = "adapters instead of the whole model"
    PREDICTED = "weights predicted in place of steps"
    DATA = "what is trained on"
    """The rows, their order, their length, or how many form a step."""
    MODEL = "the model itself"


class Reach(enum.Enum):
    """Which part of a training step an optimization changes."""

    STEP = enum.auto()
    """The forward or the backward pass."""
    UPDATE = enum.auto()
    """Only the optimizer's update and its state."""
    HEAP = enum.auto()
    """Only what the heap of a CPU keeps of freed memory."""
    SIZES = enum.auto()
    """Only how many rows and tokens there are."""
    NOTHING = enum.auto()
    """Nothing on the device."""


class Length(NamedTuple):
    """How many optimizer steps a run takes."""

    steps: int | None
    """None: the size of its data is unknown."""
    known: bool
    """False: guessed from the size of the data."""


class Note(NamedTuple):
    """A note on the plan's value of one setting, in one sentence."""

    key: str
    words: str


class RemedyRule(msgspec.Struct, frozen=True, kw_only=True):
    """How an optimization is offered for a plan that does not fit."""

    rank: int
    """Remedies are offered in ascending rank."""
    values: Values | None = None
    """The values that are offered; None: all."""
    along: dict[str, Any] = {}
    """Settings of other optimizations that must change with it."""
    along_costs: str = ""
    """What these other changes do to the training result."""


class Optimization(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the console's list.

    Fields without a default decide what is priced, offered, cached or trained: each row states them.
    """

    key: str
    """The plan setting that a key press changes."""
    more_settings: tuple[str, ...] = ()
    """Other settings that belong only to this optimization."""
    keyboard: str
    """The key of the plan screen, by Textual's name."""
    label: str
    short: str
    """A label of at most 18 characters, for narrow places."""
    help: str
    costs: str

    values: Values
    """What a key press steps through, in order. The first is the plain value."""
    searched: Values | None = None
    """The values that a search tries, in order; None: `values`."""
    size: bool = False
    """A size rather than a technique."""
    changes: Callable[[Plan, Any], dict[str, Any]] | None = None
    """The settings that a value stands for; None: only that of `key`."""

    absent: dict[str, str] = {}
    """Per backend, why it trains with the plain value only. The other values are priced, but cannot be launched."""
    absent_on: dict[tuple[str, str], str] = {}
    """Per backend and kind of device, the same."""
    conflicts: dict[str, Callable[[Plan], str | None]]
    """Per setting of this row, why its value conflicts with the plan's other settings; None without a conflict."""

    result: Callable[[Any, Any], Result]
    """What changing one value to another, different one does to the training result."""
    reach: Reach
    traced: Callable[[Plan, str], Any] | None = None
    """A coarser cache key than the row's settings: what a training step on a kind of device really depends on. Plans
    with the same value share traces and computed steps."""

    touches: tuple[str, ...]
    """The components of the memory table that it reduces, the main one first; or `HOST_MEMORY`."""
    saves_nothing: Callable[[Plan, str], str | None] | None = None
    """Why a plan's value saves nothing on a kind of device, if that is known without the table."""
    outweighed: Callable[[Plan, Plan], str] | None = None
    """Why a changed plan, the second, may need more memory than the present one."""
    remedy: RemedyRule | None
    """None: never offered for a plan that does not fit."""

    notes: Callable[[Plan, str, Length], tuple[str, ...]] | None = None
    """Notes on the plan's value, for a kind of device and the length of a run. A note refuses nothing."""
    says: Callable[[Plan, str], str | None] | None
    """The line in the trainer's log, on a kind of device, if it is switched on. None: the log does not mention it."""
    evaluating: Callable[[Plan], dict[str, Any]]
    """The settings that switch off what only training needs."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Every plan setting that belongs to this row."""
        return (self.key, *self.more_settings)

    def value(self, plan: Plan) -> Any:
        """The toggle's present value."""
        return plans.get(plan, self.key)

    def settings_for(self, plan: Plan, value: Any) -> dict[str, Any]:
        """The settings that set this toggle of `plan` to `value`."""
        return self.changes(plan, value) if self.changes else {self.key: value}

    def apply(self, plan: Plan, value: Any) -> Plan:
        """`plan` with this toggle at `value`."""
        return plans.replace(plan, self.settings_for(plan, value))

    def tried(self, plan: Plan) -> tuple[Any, ...]:
        """The values that a search tries, in order."""
        return (self.searched or self.values)(plan)

    def next_value(self, plan: Plan) -> Any:
        """What one key press selects: the following value, the first after the last."""
        values = self.values(plan)
        present = self.value(plan)
        return values[(values.index(present) + 1) % len(values)] if present in values else values[0]

    def refusal(self, plan: Plan, value: Any | None = None, kind: str | None = None) -> str | None:
        """Why `plan.backend` cannot train with `value` (default: the plan's) on a kind of device, or None if it can.
        Without a `kind`, only a plan whose device is named `cpu` is judged by its device."""
        chosen = self.value(plan) if value is None else value
        absent = task_of(plan).not_applicable(plan).get(self.key)
        if absent is not None and chosen != self.value(plan):
            return absent
        if chosen == self.values(plan)[0]:
            return None
        on = (plan.backend, kind or ("cpu" if plan.device.name == "cpu" else ""))
        return self.absent.get(plan.backend) or self.absent_on.get(on)

    def result_of(self, before: Any, after: Any) -> Result:
        """What changing this toggle from one value to another does to the training result."""
        return Result.SAME if before == after else self.result(before, after)


def fixed(*values: Any) -> Values:
    """The same values for every plan."""
    return lambda plan: values


def always(result: Result) -> Callable[[Any, Any], Result]:
    """The same result for all values."""
    return lambda before, after: result


def unchanged(plan: Plan) -> dict[str, Any]:
    """For `evaluating`: nothing is switched off."""
    return {}


def switched_off(settings: dict[str, Any]) -> Callable[[Plan], dict[str, Any]]:
    """For `evaluating`: the same settings for every plan."""
    return lambda plan: settings
