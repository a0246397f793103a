"""Plans as job files: valid YAML that trains the same plan, and refusals that say what a job lacks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml as reference
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import memconsole
from memconsole.cli.main import cli
from memconsole.plan import catalog
from memconsole.plan.jobs import job as jobs
from memconsole.plan.jobs.document import yaml
from memconsole.plan.jobs.job import Job, job_name
from memconsole.plan.jobs.jobset import jobset
from memconsole.plan.jobs.skypilot import GPUS, TPUS, skypilot
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.plan_file import dumps, loads
from memconsole.runs.record.run_store import create_run
from tests.unit.window_file import window_file

ON_H100 = {"device.name": "h100-80gb", "train.max_steps": 20}
MADE = {
    "gearhead-small": "equipment.jsonl",
    "lqr": "lqr.h5",
    "efficientids": "ratings/ratings.dat",
    "stories": "stories.txt",
}
"""Presets that read a file of the current folder."""
ROWS = {
    "gearhead-small": json.dumps(
        dict.fromkeys(("equipment", "symptom", "codes", "cause", "solution"), "a")
    ),
    "efficientids": "1::2::5::3\n",
}
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
    told = any(option.startswith("--install") for option in options)
    installs = () if told else ("--install", "memconsole[torch]")
    return CliRunner().invoke(cli, ["export-job", str(named), *options, *installs])


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "My Plan.toml"
    path.write_text(dumps(replace(Plan(), ON_H100), full=False))
    return path


def plan_in(script: str) -> Plan:
    """The plan that a job's script writes."""
    return loads(script.split("<<'END_OF_PLAN'\n")[1].split("END_OF_PLAN\n")[0])


def test_a_task_of_skypilot_asks_for_the_device_and_trains_the_plan(plan_file: Path) -> None:
    result = export(plan_file, "--to", "skypilot", "--volume", "runs")
    assert result.exit_code == 0, result.output
    task = reference.safe_load(result.stdout)
    assert task["name"] == "my-plan"
    assert task["resources"]["accelerators"] == "H100:1"
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [75]}
    assert task["volumes"] == {"/memconsole/state": "runs"}
    assert plan_in(task["run"]) == replace(Plan(), {**ON_H100, "device.name": "cuda:0"})


def test_a_jobset_asks_for_the_device_and_trains_the_plan_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = create_run(replace(Plan(), {**ON_H100, "launch.on": "slurm"}), "Some title!")
    result = export(run.id, "--to", "jobset", "--volume", "claim", "--set", "train.seed=7")
    assert result.exit_code == 0, result.output
    jobset = reference.safe_load(result.stdout)
    assert jobset["metadata"]["name"] == "some-title"
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "claim"}
    wanted = replace(Plan(), {**ON_H100, "device.name": "cuda:0", "train.seed": 7})
    assert plan_in(container["args"][0]) == wanted


def test_files_of_this_machine_travel_with_skypilot_and_are_refused_for_pods(
    plan_file: Path, tmp_path: Path
) -> None:
    text = tmp_path / "own text.txt"
    text.write_text("some words " * 100)
    source = f"data.source={text}"
    task = reference.safe_load(export(plan_file, "--to", "skypilot", "--set", source).stdout)
    there = "/memconsole/inputs/data.source/own text.txt"
    assert task["file_mounts"] == {there: str(text)}
    assert plan_in(task["run"]).data.source == there
    refused = export(plan_file, "--to", "jobset", "--set", source)
    assert f"data.source = {text}: a file of this machine" in str(refused.exception)


