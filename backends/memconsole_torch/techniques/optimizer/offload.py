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
    waits until a state has arrived on the host.
    """

    def __init__(self, device: torch.device, *, pinned: bool, ahead: bool) -> None:
        self._device, self._pinned, self._ahead = device, pinned, ahead
        self._held: list[State] = []
        self._visitors: dict[Rule, tuple[int, State]] = {}
        self._streams = _Streams(device)
        self._arriving: dict[int, State] = {}
        self._leaving: tuple[int, State] | None = None
        """The state that was updated last, whose way back may not have ended."""

    def take(self, optimizer: Rule) -> None:
        """Move the optimizer's state to the host."""
        (state,) = optimizer.state.values()
        held = {n: self._on_host(t) for n, t in state.items() if n != "step"}
        state.update(held)
        self._visitors[optimizer] = len(self._held), state
        self._held.append(held)

    @contextmanager
    def visit(self, optimizer: Rule) -> Iterator[None]:
        """A context with the optimizer's state on the device, for one step. Does nothing if it was
        never taken."""
        if optimizer not in self._visitors:
            yield
            return
        place, state = self._visitors[optimizer]
        self.free()
        self._fetch(place)
        if self._ahead and place + 1 < len(self._held):
            self._fetch(place + 1)
        self._streams.wait_for(place)
        state.update(self._arriving.pop(place))
        yield
        held = self._held[place]
        with self._streams.outgoing(place):
            for name, host in held.items():
                host.copy_(state[name], non_blocking=self._pinned)
        self._leaving = place, {name: state[name] for name in held}
        state.update(held)
        if not self._ahead:
            self.free()

    def free(self) -> None:
        """Free the device memory of the state that was updated last, once it has arrived on the host."""
        if self._leaving is not None:
            self._streams.wait_for_written(self._leaving[0])
            self._leaving = None

    def _on_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)
        return host.copy_(tensor)

    def _fetch(self, place: int) -> None:
        if place in self._arriving:
            return
        held = self._held[place]
        here = {
            n: torch.empty_like(t, device=self._device, pin_memory=False) for n, t in held.items()
        }
        with self._streams.incoming(place):
            for name, host in held.items():
                here[name].copy_(host, non_blocking=self._pinned)
        self._arriving[place] = here


class _Streams:
    """Two CUDA streams, one for each direction. On other devices copies run in order."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._arrived: dict[int, torch.cuda.Event] = {}
            self._written: dict[int, torch.cuda.Event] = {}

    def incoming(self, place: int) -> Any:
        """A context of copies to the device. They run after the work queued so far, whose memory
        they may reuse."""
        return _On(self._in, self._arrived, place, self._written) if self._cuda else nullcontext()

    def outgoing(self, place: int) -> Any:
        """A context of copies to the host, which run after the update."""
        return _On(self._out, self._written, place, {}) if self._cuda else nullcontext()

    def wait_for(self, place: int) -> None:
        """Make work that is queued later run after the copies to the device."""
        if self._cuda:
            torch.cuda.current_stream().wait_event(self._arrived[place])

    def wait_for_written(self, place: int) -> None:
        """Make work that is queued later, which may reuse its memory, run after the copies to the host."""
        if self._cuda:
            torch.cuda.current_stream().wait_event(self._written[place])


class _On:
    """Runs work on `stream` after the current stream and after the event of `place` in `after`, and
    records an event at its end."""

    def __init__(
        self, stream: Any, events: dict[int, Any], place: int, after: dict[int, Any]
    ) -> None:
        self._stream, self._events, self._place, self._after = stream, events, place, after

    def __enter__(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        if self._place in self._after:
            self._stream.wait_event(self._after[self._place])
        self._context = torch.cuda.stream(self._stream)
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        self._events[self._place] = self._stream.record_event()
