"""Trains a Llama of random weights with transformers' Trainer and prints the seconds of each step as JSON.

python tests/bench/peer_trainer.py CONFIG ROWS LENGTH STEPS BF16
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers


class Clock(transformers.TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    config, *numbers = sys.argv[1:]
    rows, length, steps, bf16 = map(int, numbers)
    shape = json.loads(Path(config).read_text())
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**shape)
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape["vocab_size"], (rows * steps, length), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            use_cpu=True,
            bf16=bool(bf16),
            per_device_train_batch_size=rows,
            max_steps=steps,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=[clock]).train()
    print(json.dumps([b - a for a, b in zip(clock.ends[:-1], clock.ends[1:], strict=True)]))


if __name__ == "__main__":
    main()
