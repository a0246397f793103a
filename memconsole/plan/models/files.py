"""What lies in a model's directory: its weights, and the files that make its tokenizer."""

from __future__ import annotations

import shlex
from pathlib import Path

from memconsole.plan.plan import PlanError

INDEX = "model.safetensors.index.json"
OTHER_FORMATS = (
    "pytorch_model*.bin",
    "model*.bin",
    "*.ckpt",
    "consolidated*.pth",
    "*.gguf",
    "tf_model*.h5",
    "flax_model*.msgpack",
)
"""Weights in files that are not read. Most of them are pickles, which can run any code."""
TOKENIZER_JSON, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
TOKENIZERS = f"{TOKENIZER_JSON}, {SENTENCEPIECE}, or {VOCABULARY} with {MERGES}"
"""The forms of a tokenizer, in words."""


def has_weights(directory: Path) -> bool:
    """Whether `directory` holds safetensors weights."""
    return (directory / INDEX).is_file() or any(directory.glob("*.safetensors"))


def tokenizer_file(directory: Path) -> Path | None:
    """The file that the tokenizer in `directory` is read from, the most complete form first; None
    if there is none."""
    for name in (TOKENIZER_JSON, SENTENCEPIECE):
        if (directory / name).is_file():
            return directory / name
    both = (directory / VOCABULARY, directory / MERGES)
    return both[0] if all(path.is_file() for path in both) else None


def check_format(directory: Path) -> None:
    """Raise `PlanError` if `directory` holds weights, but none that can be read."""
    if has_weights(directory):
        return
    names = sorted(path.name for form in OTHER_FORMATS for path in directory.glob(form))
    if names:
        raise PlanError(
            f"{directory} holds its weights as {names[0]}; only safetensors are read. Convert them "
            f"with transformers: {conversion(directory)}",
            "model.name",
        )


def conversion(directory: Path) -> str:
    """The command that writes the weights of `directory` there as safetensors."""
    program = (
        "import sys, transformers as t; d = sys.argv[1]; "
        "t.AutoModelForCausalLM.from_pretrained(d, dtype='auto').save_pretrained(d)"
    )
    return f'python -c "{program}" {shlex.quote(str(directory))}'
