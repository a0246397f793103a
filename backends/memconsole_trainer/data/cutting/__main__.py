"""``python -m memconsole_trainer.data.cutting REQUEST``: cut a table into windows as a JSON `Cut` says.

Prints its facts as JSON, or ``{"error": …}`` and exits with the trainer's code for that failure.
"""

from __future__ import annotations

import sys
from pathlib import Path

from memconsole import typed_json
from memconsole.plan.plan import PlanError
from memconsole_trainer.data.cutting.request import Cut
from memconsole_trainer.data.make.bar import Bar
from memconsole_trainer.data.make.maker import Facts
from memconsole_trainer.data.make.writing import answer, written


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m memconsole_trainer.data.cutting REQUEST", file=sys.stderr)
        return 2
    request = typed_json.decode(sys.argv[1], Cut)
    return answer(Path(request.out), lambda: _cut(request))


def _cut(request: Cut) -> Facts:
    # Imported here, where `answer` names a package that is missing.
    from memconsole_trainer.data.cutting.cutting import cut
    from memconsole_trainer.data.sources.documents import DataError

    bar = Bar("windows", "rows", sys.stderr)
    try:
        return written(Path(request.out), bar, lambda part: cut(request, part, bar))
    except DataError as error:
        raise PlanError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
