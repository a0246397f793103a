"""Keeps tokens and passwords out of the files of a run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

REDACTED = "[redacted]"
SECRET_CHARACTERS = 6
"""Shorter values would blank out ordinary words."""

_SECRET_NAME = re.compile(
    r"(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH|COOKIE)(?:S)?$|(?:^|_)PASS$", re.I
)
_SECRET_SHAPE = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|glpat-[A-Za-z0-9_-]{16,}"  # GitLab
    # Providers of models, payments; a name such as sk-learn-compatible-estimators has no digit.
    r"|(?:sk|rk|pk)[-_](?=[A-Za-z_-]{0,50}\d)[A-Za-z0-9_-]{20,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"  # Amazon
    r"|AIza[A-Za-z0-9_-]{35}|ya29\.[A-Za-z0-9_-]{20,}"  # Google
    r"|xox[a-z]-[A-Za-z0-9-]{10,}"  # Slack
    r"|npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{30,}|dckr_pat_[A-Za-z0-9_-]{20,}"
    r"|wandb_v\d_[A-Za-z0-9_-]{20,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"  # JSON web tokens
    r")"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/=-]{8,}"
    r"|(?<=://)[^/\s@:\"]+:[^/\s@\"]+(?=@)"
)
_HEX_KEY = re.compile(
    r"((?:key|token|secret|passw(?:or)?d|wandb|login)[\"']?\s{0,3}(?:[:=]\s{0,3})?[\"']?)"
    r"(?:local-)?[0-9a-f]{40}(?![0-9a-f])",
    re.I,
)
"""Forty hexadecimal digits after such a word are a key of Weights & Biases; elsewhere they are a commit."""

_RECORDED = re.compile(
    r"(?:CUDA|JAX|XLA|TORCH|PYTORCH|TRITON|OMP|MKL|OPENBLAS|MALLOC|NCCL|HIP|HSA|ROCR|LIBTPU|TPU|MEMCONSOLE|"
    r"SLURM_JOB|PYTHON|HF_HOME|HF_HUB_|HF_DATASETS_|TOKENIZERS_)[A-Z0-9_]*"
    r"|VIRTUAL_ENV|CONDA_PREFIX|LANG|LC_ALL|TZ"
)


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """Values that must not be written anywhere, longest first."""
    found = {
        value
        for name, value in environment.items()
        if _SECRET_NAME.search(name) and len(value) >= SECRET_CHARACTERS
    }
    return sorted(found, key=len, reverse=True)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without the given secrets and without anything that looks like a well-known token."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return _HEX_KEY.sub(rf"\1{REDACTED}", _SECRET_SHAPE.sub(REDACTED, text))


class OutputStream:
    """A trainer's text output: hides secrets, and does not fail on a full disk.

    Text that cannot be written is dropped and counted. The count is written once there is room.
    """

    def __init__(self, stream: TextIO, secrets: Iterable[str]) -> None:
        self._stream = stream
        self._secrets = tuple(secrets)
        self._lost = 0
        """Characters that were dropped since the last successful write."""

    def write(self, text: str) -> int:
        try:
            if self._lost:
                self._stream.write(f"[{self._lost:,} characters could not be written]\n")
                self._lost = 0
            self._stream.write(redact(text, self._secrets))
        except OSError:
            self._lost += len(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def recorded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that `run.json` keeps: those that change what frameworks compute."""
    secrets = secret_values(environment)
    return {
        name: REDACTED if _SECRET_NAME.search(name) else redact(value, secrets)
        for name, value in sorted(environment.items())
        if _RECORDED.fullmatch(name)
    }
