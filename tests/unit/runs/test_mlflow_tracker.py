"""One MLflow run for each training, whatever fails at the first contact, and it shows the settings that changed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest

from memconsole_trainer.trackers.mlflow_tracker import MlflowTracker
from memconsole_trainer.trackers.tracker import Told


class Param(NamedTuple):
    key: str
    value: str


class Client:
    """MLflow's client, with a server in this process that fails as often as `failures` says."""

    runs: ClassVar[dict[str, SimpleNamespace]] = {}
    failures: ClassVar[list[Exception]] = []

    def __init__(self, tracking_uri: str) -> None:
        pass

    def get_experiment_by_name(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(experiment_id="1")

    def search_runs(self, experiments: list[str], query: str, max_results: int) -> list[Any]:
        key, value = query.removeprefix("tags.`").removesuffix("'").split("` = '")
        return [run for run in self.runs.values() if run.data.tags.get(key) == value]

    def create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> SimpleNamespace:
        made = SimpleNamespace(
            info=SimpleNamespace(run_id=f"run {len(self.runs)}"),
            data=SimpleNamespace(params={}, tags=dict(tags)),
        )
        self.runs[made.info.run_id] = made
        return made

    def update_run(self, tracked: str, status: str, name: str) -> None:
        assert status == "RUNNING"

    def get_run(self, tracked: str) -> SimpleNamespace:
        return self.runs[tracked]

    def log_batch(self, tracked: str, params: list[Param]) -> None:
        if self.failures:
            raise self.failures.pop()
        for key, value in params:
            assert self.runs[tracked].data.params.setdefault(key, value) == value

    def set_tag(self, tracked: str, key: str, value: str) -> None:
        self.runs[tracked].data.tags[key] = value


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    mlflow.MlflowClient, entities.Param = Client, Param  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://a-server")
    monkeypatch.setattr(Client, "runs", {})
    monkeypatch.setattr(Client, "failures", [])


def told(tracked: str = "", name: str = "one", **settings: object) -> Told:
    return Told(
        id=name, name="a name", folder=Path("one"), settings=settings, tags=("slow",), note="", offline=False,
        tracked=tracked,
    )  # fmt: skip


def test_a_first_contact_that_fails_makes_one_run_however_often_it_is_tried() -> None:
    Client.failures.extend([ConnectionError("down")] * 5)
    for _ in range(5):
        with pytest.raises(ConnectionError):
            MlflowTracker(told(rate=1e-3))
    tracker = MlflowTracker(told(rate=1e-3))
    assert list(Client.runs) == [tracker.tracked]
    assert Client.runs[tracker.tracked].data.params == {"rate": "0.001"}
    assert MlflowTracker(told(name="one-2")).tracked != tracker.tracked


def test_settings_that_change_on_resume_are_tags() -> None:
    tracked = MlflowTracker(told(rate=1e-3, steps=20)).tracked
    data = Client.runs[tracked].data
    before = dict(data.tags)
    for rate in (5e-2, 1e-3):
        MlflowTracker(told(tracked, rate=rate, steps=20, new="yes"))
        assert data.tags == {**before, "memconsole.setting.rate": str(rate)}
    assert data.params == {"rate": "0.001", "steps": "20", "new": "yes"}
