"""Plans as job files: valid YAML that trains the same plan, and refusals that say what a job lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml as reference
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from memconsole.cli.main import cli
from memconsole.plan import catalog
from memconsole.plan import plan as plans
from memconsole.plan.jobs.document import yaml
from memconsole.plan.jobs.job import Job, job_name
from memconsole.plan.jobs.skypilot import ACCELERATORS, skypilot
from memconsole.plan.plan import Plan, replace
from memconsole.runs.record.directory import create_run

GPUS = {"device.name": "h100-80gb", "train.max_steps": 20}
TEXTS = st.text(st.characters(exclude_categories=["C"]), max_size=20)
DOCUMENTS = st.dictionaries(
    TEXTS,
    st.recursive(
        st.none() | st.booleans() | st.integers() | TEXTS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
        max_leaves=8,
    ),
    min_size=1,
    max_size=3,
)


@given(DOCUMENTS)
def test_another_reader_of_yaml_reads_what_was_written(document: dict[str, Any]) -> None:
    assert reference.safe_load(yaml(document)) == document


def test_texts_of_several_lines_are_read_line_by_line() -> None:
    text = "one\n  two: 'x'\n\n# three\n"
    assert reference.safe_load(yaml({"a": [{"b": text}]})) == {"a": [{"b": text}]}
    assert yaml({"on": "yes", "v": "3+"}) == '"on": "yes"\nv: "3+"\n'
    assert yaml({"home": "~"}) == 'home: "~"\n'


def export(named: object, *options: str) -> Result:
    return CliRunner().invoke(cli, ["export-job", str(named), *options])


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "My Plan.toml"
    path.write_text(plans.dumps(replace(Plan(), GPUS), full=False))
    return path


def plan_in(script: str) -> Plan:
    """The plan that a job's script writes."""
    return plans.loads(script.split("<<'END_OF_PLAN'\n")[1].split("END_OF_PLAN\n")[0])


def test_a_task_of_skypilot_asks_for_the_device_and_trains_the_plan(plan_file: Path) -> None:
    result = export(plan_file, "--to", "skypilot", "--volume", "runs")
    assert result.exit_code == 0, result.output
    task = reference.safe_load(result.output)
    assert task["name"] == "my-plan"
    assert task["resources"]["accelerators"] == "H100:1"
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [75]}
    assert task["volumes"] == {"/memconsole/state": "runs"}
    assert plan_in(task["run"]) == replace(Plan(), {**GPUS, "device.name": "cuda:0"})


def test_a_jobset_asks_for_the_device_and_trains_the_plan_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = create_run(replace(Plan(), {**GPUS, "launch.on": "slurm"}), "Some title!")
    result = export(run.id, "--to", "jobset", "--volume", "claim", "--set", "train.seed=7")
    assert result.exit_code == 0, result.output
    jobset = reference.safe_load(result.output)
    assert jobset["metadata"]["name"] == "some-title"
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "claim"}
    wanted = replace(Plan(), {**GPUS, "device.name": "cuda:0", "train.seed": 7})
    assert plan_in(container["args"][0]) == wanted


def test_files_of_this_machine_travel_with_skypilot_and_are_refused_for_pods(
    plan_file: Path, tmp_path: Path
) -> None:
    text = tmp_path / "own text.txt"
    text.write_text("some words " * 100)
    source = f"data.source={text}"
    task = reference.safe_load(export(plan_file, "--to", "skypilot", "--set", source).output)
    there = "/memconsole/inputs/data.source/own text.txt"
    assert task["file_mounts"] == {there: str(text)}
    assert plan_in(task["run"]).data.source == there
    refused = export(plan_file, "--to", "jobset", "--set", source)
    assert f"data.source = {text}: a file of this machine" in str(refused.exception)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--set", "device.name=auto"), "needs the device of the machine"),
        (("--set", "device.name=m2-16gb", "--to", "jobset"), "Kubernetes has no such devices"),
        (("--set", "device.name=m2-16gb"), "SkyPilot rents none"),
        (("--set", "optimize.precision=fp8"), "optimize.precision"),
        (("--volume", "a'b"), "without quotes"),
    ],
)
def test_what_a_job_cannot_have_is_refused_in_one_sentence(
    plan_file: Path, options: tuple[str, ...], says: str
) -> None:
    to = () if "--to" in options else ("--to", "skypilot")
    assert says in str(export(plan_file, *to, *options).exception)


def test_a_name_that_is_no_run_and_no_file_is_refused() -> None:
    assert "no plan file of that name" in str(export("nothing", "--to", "jobset").exception)
    assert "cannot be read" in str(export("nothing.toml", "--to", "jobset").exception)


def test_names_are_what_kubernetes_allows() -> None:
    assert job_name("A Title, with ümlauts & more than forty characters in it") == (
        "a-title-with-mlauts-more-than-forty-char"
    )
    assert job_name("20260101-000000-abc") == "run-20260101-000000-abc"
    assert job_name("!") == "run"


def test_every_device_that_skypilot_rents_is_in_the_catalog() -> None:
    assert set(ACCELERATORS) <= set(catalog.devices())
    plan = replace(Plan(), {"backend": "jax", "device.name": "tpu-v5e", "device.count": 8})
    task = skypilot(Job("a", plan, "memconsole", 8, None))
    assert task["resources"]["accelerators"] == "tpu-v5litepod-8"
