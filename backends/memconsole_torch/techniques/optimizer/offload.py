"""Keeps optimizer state in host memory and brings it to the device one weight at a time.

A weight's state is fetched before its optimizer's step and written back after it, on separate
streams. The next weight's state can be fetched during the update of the current one. If device and
host share their memory, nothing is moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from memconsole_torch.techniques.optimizer.rule import Rule

State = dict[str, Tensor]


def same_memory(device: torch.device) -> bool:
    """Whether the device uses the host's memory."""
    return device.type in ("cpu", "mps")


class HostState:
    """Holds the states of optimizers of one weight each, in the order in which they step.

    `pinned`: use page-locked memory, which the device can copy asynchronously. `ahead`: fetch the
    next state during a step, which takes device memory for a second state. Without it the device
    waits until a state has been copied to the host.
    """

    def __init__(self, device: torch.device, *, pinned: bool, ahead: bool) -> None:
        self._device, self._pinned, self._ahead = device, pinned, ahead
        self._on_host: list[State] = []
        """The copy of each state on the host."""
        self._indices: dict[Rule, tuple[int, State]] = {}
        """The index of each optimizer's state, and the dict in which the optimizer finds it."""
        self._streams = _Streams(device)
        self._fetched: dict[int, State] = {}
        """The states that are being copied to the device, by index."""
        self._written: tuple[int, State] | None = None
        """The state that was updated last, whose copies to the host may not have ended."""

    def add(self, optimizer: Rule) -> None:
        """Move the optimizer's state to the host."""
        (state,) = optimizer.state.values()
        on_host = {n: self._host_copy(t) for n, t in state.items() if n != "step"}
        state.update(on_host)
        self._indices[optimizer] = len(self._on_host), state
        self._on_host.append(on_host)

    @contextmanager
    def on_device(self, optimizer: Rule) -> Iterator[None]:
        """A context with the optimizer's state on the device, for one step. Does nothing if it was
        never added."""
        if optimizer not in self._indices:
            yield
            return
        index, state = self._indices[optimizer]
        self.free()
        self._fetch(index)
        if self._ahead and index + 1 < len(self._on_host):
            self._fetch(index + 1)
        self._streams.wait_for_fetched(index)
        state.update(self._fetched.pop(index))
        yield
        on_host = self._on_host[index]
        with self._streams.to_host(index):
            for name, host in on_host.items():
                host.copy_(state[name], non_blocking=self._pinned)
        self._written = index, {name: state[name] for name in on_host}
        state.update(on_host)
        if not self._ahead:
            self.free()

    def free(self) -> None:
        """Free the device memory of the state that was updated last, once it is copied to the host."""
        if self._written is not None:
            self._streams.wait_for_written(self._written[0])
            self._written = None

    def _host_copy(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)
        return host.copy_(tensor)

    def _fetch(self, index: int) -> None:
        """Begin to copy a state to the device, unless this has begun already."""
        if index in self._fetched:
            return
        on_host = self._on_host[index]
        on_device = {
            n: torch.empty_like(t, device=self._device, pin_memory=False)
            for n, t in on_host.items()
        }
        with self._streams.to_device(index):
            for name, host in on_host.items():
                on_device[name].copy_(host, non_blocking=self._pinned)
        self._fetched[index] = on_device


class _Streams:
    """Two CUDA streams, one for each direction. On other devices copies run in order."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._fetched: dict[int, torch.cuda.Event] = {}
            self._written: dict[int, torch.cuda.Event] = {}

    def to_device(self, index: int) -> Any:
        """A context of copies to the device. They run after the work queued so far, whose memory
        they may reuse."""
        return (
            _OnStream(self._in, self._fetched, index, self._written)
            if self._cuda
            else nullcontext()
        )

    def to_host(self, index: int) -> Any:
        """A context of copies to the host, which run after the update."""
        return _OnStream(self._out, self._written, index, {}) if self._cuda else nullcontext()

    def wait_for_fetched(self, index: int) -> None:
        """Make work that is queued later run after the copies to the device."""
        if self._cuda:
            torch.cuda.current_stream().wait_event(self._fetched[index])

    def wait_for_written(self, index: int) -> None:
        """Make work that is queued later, which may reuse its memory, run after the copies to the host."""
        if self._cuda:
            torch.cuda.current_stream().wait_event(self._written[index])


class _OnStream:
    """Runs work on `stream` after the current stream and after the event of `index` in `after`, and
    records an event at its end."""

    def __init__(
        self, stream: Any, events: dict[int, Any], index: int, after: dict[int, Any]
    ) -> None:
        self._stream, self._events, self._index, self._after = stream, events, index, after

    def __enter__(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        if self._index in self._after:
            self._stream.wait_event(self._after[self._index])
        self._context = torch.cuda.stream(self._stream)
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        self._events[self._index] = self._stream.record_event()
