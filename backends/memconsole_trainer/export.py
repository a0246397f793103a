"""``python -m memconsole_trainer.export RUN_DIR OUT [bitnet]``: export a run's weights to a Hugging
Face directory."""

from __future__ import annotations

import sys
from pathlib import Path

from memconsole.plan.plan import PlanError
from memconsole_trainer.weights import trained
from memconsole_trainer.weights.bitnet_accuracy import export_bitnet
from memconsole_trainer.weights.export import export


def main() -> int:
    if len(sys.argv) != 3 and (len(sys.argv) != 4 or sys.argv[3] != "bitnet"):
        print(
            "usage: python -m memconsole_trainer.export RUN_DIR OUT [bitnet]",
            file=sys.stderr,
        )
        return 2
    try:
        found = trained.read(Path(sys.argv[1]))
        found.check_base()
        out, lines = Path(sys.argv[2]), []
        if len(sys.argv) == 4:
            lines = export_bitnet(found, out)
            names = sorted(path.name for path in out.iterdir())
        else:
            names = export(found.architecture, found, found.tokenizer_file, out)
    except (PlanError, ValueError, OSError) as error:
        print(f"memconsole: {error}", file=sys.stderr)
        return 2
    print(f"step {found.checkpoint.step:,}{found.note}: {', '.join(names)}")
    for line in lines:
        print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
