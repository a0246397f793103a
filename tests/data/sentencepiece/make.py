"""Trains two small SentencePiece models and writes what the library makes of texts.

`pip install sentencepiece`, then `python tests/data/sentencepiece/make.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import sentencepiece

HERE = Path(__file__).parent
SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "def add(first, second):\n    return first + second",
    "She sold sea shells, and he sold 1234 sea stones.",
    "Größe und Maß: naïve café, déjà vu.",
    "the  two   spaces and/or a <tag> in between",
] * 40
TEXTS = [
    "The lazy dog sold the quick fox.",
    " leading, trailing ",
    "two  spaces,\nnew line\tand tab",
    "unknown: 漢字 and 🙂",
    "a <tag> and </s> as text",
    "１２ ﬁne ligature",
    "",
]
MODELS: dict[str, dict[str, Any]] = {
    "bpe": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "unigram": {"model_type": "unigram", "normalization_rule_tsv": "rules.tsv"},
    "gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<tag>"],
    },
}


def main() -> None:
    rules = Path("rules.tsv")
    rules.write_text("FB01\t66 69\nFF11\t31\nFF12\t32\n")
    expected: dict[str, Any] = {"texts": TEXTS, "ids": {}, "decoded": {}}
    for name, options in MODELS.items():
        path = HERE / name
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES),
            model_prefix=str(path),
            vocab_size=420 if options.get("byte_fallback") else 66,
            num_threads=1,
            **options,
        )
        path.with_suffix(".vocab").unlink()
        model = sentencepiece.SentencePieceProcessor(model_file=str(path.with_suffix(".model")))
        expected["ids"][name] = [model.encode(text) for text in TEXTS]
        expected["decoded"][name] = [model.decode(ids) for ids in expected["ids"][name]]
    rules.unlink()
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