@pytest.mark.parametrize(("preset", "file"), MADE.items())
def test_a_preset_with_its_own_data_takes_the_file_along(
    preset: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = tmp_path / "preset.toml"
    plan.write_text(CliRunner().invoke(cli, ["plan", "--preset", preset, "--toml"]).stdout)
    on = ("--set", "device.name=h100-80gb", "--to")
    assert f"{file} is not in this folder" in str(export(plan, *on, "skypilot").exception)
    (tmp_path / "ratings").mkdir()
    Path(file).write_text(ROWS.get(preset, "a row"))
    if preset == "lqr":
        window_file(Path(file))
    (tmp_path / "ratings" / "movies.dat").write_text("2::A title::Drama\n")
    task = reference.safe_load(export(plan, *on, "skypilot").stdout)
    there = f"/memconsole/inputs/data.source/{Path(file).name}"
    mounts = {there: str(tmp_path / file)}
    if preset == "efficientids":
        mounts["/memconsole/inputs/data.source/movies.dat"] = str(tmp_path / "ratings/movies.dat")
    assert task["file_mounts"] == mounts
    assert plan_in(task["run"]).data.source == there
    assert f"{file}: a file of this machine" in str(export(plan, *on, "jobset").exception)


def test_weights_stay_random_where_the_folder_of_the_model_moves(tmp_path: Path) -> None:
    model = {"model.name": str(tmp_path), "model.weights": "random"}
    task = skypilot(Job("a", replace(Plan(), model), ("memconsole",), 8, None))
    trained = plan_in(task["run"]).model
    assert (trained.name, trained.weights) == (
        f"/memconsole/inputs/model.name/{tmp_path.name}",
        "random",
    )


def test_a_file_to_validate_on_is_taken_along_and_one_in_a_mixture_is_refused(
    plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stories.txt").write_text("some words " * 100)
    held = ("--to", "skypilot", "--set", "data.validation=stories")
    task = reference.safe_load(export(plan_file, *held).stdout)
    there = "/memconsole/inputs/data.validation/stories.txt"
    assert task["file_mounts"] == {there: str(tmp_path / "stories.txt")}
    assert plan_in(task["run"]).data.validation == there
    mixed = export(plan_file, "--to", "skypilot", "--set", "data.mix=stories=0.5")
    assert "stories.txt is a file of this machine" in str(mixed.exception)


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        (("device.name=cpu",), "torch"),
        (("device.name=mi300x",), "torch"),
        (("device.name=h100-80gb", "train.wandb=offline"), "torch,wandb"),
        (("device.name=cpu", "backend=jax"), "jax"),
        (("device.name=h100-80gb", "backend=jax"), "jax-cuda"),
        (("device.name=tpu-v5e", "backend=jax"), "tpu"),
    ],
)
def test_a_job_that_does_not_know_what_to_install_is_refused_with_what_the_plan_needs(
    plan_file: Path, settings: tuple[str, ...], package: str
) -> None:
    told = [word for setting in settings for word in ("--set", setting)]
    asked = ["export-job", str(plan_file), "--to", "jobset", *told]
    wanted = f"memconsole-{memconsole.__version__}-py3-none-any.whl[{package}]"
    refused = str(CliRunner().invoke(cli, asked).exception)
    assert f"--install './{wanted}'" in refused
    assert ("own index" in refused) == ("device.name=mi300x" in settings)
    result = CliRunner().invoke(cli, [*asked, f"--install=https://x.y/{wanted}"])
    assert f"pip install 'https://x.y/{wanted}' || exit" in result.stdout
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert set(package.split(",")) <= set(project["optional-dependencies"])


def test_a_job_installs_what_it_is_told_to(plan_file: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "memconsole-1-py3-none-any.whl"
    wheel.touch()
    amd = ("--set", "device.name=mi300x", "--to", "skypilot")
    result = export(
        plan_file, *amd, f"--install={wheel}[torch]", "--install=--extra-index-url=https://x.y"
    )
    task = reference.safe_load(result.stdout)
    there = f"/memconsole/inputs/install/{wheel.name}"
    assert task["file_mounts"] == {there: str(wheel)}
    assert f"pip install '{there}[torch]' --extra-index-url=https://x.y\n" in task["setup"]
    assert result.stderr == ""
    refused = export(plan_file, "--to", "jobset", f"--install={wheel}")
    assert "a file of this machine" in str(refused.exception)


def test_a_jobset_chooses_the_node_by_the_labels_given(plan_file: Path) -> None:
    to = ("--to", "jobset")
    assert "--node-selector, such as nvidia.com/gpu.product" in export(plan_file, *to).stderr
    assert "--node-selector" not in export(plan_file, *to, "--set", "device.name=cpu").stderr
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "pool": "", "topology": "2x4"}
    given = [f"--node-selector={key}={value}" for key, value in labels.items()]
    result = export(plan_file, *to, *given)
    template = reference.safe_load(result.stdout)["spec"]["replicatedJobs"][0]["template"]
    assert template["spec"]["template"]["spec"]["nodeSelector"] == labels
    assert "--node-selector" not in result.stderr


