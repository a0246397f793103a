"""The contents of a model's directory: its weights, and the files that make its tokenizer."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from memconsole import regular_file
from memconsole.plan.models.tensor_header import TensorFileError, read_header
from memconsole.plan.plan import PlanError, printable

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
INDEX_BYTES = 64 << 20
"""Bytes of the largest index that is read."""
NOT_OF_MODEL = ("consolidated*", "adapter_model*")
"""Safetensors of a model's directory in another library's names, or of adapters."""
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
ADAPTERS = "adapter_config.json"
"""The configuration of PEFT adapters, which lie in a folder of their own."""
TOKENIZER_JSON, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
TOKENIZERS = f"{TOKENIZER_JSON}, {SENTENCEPIECE}, or {VOCABULARY} with {MERGES}"
"""The forms of a tokenizer, in words."""


def has_weights(directory: Path) -> bool:
    """Whether `directory` holds safetensors weights."""
    return (directory / INDEX).is_file() or any(directory.glob("*.safetensors"))


def other_weights(directory: Path) -> list[str]:
    """The files of `directory` with weights in formats that are not read."""
    return sorted(path.name for form in OTHER_FORMATS for path in directory.glob(form))


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of the model in `directory`, each of which can be opened: those that transformers reads.
    One file for the whole model comes before an index, whose parts may be of an older model. Raises `PlanError`."""
    index = directory / INDEX
    if (directory / SINGLE).exists():
        names = [SINGLE]
    elif index.is_file():
        try:
            names = sorted(
                set(json.loads(regular_file.read(index, INDEX_BYTES))["weight_map"].values())
            )
        except OSError as error:
            raise _refused(f"{index}: cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise _refused(f"{index}: not a safetensors index") from None
        if any(not isinstance(n, str) or Path(n).name != n for n in names):
            raise _refused(f"{index}: names files outside its directory")
    else:
        found = sorted(directory.glob("*.safetensors"))
        names = [path.name for path in found if not any(map(path.match, NOT_OF_MODEL))]
    if not names:
        raise _refused(f"{directory}: holds no {SINGLE}, and no other safetensors of a whole model")
    for name in names:
        try:
            regular_file.check_regular(directory / name)
        except FileNotFoundError:
            raise _refused(f"{directory}: {name} is missing") from None
        except OSError as error:
            raise _refused(f"{directory / name}: cannot be read: {error.strerror}") from None
    return [directory / name for name in names]


def tokenizer_file(directory: Path) -> Path | None:
    """The file that the tokenizer in `directory` is read from, the most complete form first; None
    if there is none."""
    for name in (TOKENIZER_JSON, SENTENCEPIECE):
        if (directory / name).is_file():
            return directory / name
    both = (directory / VOCABULARY, directory / MERGES)
    return both[0] if all(path.is_file() for path in both) else None


def check_weights(directory: Path) -> None:
    """Raise `PlanError` if `directory` holds weights that cannot be opened or are cut, or none of a format that is read."""
    if has_weights(directory):
        for path in weight_files(directory):
            _check_header(path)
        return
    names = other_weights(directory)
    if names:
        raise PlanError(
            f"{directory} holds its weights as {names[0]}; only safetensors are read. Convert them "
            f"with transformers: {conversion(directory)}",
            "model.name",
        )


def _check_header(path: Path) -> None:
    try:
        with regular_file.open_regular(path) as file:
            read_header(path, file)
    except OSError as error:
        raise _refused(f"{path}: cannot be read: {error.strerror}") from None
    except TensorFileError as error:
        raise _refused(str(error)) from None


def _refused(words: str) -> PlanError:
    return PlanError(printable(words), "model.name")


def conversion(directory: Path) -> str:
    """The command that writes the weights of `directory` there as safetensors."""
    program = (
        "import sys, transformers as t; d = sys.argv[1]; "
        "t.AutoModelForCausalLM.from_pretrained(d, dtype='auto').save_pretrained(d)"
    )
    return f'python -c "{program}" {shlex.quote(str(directory))}'


def merging(directory: Path) -> str:
    """The command that merges the PEFT adapters in `directory` into their base, as a model in the folder `merged`."""
    program = (
        "import sys, peft, transformers as t; d, out = sys.argv[1:]; "
        "peft.AutoPeftModelForCausalLM.from_pretrained(d).merge_and_unload().save_pretrained(out); "
        "t.AutoTokenizer.from_pretrained(d).save_pretrained(out)"
    )
    return f'python -c "{program}" {shlex.quote(str(directory))} merged'
