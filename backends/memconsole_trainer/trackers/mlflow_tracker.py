"""Sends figures to MLflow: to the server of `MLFLOW_TRACKING_URI`, or into a folder of this user.

A resumed run continues the same MLflow run. `MLFLOW_EXPERIMENT_NAME` names the experiment.
"""

from __future__ import annotations

import os

from memconsole.runs.record.directory import runs_root
from memconsole_trainer.trackers.tracker import Figures, Told

EXPERIMENT = "memconsole"
MOST_METRICS, MOST_PARAMETERS = 1000, 100
"""Limits of one request (MLflow's REST API, "Log Batch")."""
_STATES = {"finished": "FINISHED", "stopped": "KILLED", "killed": "KILLED"}


class MlflowTracker:
    def __init__(self, told: Told) -> None:
        if "MLFLOW_TRACKING_URI" not in os.environ:
            # MLflow asks for a yes to its folders of files, which need no database.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        # This process tries again by itself, and says meanwhile what is wrong.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        folder = runs_root().parent / "mlruns"
        self.where = os.environ.get("MLFLOW_TRACKING_URI") or folder.as_uri()
        client = self._client = MlflowClient(tracking_uri=self.where)
        if told.tracked:
            self.tracked = told.tracked
            client.update_run(self.tracked, status="RUNNING", name=told.name)
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
            known = client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else client.create_experiment(name)
            tags = {"memconsole.run": told.id, "mlflow.note.content": told.note}
            tags |= {f"memconsole.tag.{tag}": "true" for tag in told.tags}
            run = client.create_run(experiment, tags=tags, run_name=told.name)
            self.tracked = run.info.run_id
            settings = [Param(key, str(value)[:500]) for key, value in told.settings.items()]
            for first in range(0, len(settings), MOST_PARAMETERS):
                client.log_batch(self.tracked, params=settings[first : first + MOST_PARAMETERS])

    def send(self, figures: list[Figures]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(tag, value, int(found.time_wall * 1000), found.step)
            for found in figures
            for tag, value in found.values.items()
        ]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self.tracked, metrics=metrics[first : first + MOST_METRICS])

    def finish(self, state: str) -> None:
        self._client.set_terminated(self.tracked, _STATES.get(state, "FAILED"))