@pytest.mark.parametrize(
    "label", ["pool", "=a", "a=b=c", "a=-b", "A/b=c", "a b=c", f"{'k' * 64}=v"]
)
def test_a_label_that_no_node_has_is_refused(plan_file: Path, label: str) -> None:
    refused = export(plan_file, "--to", "jobset", "--node-selector", label)
    assert "expected a label of a node as KEY=VALUE" in str(refused.exception)


@pytest.mark.parametrize(
    ("state", "command", "code"),
    [("", "train", 0), ("stopped", "resume", 75), ("finished", "", 0), ("failed", "resume", 1)],
)
def test_a_job_trains_continues_or_is_done_by_the_state_of_its_run(
    state: str, command: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = json.dumps([{"name": "other", "state": "stopped"}, {"name": "a-job", "state": state}])
    stub = tmp_path / "memconsole"
    stub.write_text(
        f"#!/bin/sh\nif [ $1 = runs ]; then echo '{runs if state else '[]'}'\n"
        f"else echo $1 > {tmp_path}/called; exit {code}; fi\n"
    )
    stub.chmod(0o755)
    monkeypatch.setattr(jobs, "ROOT", str(tmp_path / "root"))
    script = jobs.script(Job("a-job", Plan(), ("memconsole",), 8, None), {})
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", script], env={"PATH": path}, capture_output=True, text=True
    )
    assert ended.returncode == code, ended.stderr
    called = tmp_path / "called"
    assert (called.read_text().strip() if called.exists() else "") == command


RUN = """\
cd {folder}
case $1 in
  runs) echo '[]' ;;
  install) touch installing; sleep 0.5 ;;
  train) touch called; sleep 1; touch begun
    for _ in $(seq 100); do [ -e asked ] && break; sleep 0.1; done
    touch saving; sleep 1; touch saved; exit 75 ;;
  stop) [ -e begun ] || exit 1
    echo >> asked; while [ ! -e saved ]; do sleep 0.1; done ;;
esac
"""
"""A stand-in for memconsole: its run begins late, and saves slowly."""


@pytest.fixture
def taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a job's script, and sends it SIGTERM as soon as each of some files is there. Returns its exit code."""
    stub = tmp_path / "memconsole"
    stub.write_text(f"#!/bin/sh\n{RUN.format(folder=tmp_path)}")
    stub.chmod(0o755)
    monkeypatch.setattr(jobs, "ROOT", str(tmp_path / "root"))
    job = Job("a-job", Plan(), ("memconsole",), 8, None)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(*files: str) -> int:
        script = jobs.script(job, {}, "memconsole install")
        begun = subprocess.Popen(["bash", "-c", script], env={"PATH": path})
        for file in files:
            deadline = time.monotonic() + 20
            while not (tmp_path / file).exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            begun.send_signal(signal.SIGTERM)
        return begun.wait(20)

    return run


def test_a_job_that_is_taken_away_before_its_run_begins_still_asks_it_to_save_and_once(
    taken: Callable[..., int], tmp_path: Path
) -> None:
    assert taken("called", "saving") == 75
    assert (tmp_path / "saved").exists(), "it waits until the run has saved"
    assert (tmp_path / "asked").read_text() == "\n"


