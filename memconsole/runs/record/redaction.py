"""Keeps tokens and passwords out of what a run records."""

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
    r"hf_[A-Za-z0-9]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/=-]{8,}"
    r"|(?<=://)[^/\s@:]+:[^/\s@]+(?=@)"
)

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
    return _SECRET_SHAPE.sub(REDACTED, text)


class OutputStream:
    """A trainer's text output: hides secrets, and outlives a full disk.

    What cannot be written is left out and counted. The count is written once there is room.
    """

    def __init__(self, stream: TextIO, secrets: Iterable[str]) -> None:
        self._stream = stream
        self._secrets = tuple(secrets)
        self._lost = 0
        """Characters that could not be written since the last that could."""

    def write(self, text: str) -> int:
        try:
            if self._lost:
                self._stream.write(f"[{self._lost:,} characters could not be written]\n")
                self._lost = 0
            self._stream.write(redact(text, self._secrets) if self._secrets else text)
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
