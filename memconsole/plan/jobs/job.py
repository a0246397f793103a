"""What every job file needs from a plan: the plan as the job trains it, its files, and the job's script."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from memconsole.plan import catalog, plan_file
from memconsole.plan.catalog.ratings import metadata_beside
from memconsole.plan.catalog.sources import HUB_PREFIX
from memconsole.plan.data.mixture import MIX, parts
from memconsole.plan.data.paths import FILES
from memconsole.plan.jobs.on_node import on_node
from memconsole.plan.plan import Plan, PlanError, get, quote, replace
from memconsole.plan.processes import nodes

ROOT = "/memconsole"
"""Where a job keeps what it reads and writes."""
_BAD = re.compile(r"[^a-z0-9-]+")
MAY_BE_ABSENT = ("data.source", "data.validation")
"""Settings of a text that only the job reads."""
STOPPED = 75
"""The exit code of a run that saved and can be resumed."""


@dataclass(frozen=True)
class Job:
    """A plan as a job of one machine."""

    name: str
    """Lower case letters, digits and hyphens, as Kubernetes wants it."""
    plan: Plan
    """With absolute paths, as `paths.anywhere` gives it."""
    install: tuple[str, ...]
    """The arguments of pip install."""
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


def without_absent(plan: Plan) -> Plan:
    """`plan` with a dataset of the hub in place of a text under `ROOT` that is not on this machine, and without such a
    validation text. The plan can then be checked and priced like one whose data are not here yet."""
    entry = catalog.models().get(plan.model.name)
    if entry is not None and entry.task != "language":
        return plan
    changes: dict[str, object] = {}
    if _on_volume(plan.data.source):
        changes |= {"data.source": f"{HUB_PREFIX}on/volume", "data.streaming": False}
    if _on_volume(plan.data.validation):
        changes["data.validation"] = None
    return replace(plan, changes)


def with_absent(known: Plan, given: Plan) -> Plan:
    """`known`, made from what `without_absent` gives for `given`, with the texts of `given` again."""
    priced = without_absent(given)
    kept = ("data.streaming", *MAY_BE_ABSENT)
    return replace(known, {k: get(given, k) for k in kept if get(given, k) != get(priced, k)})


def _on_volume(value: str | None) -> bool:
    """Whether it is a path under `ROOT` that is not on this machine."""
    path = Path(value or "")
    return path.is_relative_to(ROOT) and not path.exists()


def job_name(text: str) -> str:
    """`text` as the name of a job: at most 40 characters that Kubernetes allows."""
    name = _BAD.sub("-", text.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def local_files(plan: Plan) -> dict[str, Path]:
    """The settings that name a file or folder of this machine, with its path.

    Raises `PlanError` for one in a mixture, whose paths a job file cannot change.
    """
    files = {key: path for key in FILES if (path := _local(get(plan, key)))}
    for part in parts(plan)[1:]:
        if _local(part.plan.data.source) is not None:
            raise PlanError(
                f"{MIX} = {quote(plan.data.mix)}: {part.plan.data.source} is a file of this machine, which the "
                "job does not have; name a dataset of the hub",
                MIX,
            )
    return files


def beside(plan: Plan) -> tuple[Path, ...]:
    """The files of this machine that are read beside `data.source`: the metadata of ratings."""
    entry = catalog.models().get(plan.model.name)
    source = _local(plan.data.source)
    if source is None or entry is None or entry.recommender is None:
        return ()
    return metadata_beside(source)


def _local(value: str | None) -> Path | None:
    path = Path(value or "")
    return path if path.is_absolute() and path.exists() else None


def script(job: Job, moved: dict[str, str], install: str = "") -> str:
    """The job's commands, in bash: continue the run of this name if there is one, else begin it. A finished run is done.

    `moved` maps a setting to the path of its file inside the job. `install` is a command that comes first.
    """
    kept = {"model.weights": job.plan.model.weights}  # another path of the model must not reset it
    changed = replace(on_node(job.plan), kept | moved)
    alone = plan_file.to_document(changed)
    alone.pop("launch", None)
    text = plan_file.dumps(plan_file.from_document(alone), full=False)
    name = shlex.quote(job.name)
    first = f"{install} || exit $((told ? {STOPPED} : 1))\n" if install else ""
    return f"""\
# A machine that is taken away sends SIGTERM: the run saves, and ends with exit code {STOPPED}.
told=0
trap told=1 TERM
{first}export XDG_STATE_HOME={ROOT}/state XDG_CACHE_HOME={ROOT}/cache
mkdir -p "$XDG_STATE_HOME" "$XDG_CACHE_HOME"
cat > {ROOT}/plan.toml <<'END_OF_PLAN'
{text.rstrip()}
END_OF_PLAN
state=$(memconsole runs --json | python3 -c '
import json, sys
print(*(run["state"] for run in json.load(sys.stdin) if run["name"] == sys.argv[1]))' {name})
[ "$told" = 0 ] || exit {STOPPED}
case "$state" in
  "") memconsole train --plan {ROOT}/plan.toml --name {name} & ;;
  finished) echo {shlex.quote(f"the run {job.name} is finished; a job of another name trains anew")}; exit 0 ;;
  *) memconsole resume {name} --follow & ;;
esac
watching=$!
while kill -0 "$watching" 2>/dev/null; do
  # This waits until the run has saved. It fails until the run has begun, and is tried again.
  [ "$told" = 0 ] || memconsole stop {name} --yes
  sleep 0.5
done
wait "$watching"
"""
