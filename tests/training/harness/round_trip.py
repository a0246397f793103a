"""Generates with transformers from an exported directory: a program of its own, for any version.

It reads {"directory", "base", "prompts", "chats", "tokens"} from standard input. With a `base` the
directory holds adapters, which PEFT loads onto it. Attention is written out (`eager`), because the kernel that
transformers 4 takes for Gemma 2 leaves its caps out.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def generated(directory: str, base: str | None, tokens: int) -> Any:
    """A function from what a tokenizer returns to what is generated greedily, and whether it ended by itself."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(base or directory, attn_implementation="eager")
    if base is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, directory)
        model.generation_config = GenerationConfig.from_pretrained(directory)

    def of(row: Any) -> tuple[list[int], bool]:
        ids = row["input_ids"]
        tensors = {name: torch.tensor([values]) for name, values in row.items()}
        new = model.generate(**tensors, max_new_tokens=tokens, do_sample=False)[0]
        new = new.tolist()[len(ids) :]
        return new, len(new) < tokens

    return of


def said(asked: dict[str, Any]) -> dict[str, Any]:
    """The texts and answers, each with whether it ended by itself."""
    import transformers

    of = generated(asked["directory"], asked.get("base"), asked["tokens"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked["directory"])
    texts: list[Any] = []
    for prompt in asked["prompts"]:
        row = tokenizer(prompt)
        new, ended = of(row)
        texts.append([tokenizer.decode(row["input_ids"] + new, skip_special_tokens=True), ended])
    answers: list[Any] = []
    for chat in asked["chats"]:
        row = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True, tokenize=True
        )
        new, ended = of(row)
        answers.append([tokenizer.decode(new, skip_special_tokens=True).strip(), ended])
    return {"version": transformers.__version__, "texts": texts, "answers": answers}


if __name__ == "__main__":
    print(json.dumps(said(json.load(sys.stdin))))
