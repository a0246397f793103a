"""The pickers of the plan screen: model, data, device, backend, preset, and any setting by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memconsole.path_completion import ONLY_FOLDERS
from memconsole.plan import plan as plans
from memconsole.plan.plan import Plan, PlanError
from memconsole.plan.sections.words import known_as
from memconsole.plan.training import recipe
from memconsole.tui.plan.dialogs.owner import PlanOwner
from memconsole.units import value_word

if TYPE_CHECKING:
    from memconsole.tui.plan.dialogs.choices import Kind


class Pickers:
    """Each method opens a dialog; the picked value changes the plan."""

    def __init__(self, owner: PlanOwner) -> None:
        self._owner = owner

    def pick(self, kind: Kind, key: str) -> None:
        """Pick the value of the setting `key` from the catalog entries of a `kind`."""
        from memconsole.plan import catalog
        from memconsole.tui.plan.dialogs.choices import choices_for
        from memconsole.tui.screens.pick import PickScreen

        def picked(value: object) -> None:
            if isinstance(value, str):
                self._owner.change(lambda plan: catalog.choose(plan, key, value))

        if kind == "device":
            self._device()
            return
        choices, free = choices_for(kind, self._owner.view.plan, self._owner.view.devices)
        present = str(plans.get(self._owner.view.plan, key))
        suffixes = {"model": ONLY_FOLDERS, "dataset": ()}.get(kind)
        screen = PickScreen(f"choose the {kind}", choices, present, free, suffixes=suffixes)
        self._owner.open(screen, picked)

    def _device(self) -> None:
        """Pick a device of this machine, a partition of a cluster, or a device of the catalog."""
        from memconsole.devices import cluster
        from memconsole.plan import catalog
        from memconsole.tui.plan.dialogs.choices import SLURM, choices_for
        from memconsole.tui.screens.pick import PickScreen

        plan, devices = self._owner.view.plan, self._owner.view.devices

        def picked(value: object) -> None:
            if not isinstance(value, str):
                return
            named = value.removeprefix(SLURM) if value.startswith(SLURM) else None
            changes: dict[str, object] = {"device.name": value}
            if value not in catalog.devices():
                changes["launch.on"] = "here"
            for partition in cluster.PARTITIONS.known:
                if partition.name == named:
                    changes = cluster.changes(plan, partition)
            self._owner.change(lambda plan: plans.replace(plan, changes))

        choices, free = choices_for("device", plan, devices)
        present = plan.device.name
        if plan.launch.on == "slurm" and plan.launch.partition:
            present = SLURM + plan.launch.partition
        self._owner.open(PickScreen("choose the device", choices, present, free), picked)

    def preset(self) -> None:
        """Pick a whole plan to start from."""
        from memconsole.plan import catalog
        from memconsole.tui.screens.pick import Choice, PickScreen

        choices = [
            Choice(name, name, f"{entry.label} · {entry.help}")
            for name, entry in catalog.presets().items()
        ]

        def picked(value: object) -> None:
            if isinstance(value, str):
                self._owner.change(lambda _: catalog.preset(value))

        self._owner.open(PickScreen("start from a preset", choices), picked)

    def setting(self) -> None:
        """Find a setting, then pick its value, or type it; the prompt stays until the value is allowed."""
        from memconsole.tui.screens.pick import Choice, PickScreen

        plan = self._owner.view.plan
        choices = [
            Choice(
                key,
                key,
                f"{_value(plan, key)} · {setting.help}",
                28,
                "\n".join(known_as(key)),
            )
            for key, setting in plans.SETTINGS.items()
        ]

        def picked(value: object) -> None:
            if isinstance(value, str):
                self._edit_setting(value)

        self._owner.open(PickScreen("change a setting", choices), picked)

    def _edit_setting(self, key: str) -> None:
        from memconsole.plan import catalog
        from memconsole.plan.data.paths import FILES
        from memconsole.tui.screens.pick import Choice, PickScreen
        from memconsole.tui.screens.prompt import PromptScreen

        setting = plans.SETTINGS[key]
        text = plans.written(plans.get(self._owner.view.plan, key))

        def refusal(word: str) -> str | None:
            try:
                catalog.choose(self._owner.view.plan, key, plans.parse_value(key, word))
            except PlanError as error:
                return str(error)
            return None

        def entered(word: object) -> None:
            if isinstance(word, str):
                self._owner.change(
                    lambda plan: catalog.choose(plan, key, plans.parse_value(key, word))
                )

        switch = ("true", "false") if setting.holds is bool and not setting.optional else ()
        if named := setting.choices or switch:
            choices = [Choice(name, name, sentence=setting.help) for name in named]
            self._owner.open(PickScreen(key, choices, text), entered)
            return
        about = f"{setting.help} — {setting.expects}"
        suffixes = () if key in FILES else None
        self._owner.open(PromptScreen(key, text, about, refusal, suffixes), entered)


def _value(plan: Plan, key: str) -> str:
    """The value of a setting, and the number that stands for one that follows others."""
    value = plans.get(plan, key)
    numbers = {
        "train.learning_rate": recipe.learning_rate,
        "train.weight_decay": recipe.weight_decay,
    }
    if value is not None or key not in numbers:
        return value_word(value)
    try:
        return f"{numbers[key](plan):g} (auto)"
    except PlanError:  # the estimate says what is wrong with the plan
        return "auto"
