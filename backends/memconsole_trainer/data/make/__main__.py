"""``python -m memconsole_trainer.data.make REQUEST``: make data as a JSON `Request` says.

Prints its facts as JSON, or ``{"error": …}`` and exits with the trainer's code for that failure.
"""

from __future__ import annotations

import sys

import msgspec

from memconsole.plan.data.made import kind
from memconsole_trainer.data.make.bar import Bar
from memconsole_trainer.data.make.maker import Facts, Request, maker
from memconsole_trainer.data.make.writing import answer, written


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m memconsole_trainer.data.make REQUEST", file=sys.stderr)
        return 2
    request = msgspec.json.decode(
        sys.argv[1], type=Request, dec_hook=lambda type, value: type(value)
    )
    return answer(request.out, lambda: make(request))


def make(request: Request) -> Facts:
    """Make what `request` says and put it at `request.out`, replacing what is there."""
    bar = Bar(request.kind, kind(request.kind).units, sys.stderr)
    make_kind = maker(request.kind)
    return written(
        request.out,
        bar,
        lambda partial: make_kind(msgspec.structs.replace(request, out=partial), bar),
    )


if __name__ == "__main__":
    sys.exit(main())