def test_a_job_that_is_taken_away_while_it_installs_trains_nothing(
    taken: Callable[..., int], tmp_path: Path
) -> None:
    assert taken("installing") == 75
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--set", "device.name=auto"), "needs the device of the machine"),
        (("--set", "device.name=m2-16gb", "--to", "jobset"), "Kubernetes has no such devices"),
        (("--set", "device.name=m2-16gb"), "SkyPilot rents none"),
        (("--set", "optimize.precision=fp8"), "optimize.precision"),
        (("--volume", "a'b"), "without quotes"),
        (("--node-selector", "a=b"), "are for jobset"),
        (("--image", "python:3.13"), "are for jobset"),
    ],
)
def test_what_a_job_cannot_have_is_refused_in_one_sentence(
    plan_file: Path, options: tuple[str, ...], says: str
) -> None:
    to = () if "--to" in options else ("--to", "skypilot")
    assert says in str(export(plan_file, *to, *options).exception)


def test_a_text_on_the_volume_need_not_be_on_this_machine(plan_file: Path) -> None:
    source = "/memconsole/data/rows.jsonl"
    held_out = "/memconsole/data/held.jsonl"
    options = ("--set", f"data.source={source}", "--set", f"data.validation={held_out}")
    document = reference.safe_load(export(plan_file, "--to", "jobset", *options).stdout)
    pod = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    wanted = {"device.name": "cuda:0", "data.source": source, "data.validation": held_out}
    assert plan_in(pod["containers"][0]["args"][0]) == replace(Plan(), {**ON_H100, **wanted})
    elsewhere = export(plan_file, "--to", "jobset", "--set", "data.source=/data/rows.jsonl")
    assert "no such file or folder" in str(elsewhere.exception)


def test_what_is_read_for_the_estimate_must_be_here_and_on_the_volume(
    plan_file: Path, tmp_path: Path
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ text }}")
    sets = ("--set", f"data.template={template}", "--set", "data.source=/memconsole/rows.jsonl")
    refused = str(export(plan_file, "--to", "jobset", *sets).exception)
    assert f"data.template = {template}: a file of this machine" in refused
    assert "must be on this machine, too, under the same path" in refused


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
    assert {*GPUS, *TPUS} <= set(catalog.devices())


def task_of(name: str, count: int) -> dict[str, Any]:
    return skypilot(Job("a", on(name, count), ("memconsole",), 8, None))["resources"]


def limits_of(name: str, count: int) -> dict[str, Any]:
    document = jobset(Job("a", on(name, count), ("memconsole",), 8, None))
    pod = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    limits: dict[str, Any] = pod["containers"][0]["resources"]["limits"]
    return limits


def on(name: str, count: int) -> Plan:
    return replace(Plan(), {"backend": "jax", "device.name": name, "device.count": count})


@pytest.mark.parametrize(
    ("name", "count", "rented", "chips"),
    [
        ("tpu-v2", 8, "tpu-v2-8", 4),
        ("tpu-v3", 8, "tpu-v3-8", 4),
        ("tpu-v4", 4, "tpu-v4-8", 4),
        ("tpu-v5e", 8, "tpu-v5litepod-8", 8),
        ("tpu-v5p", 4, "tpu-v5p-8", 4),
        ("tpu-v6e", 1, "tpu-v6e-1", 1),
    ],
)
def test_each_engine_is_asked_for_tpus_in_its_own_unit(
    name: str, count: int, rented: str, chips: int
) -> None:
    assert task_of(name, count)["accelerators"] == rented
    assert limits_of(name, count)["google.com/tpu"] == chips


@pytest.mark.parametrize(
    ("name", "count", "of_machines"),
    [
        ("tpu-v4", 3, "4"),
        ("tpu-v5e", 16, "1, 4 or 8"),
        ("tpu-v6e", 3, "1, 4 or 8"),
        ("h100-80gb", 16, "1, 2, 3, 4, 5, 6, 7 or 8"),
    ],
)
def test_a_number_of_devices_that_no_machine_has_is_refused(
    name: str, count: int, of_machines: str
) -> None:
    for asked in (task_of, limits_of):
        with pytest.raises(PlanError, match=f"a machine with {name} has {of_machines} of them"):
            asked(name, count)
    assert task_of("a100-40gb", 16)["accelerators"] == "A100:16"
    assert limits_of("tpu-7x", 8)["google.com/tpu"] == 4
