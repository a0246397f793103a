"""Sends figures to Weights & Biases, or keeps them in files for `wandb sync`.

The run's id is also its id at W&B, so a resumed run continues there; one that begins again has another. `WANDB_PROJECT`,
`WANDB_ENTITY` and the other variables of W&B apply.
"""

from __future__ import annotations

import os
import shlex

from memconsole_trainer.trackers.tracker import Figures, Told

PROJECT = "memconsole"
CONNECT_SECONDS = 30.0
_STATES = {"finished": 0, "stopped": 0}


class WandbTracker:
    def __init__(self, told: Told) -> None:
        import wandb

        # Only figures are sent: neither output, nor code, nor readings of the machine.
        settings = wandb.Settings(
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            silent=True,
            init_timeout=CONNECT_SECONDS,
        )
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=told.id,
            name=told.name,
            notes=told.note or None,
            tags=told.tags,
            config=told.settings,
            dir=told.folder,
            mode="offline" if told.offline else "online",
            resume=None if told.offline else "allow",
            settings=settings,
        )
        run.define_metric("epoch")
        run.define_metric("epoch/*", step_metric="epoch")
        self._run = run
        self._step = 0
        self.tracked = told.id
        # One set of files for each attempt; `--id` joins them.
        files = f"{shlex.quote(str(told.folder / 'wandb'))}/offline-run-*-{told.id}"
        self.where = f"wandb sync --id {told.id} {files}" if told.offline else str(run.url)

    def send(self, figures: list[Figures]) -> None:
        for found in figures:
            values = dict(found.values)
            if any(tag.startswith("epoch/") for tag in values):
                values["epoch"] = found.step
            else:
                # W&B's own step never goes back.
                self._step = max(self._step, found.step)
            self._run.log(values, step=self._step)

    def finish(self, state: str) -> None:
        self._run.finish(exit_code=_STATES.get(state, 1))
