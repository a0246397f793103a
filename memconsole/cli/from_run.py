"""The plan of a run, to start from its weights: `--from`."""

from __future__ import annotations

from memconsole.plan import catalog
from memconsole.plan.models.files import TOKENIZER_JSON
from memconsole.plan.plan import Plan, PlanError, quote, replace
from memconsole.runs.record.checkpoints import base
from memconsole.runs.record.checkpoints.manifest import step_of
from memconsole.runs.record.run_store import find_run


def plan_from(named: str) -> Plan:
    """The plan of a run, to start from the weights of one of its checkpoints. Raises `RunError` and
    `PlanError`."""
    name, _, which = named.partition("@")
    run = find_run(name)
    plan = base.present(run, run.read_given_plan())
    committed = run.committed_checkpoints()
    best = run.checkpoints_path / "best"
    if which.startswith("step-"):
        wanted = which.removeprefix("step-")
        found = [p for p in committed if wanted.isdecimal() and step_of(p) == int(wanted)]
    elif which in ("", "best") and best.is_dir():
        found = [best.resolve()]
    else:
        found = committed[-1:] if which in ("", "last") else []
    if not found:
        kept = ", ".join(f"step-{step_of(p)}" for p in committed) or "none"
        raise PlanError(f"--from {quote(named)}: no such checkpoint; run {run.id} has {kept}")
    changes: dict[str, object] = {"model.weights": str(found[0])}
    if (run.path / TOKENIZER_JSON).is_file():
        changes["data.tokenizer"] = str(run.path / TOKENIZER_JSON)
        # The tokenizer was made with them, and a plan that names one has none of them.
        changes |= {"data.lowercase": False, "data.code_field": None, "data.characters": False}
        # The tokenizer may have fewer entries than the model, and would decide the model's size.
        if catalog.is_sized(plan):
            changes["data.vocab_size"] = catalog.architecture(plan).vocab_size
    return replace(plan, changes)
