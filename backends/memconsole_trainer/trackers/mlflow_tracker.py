"""Sends figures to MLflow: to the server of `MLFLOW_TRACKING_URI`, or into a folder of this user.

A resumed run continues the same MLflow run. Its parameters are the settings that it began with, because MLflow changes
none; a setting that was changed since is a tag. `MLFLOW_EXPERIMENT_NAME` names the experiment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from memconsole.runs.record.run_store import runs_root
from memconsole_trainer.trackers.tracker import Figures, Told

EXPERIMENT = "memconsole"
RUN, SETTING = "memconsole.run", "memconsole.setting."
"""Tags: the run's id, and what the name of a changed setting begins with."""
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

        folder = runs_root().parent / "mlruns"
        self.where = os.environ.get("MLFLOW_TRACKING_URI") or folder.as_uri()
        self._client = MlflowClient(tracking_uri=self.where)
        self.tracked = told.tracked or self._found_or_made(told)
        self._client.update_run(self.tracked, status="RUNNING", name=told.name)
        self._show({key: str(value)[:500] for key, value in told.settings.items()})

    def _found_or_made(self, told: Told) -> str:
        """The id of the MLflow run. It is there already if an earlier contact failed after making it."""
        client, name = self._client, os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
        found = client.search_runs([experiment], f"tags.`{RUN}` = '{told.id}'", max_results=1)
        if found:
            return str(found[0].info.run_id)
        tags = {RUN: told.id, "mlflow.note.content": told.note}
        tags |= {f"memconsole.tag.{tag}": "true" for tag in told.tags}
        return str(client.create_run(experiment, tags=tags, run_name=told.name).info.run_id)

    def _show(self, settings: Mapping[str, str]) -> None:
        """Send the settings that the MLflow run lacks, and those that have changed."""
        from mlflow.entities import Param

        client, data = self._client, self._client.get_run(self.tracked).data
        new = [Param(key, value) for key, value in settings.items() if key not in data.params]
        for first in range(0, len(new), MOST_PARAMETERS):
            client.log_batch(self.tracked, params=new[first : first + MOST_PARAMETERS])
        for key, value in settings.items():
            tag = f"{SETTING}{key}"
            if data.tags.get(tag, data.params.get(key, value)) != value:
                client.set_tag(self.tracked, tag, value)

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
