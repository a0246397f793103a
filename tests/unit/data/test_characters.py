"""A tokenizer of characters: each is one token, and what it does not know becomes one unknown token."""

from __future__ import annotations

from pathlib import Path

from memconsole_trainer.data.text.tokens.tokenizer import UNKNOWN, byte_length, load, of_characters

TEXT = ["To be, or not to be:\nthat is the question — é", "Whether 'tis nobler"]


def test_each_character_is_one_token_and_comes_back(tmp_path: Path) -> None:
    made = of_characters(TEXT, 128)
    made.save(tmp_path / "tokenizer.json")
    for tokenizer in (made, load(tmp_path / "tokenizer.json", 128)):
        assert tokenizer.vocab_size == len(set("".join(TEXT))) + 2
        for text in TEXT:
            ids = tokenizer.encode([text])
            assert len(ids) == len(text) + 1  # the end of the text
            assert tokenizer.decode(ids[:-1].tolist()) == text
            ids, sizes = tokenizer.encode_measured(text)
            assert len(sizes) == len(ids)
            assert int(sizes.sum()) == byte_length(text)


def test_an_unknown_character_is_one_token_and_no_text_is_a_mark() -> None:
    tokenizer = of_characters(TEXT, 128)
    unknown = tokenizer.inner.token_to_id(UNKNOWN)
    assert tokenizer.prompt("be日e") == [*tokenizer.prompt("be"), unknown, *tokenizer.prompt("e")]
    assert len(tokenizer.prompt("<|endoftext|>")) == len("<|endoftext|>")


def test_a_small_vocabulary_keeps_the_most_frequent_characters() -> None:
    tokenizer = of_characters(["aaabbbccd"], 5)
    assert set(tokenizer.inner.get_vocab()) == {"<|endoftext|>", UNKNOWN, "a", "b", "c"}


def test_upper_case_is_folded_where_the_plan_says_so() -> None:
    tokenizer = of_characters(["Aa"], 9, lowercase=True)
    assert tokenizer.prompt("A") == tokenizer.prompt("a")
    assert tokenizer.vocab_size == 3
