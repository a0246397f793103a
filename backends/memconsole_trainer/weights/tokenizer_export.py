"""Writes the files beside exported weights: tokenizer, special tokens, chat template, generation settings.

With these files `AutoTokenizer` tokenizes a text as the run did. `generate` gives the same text as `memconsole sample`
and stops at the same token, unless the generation settings of the model that was fine-tuned change the likeliest token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memconsole import regular_file
from memconsole.plan import catalog
from memconsole.plan.models import tokenizer_config
from memconsole.plan.models.configs.families import CONFIG_BYTES
from memconsole.plan.models.files import TOKENIZER_JSON
from memconsole.plan.plan import Plan
from memconsole.plan.templates.choice import source_of, template_of
from memconsole_trainer.data.text.tokens.tokenizer import Tokenizer

GENERATION = "generation_config.json"
_SPECIAL_TOKENS = ("bos", "eos", "unk", "pad")
_NEUTRAL_SETTINGS = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "guidance_scale": 1,
    "penalty_alpha": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
}
"""Generation settings that change the text also if the likeliest token is taken, with the values that do not."""
_EXAMPLE_RECORD = {"messages": [{"role": "user", "content": "?"}]}


def write(plan: Plan, tokenizer: Tokenizer, positions: int, out: Path) -> None:
    """Write the tokenizer's files and the generation settings into `out`. Raises OSError and
    `PlanError`."""
    inner, config = tokenizer.inner, tokenizer.config
    (out / TOKENIZER_JSON).write_text(inner.to_str(pretty=True) + "\n", encoding="utf-8")
    named = {name: config.token(name) for name in _SPECIAL_TOKENS}
    known = {
        name: token
        for name, token in named.items()
        if token and inner.token_to_id(token) is not None
    }
    if tokenizer.end_of_text is not None:
        known["eos"] = inner.id_to_token(tokenizer.end_of_text)
    special = {f"{name}_token": token for name, token in known.items()}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        **config.more_special,
        "model_max_length": config.model_max_length or positions,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    for side in ("padding_side", "truncation_side"):
        if (named_side := getattr(config, side)) is not None:
            settings[side] = named_side
    template = chat_template(plan, tokenizer)
    if template is not None:
        settings["chat_template"] = template
        (out / tokenizer_config.CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    _write_json(out / tokenizer_config.CONFIG, settings)
    _write_json(out / tokenizer_config.SPECIAL, special)
    generation = {**_source_json(plan, GENERATION), **token_ids(plan, tokenizer)}
    _write_json(out / GENERATION, generation)


def generation_notes(plan: Plan) -> list[str]:
    """What to know of the generation settings, in sentences: which ones `memconsole sample` does not follow."""
    settings = _source_json(plan, GENERATION)
    followed = [
        f"{name} = {json.dumps(settings[name])}"
        for name, neutral in _NEUTRAL_SETTINGS.items()
        if settings.get(name) not in (None, neutral)
    ]
    if not followed:
        return []
    return [
        f"generate follows generation_config.json of the base ({', '.join(followed)}), memconsole sample does not: "
        "their texts may differ"
    ]


def token_ids(plan: Plan, tokenizer: Tokenizer) -> dict[str, Any]:
    """The ids that config.json and generation_config.json name: which tokens begin, end and fill."""
    stops = list(stop_tokens(plan, tokenizer))
    begin = tokenizer.config.token("bos")
    first = tokenizer.inner.token_to_id(begin) if begin else None
    ids: dict[str, Any] = {
        "bos_token_id": tokenizer.begin[0] if tokenizer.begin else first,
        "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
        "pad_token_id": tokenizer.pad if tokenizer.pad is not None else tokenizer.end_of_text,
    }
    return {name: value for name, value in ids.items() if value is not None}


def stop_tokens(plan: Plan, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens at which generation with the run's model stops."""
    template = template_of(plan)
    chat = template is not None and template.chat
    after = template.question(_EXAMPLE_RECORD).between[-1] if template is not None and chat else ""
    return tuple(dict.fromkeys([*tokenizer.stops(after), *ends_of_source(plan, tokenizer)]))


def ends_of_source(plan: Plan, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens at which the model that was fine-tuned stops, if the run's tokenizer has them as special tokens."""
    settings = _source_json(plan, GENERATION) or _source_json(plan, "config.json")
    ids = settings.get("eos_token_id")
    known = tokenizer.special_ids
    return tuple(i for i in (ids if isinstance(ids, list) else [ids]) if i in known)


def chat_template(plan: Plan, tokenizer: Tokenizer) -> str | None:
    """The template that the run's chats were written with, else the one of its tokenizer; with the
    tokens that begin a text, which training adds by itself."""
    template = template_of(plan)
    if template is None or not template.chat:
        return tokenizer.config.template
    source, _ = source_of(plan)
    begin = [tokenizer.inner.id_to_token(i) for i in tokenizer.begin]
    written = str(template.question(_EXAMPLE_RECORD).prompt)
    return source if written.startswith("".join(begin)) else "".join(begin) + source


def _source_json(plan: Plan, name: str) -> dict[str, Any]:
    """The contents of a JSON file of the model that was fine-tuned; empty if there is none."""
    directory = catalog.model_directory(plan)
    if directory is None:
        return {}
    try:
        contents = json.loads(regular_file.read(Path(directory, name), CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return contents if isinstance(contents, dict) else {}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
