"""What every job file needs from a plan: the plan as the job trains it, its files, and the job's script."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from memconsole.plan import catalog
from memconsole.plan import plan as plans
from memconsole.plan.data.mixture import MIX, VALIDATION, parts, validation_plan
from memconsole.plan.jobs.on_node import on_node
from memconsole.plan.plan import Plan, PlanError, get, quote, replace
from memconsole.plan.processes import nodes
from memconsole.plan.templates.choice import TEMPLATE_SUFFIXES
from memconsole.plan.training.origin import checkpoint_of

ROOT = "/memconsole"
"""Where a job keeps what it reads and writes."""
_FILES = (
    "data.source",
    "data.template",
    "data.tokenizer",
    "model.name",
    "model.decoder",
    "model.weights",
)
_BAD = re.compile(r"[^a-z0-9-]+")
STOPPED = 75
"""The exit code of a run that saved and can be resumed."""


@dataclass(frozen=True)
class Job:
    """A plan as a job of one machine."""

    name: str
    """Lower case letters, digits and hyphens, as Kubernetes wants it."""
    plan: Plan
    install: str
    """What pip installs."""
    host_gib: int
    """Host memory to ask for."""
    volume: str | None
    """The volume that keeps the run, if there is one."""

    @property
    def accelerator(self) -> str | None:
        """The catalog name of the job's device; None for a CPU."""
        name = self.plan.device.name
        return name if name in catalog.devices() else None


def check_device(plan: Plan) -> None:
    """Raise `PlanError` unless the plan says which device a machine is to have."""
    name = plan.device.name
    if name != "cpu" and name not in catalog.devices():
        raise PlanError(
            f"device.name = {name}: a job file needs the device of the machine that it asks for: cpu, or "
            "one of the catalog such as h100-80gb",
            "device.name",
        )
    if nodes(plan) > 1:
        raise PlanError(
            f"device.count = {plan.device.count}: job files are of one machine; leave out "
            "launch.devices_per_node, or train on a Slurm cluster",
            "device.count",
        )


def job_name(text: str) -> str:
    """`text` as the name of a job: at most 40 characters that Kubernetes allows."""
    name = _BAD.sub("-", text.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def local_files(plan: Plan) -> dict[str, Path]:
    """The settings that name a file or folder of this machine, with its path.

    Raises `PlanError` for one in a mixture, whose paths a job file cannot change.
    """
    found = {}
    for key in _FILES:
        value = get(plan, key)
        path = checkpoint_of(plan) if key == "model.weights" else _local(key, value)
        if path is not None:
            found[key] = path.expanduser().absolute()
    mixed = [(MIX, part.plan) for part in parts(plan)[1:]]
    validated = validation_plan(plan)
    for key, other in (*mixed, *([(VALIDATION, validated)] if validated else [])):
        if _local("data.source", other.data.source) is not None:
            raise PlanError(
                f"{key} = {quote(get(plan, key))}: {other.data.source} is a file of this machine, which the "
                "job does not have; name a dataset of the hub",
                key,
            )
    return found


def _local(key: str, value: str | None) -> Path | None:
    if not value or (key == "data.template" and Path(value).suffix not in TEMPLATE_SUFFIXES):
        return None
    known = catalog.datasets() if key == "data.source" else catalog.models()
    if key.startswith(("data.source", "model.")) and value in known:
        return None
    path = Path(value).expanduser()
    return path if path.exists() else None


def script(job: Job, moved: dict[str, str]) -> str:
    """The job's commands, in bash: continue the run of this name if there is one, else begin it.

    `moved` maps a setting to the path of its file inside the job.
    """
    changed = replace(on_node(job.plan), moved)
    alone = plans.to_document(changed)
    alone.pop("launch", None)
    text = plans.dumps(plans.from_document(alone), full=False)
    return f"""\
export XDG_STATE_HOME={ROOT}/state XDG_CACHE_HOME={ROOT}/cache
mkdir -p "$XDG_STATE_HOME" "$XDG_CACHE_HOME"
cat > {ROOT}/plan.toml <<'END_OF_PLAN'
{text.rstrip()}
END_OF_PLAN
# A machine that is taken away sends SIGTERM: the run saves, and ends with exit code {STOPPED}.
trap 'kill -INT "$watching"' TERM
if memconsole runs --json | grep -q '"name": "{job.name}"'; then
  memconsole resume {shlex.quote(job.name)} --follow &
else
  memconsole train --plan {ROOT}/plan.toml --name {shlex.quote(job.name)} &
fi
watching=$!
code=0
while kill -0 "$watching" 2>/dev/null; do wait "$watching"; code=$?; done
exit "$code"
"""
