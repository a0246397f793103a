"""Checks job files against SkyPilot's own schema and parser, and against JobSet's custom resource definition.

``PYTHON tests/slurm/check_job_files.py --crd jobset.x-k8s.io_jobsets.yaml FILE...``, with a Python that
has `skypilot` installed. The definition is in the repository of JobSet, kubernetes-sigs/jobset, in
config/components/crd/bases. A file with `kind: JobSet` is checked by it, every other one by SkyPilot.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any


def strict(schema: Any) -> Any:
    """The schema with fields refused that it does not name, as an API server reports them."""
    if isinstance(schema, list):
        return [strict(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(inner) for key, inner in schema.items()}
    if made.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if isinstance(made.get("properties"), dict) and "additionalProperties" not in made:
        made["additionalProperties"] = bool(made.get("x-kubernetes-preserve-unknown-fields"))
    return made


def check_jobset(document: dict[str, Any], crd: Path) -> str:
    """Raise what jsonschema finds wrong. Returns which version it was checked against."""
    import jsonschema
    import yaml

    definition = yaml.safe_load(crd.read_text())
    version = next(v for v in definition["spec"]["versions"] if v["storage"])
    schema = strict(copy.deepcopy(version["schema"]["openAPIV3Schema"]))
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.validate(document, schema)
    return f"{definition['spec']['group']}/{version['name']}"


def check_task(document: dict[str, Any]) -> str:
    """Raise what SkyPilot finds wrong. Returns which version it was checked by."""
    import sky
    from sky.utils import common_utils, schemas

    common_utils.validate_schema(document, schemas.get_task_schema(), "task: ")
    task = sky.Task.from_yaml_config(copy.deepcopy(document))
    asked = ", ".join(str(resources) for resources in task.resources)
    return f"SkyPilot {sky.__version__}: {asked}"


def main() -> int:
    import yaml

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crd", type=Path, required=True)
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    bad = 0
    for path in options.files:
        document = yaml.safe_load(path.read_text())
        try:
            of_jobset = document.get("kind") == "JobSet"
            said = check_jobset(document, options.crd) if of_jobset else check_task(document)
        except Exception as error:  # noqa: BLE001 (whatever the engine's own check raises)
            bad += 1
            said = f"REFUSED: {str(error).splitlines()[0]}"
        print(f"{path}: {said}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
