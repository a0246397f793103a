"""``python -m memconsole_trainer.sample RUN_DIR``: continue a text with a run's newest
checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from memconsole.plan.plan import PlanError
from memconsole_trainer.backends import engine_factory
from memconsole_trainer.weights import trained


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompt", default="")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        found = trained.read(options.run)
        tokenizer = found.tokenizer()
        engine = engine_factory(found.plan.backend)(found.plan, None)
        found.build(engine)
    except (PlanError, ValueError, OSError) as error:
        print(f"memconsole: {error}", file=sys.stderr)
        return 2
    if found.note:
        print(f"step {found.checkpoint.step:,}{found.note}", file=sys.stderr)
    end = tokenizer.end_of_text
    prompt = [int(i) for i in tokenizer.encode([options.prompt])] if options.prompt else []
    if prompt and end is not None:
        prompt.pop()  # `encode` appends the end-of-text token; a prompt must stay open
    room = found.architecture.max_positions - max(len(prompt), 1)
    if room < 1:
        print(
            f"memconsole: the prompt is {len(prompt)} tokens, the model holds "
            f"{found.architecture.max_positions}",
            file=sys.stderr,
        )
        return 2
    new = engine.generate(
        prompt or [end or 0],
        min(options.tokens, room),
        options.temperature,
        options.top_k,
        options.seed,
    )
    print(options.prompt + tokenizer.decode(new))
    return 0


if __name__ == "__main__":
    sys.exit(main())
