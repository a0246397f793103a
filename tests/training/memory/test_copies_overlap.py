"""What waits for copies between device and host that overlap with computation, and when their memory is freed."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn

from memconsole.plan.plan import Plan, replace
from memconsole_torch import devices
from memconsole_torch.techniques.activations import activation_offload
from memconsole_torch.techniques.optimizer.offload import HostState


class Slow:
    """A store whose writes end when someone waits for them."""

    ahead = True

    def __init__(self, device: Any, directory: Path | None) -> None:
        self.writing: list[weakref.ref[Tensor]] = []
        self.most = 0

    def write(self, tensor: Tensor) -> Tensor:
        self.writing.append(weakref.ref(tensor))
        return tensor.clone()

    def read(self, kept: Tensor) -> Tensor:
        return kept

    def wait(self) -> None: ...

    def written(self) -> None:
        self.most = max(self.most, len(self.writing))
        assert all(tensor() is not None for tensor in self.writing), "freed while it was written"
        self.writing.clear()

    def clear(self) -> None: ...


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_activations_live_until_they_are_written_and_those_of_one_block_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow: list[Slow] = []
    monkeypatch.setattr(
        activation_offload, "store", lambda *where: slow.append(Slow(*where)) or slow[0]
    )
    plain, moved = Layers(), Layers()
    moved.load_state_dict(plain.state_dict())
    activation_offload.apply(moved, None)
    x = torch.randn(64, 32)
    y = moved(x.clone().requires_grad_())
    assert not slow[0].writing, "the last block's writes are waited for before the loss"
    assert 0 < slow[0].most <= 2, "an input and an output: one block's"
    y.sum().backward()
    plain(x.clone().requires_grad_()).sum().backward()
    for one, other in zip(plain.parameters(), moved.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Recorded:
    """Streams of a device that is not here: the order of what is queued."""

    def __init__(self) -> None:
        self.queued: list[str] = []

    def to_device(self, place: int) -> Any:
        self.queued.append(f"in {place}")
        return torch.no_grad()

    def to_host(self, place: int) -> Any:
        self.queued.append(f"out {place}")
        return torch.no_grad()

    def wait_for_fetched(self, place: int) -> None:
        self.queued.append(f"wait in {place}")

    def wait_for_written(self, place: int) -> None:
        self.queued.append(f"wait out {place}")


class OneWeight:
    """As much of an optimizer as is offloaded."""

    def __init__(self) -> None:
        self.state = {0: {"first": torch.zeros(8), "step": torch.zeros(())}}


@pytest.mark.parametrize("ahead", [True, False])
def test_a_state_is_freed_once_it_has_arrived_and_before_the_next_one_is_fetched(
    ahead: bool,
) -> None:
    host = HostState(torch.device("cpu"), pinned=False, ahead=ahead)
    host._streams = streams = Recorded()  # type: ignore[assignment]
    rules = [OneWeight() for _ in range(3)]
    for rule in rules:
        host.add(rule)  # type: ignore[arg-type]
    here: list[weakref.ref[Tensor]] = []
    for number, rule in enumerate(rules):
        with host.on_device(rule):  # type: ignore[arg-type]
            alive = sum(tensor() is not None for tensor in here)
            assert alive == 0, "of the states before"
            rule.state[0]["first"].add_(number + 1)
            here.append(weakref.ref(rule.state[0]["first"]))
        assert (here[-1]() is not None) == ahead, "until it has arrived"
    host.free()
    assert not any(tensor() is not None for tensor in here)
    assert [float(rule.state[0]["first"][0]) for rule in rules] == [1.0, 2.0, 3.0]
    assert streams.queued.index("wait out 0") < streams.queued.index("in 2")
    assert streams.queued[-1] == "wait out 2"


def test_a_gpu_of_another_number_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        devices.prepare(torch.device("cuda", 1), replace(Plan(), {"device.name": "cuda:1"}))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert current == [torch.device("cuda", 1)]
