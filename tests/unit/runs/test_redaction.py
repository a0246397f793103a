"""Tokens and passwords never reach what a run records, and ordinary words stay."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from memconsole.runs.record.log import events
from memconsole.runs.record.log.eventlog import EventWriter
from memconsole.runs.record.log.eventreader import EventReader
from memconsole.runs.record.redaction import (
    REDACTED,
    OutputStream,
    recorded_environment,
    redact,
    secret_values,
)

HEX = "0123456789abcdef0123456789abcdef01234567"
TOKENS = {
    "Hugging Face": "hf_" + "a1B2" * 8,
    "GitHub": "ghp_" + "b" * 36,
    "GitHub, of an app": "ghs_" + "1" * 36,
    "GitHub, fine-grained": "github_pat_11ABCDEFG0" + "_x9Q" * 15,
    "GitLab": "glpat-" + "aB3_-" * 4,
    "OpenAI": "sk-" + "T3Blbk" * 8,
    "OpenAI, of a project": "sk-proj-" + "a1_-" * 30,
    "Anthropic": "sk-ant-api03-" + "Ab9-" * 20,
    "Stripe": "sk_live_" + "4eC39HqLyjWDarjtT1zdp7dc",
    "Amazon": "AKIA" + "A1B2" * 4,
    "Slack": "xoxb-123456789012-abcdefGHIJ",
    "Google": "AIza" + "x" * 35,
    "npm": "npm_" + "a1" * 18,
    "Weights & Biases": "wandb_v1_" + "a1" * 20,
    "a web token": "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeKKF2QT4",
}
ORDINARY = (
    f"commit {HEX}",
    f"sha256 {HEX}{HEX[:24]}",
    f"keys {HEX[:39]}",
    "sk-learn-compatible-estimators-of-every-kind",
    "risk-0123456789012345678901234567",
    "hf_transfer",
    "step 1/400  epoch 1  loss 5.725795  lr 0.001",
    "s3://bucket/a:b",
)


def test_secrets_are_neither_recorded_nor_shown() -> None:
    environment = {
        "HF_TOKEN": "hf_" + "a" * 30,
        "WANDB_API_KEY": "0123456789abcdef" * 2,
        "MY_SECRET": "longenough",
        "DB_PASSWORD": "hunter22",
        "SHORT_KEY": "abc",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "HF_HUB_TOKEN": "anothersecret",
        "JAX_PLATFORMS": "cpu",
        "HF_HOME": "https://user:pass1234@host/x",
        "AWS_ACCESS_KEY_ID": "AKIA" + "A" * 16,
        "HOME": "/home/me",
    }
    recorded = recorded_environment(environment)
    assert recorded["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert recorded["JAX_PLATFORMS"] == "cpu"
    assert "HOME" not in recorded
    values = secret_values(environment)
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_SECRET", "DB_PASSWORD", "HF_HUB_TOKEN"):
        assert environment[name] in values
        assert environment[name] not in str(recorded)
        assert environment[name] not in redact(f"x {environment[name]} y", values)
    assert "abc" not in values
    assert "pass1234" not in str(recorded)
    text = f"Authorization: Bearer abcdefgh12345 {environment['AWS_ACCESS_KEY_ID']} ghp_{'b' * 36}"
    assert redact(text) == "Authorization: Bearer [redacted] [redacted] [redacted]"


@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS)
def test_a_well_known_token_is_hidden_wherever_it_stands(token: str) -> None:
    for before, after in (
        ("", ""),
        ("token=", ""),
        ("'", "'"),
        ("https://h/?k=", "&b"),
        ("x ", ","),
    ):
        assert redact(before + token + after) == before + REDACTED + after


@pytest.mark.parametrize(
    "before", ["wandb login ", "WANDB_API_KEY=", '"api_key": "', "key: ", "Token = '", "key=local-"]
)
def test_forty_hexadecimal_digits_are_hidden_where_a_key_stands(before: str) -> None:
    assert redact(before + HEX) == before.removesuffix("local-") + REDACTED


@pytest.mark.parametrize("text", ORDINARY)
def test_what_only_looks_alike_stays(text: str) -> None:
    assert redact(text) == text


def test_tokens_that_no_variable_holds_reach_neither_the_output_nor_the_log(tmp_path: Path) -> None:
    output, token = io.StringIO(), TOKENS["OpenAI"]
    print("signed in with", token, file=OutputStream(output, ()))
    assert output.getvalue() == f"signed in with {REDACTED}\n"
    EventWriter(tmp_path).write(events.Warning(message=f'no answer from "http://h/?k={token}"'))
    (record,) = EventReader(tmp_path).read()
    assert isinstance(record, events.Warning)
    assert record.message == f'no answer from "http://h/?k={REDACTED}"'
