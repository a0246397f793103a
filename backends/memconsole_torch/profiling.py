"""Records steps in torch: a trace for Perfetto or chrome://tracing, and the memory history.

`trace.json.gz` is the profiler's trace; `operators.txt` sums its events by operator. On CUDA,
`memory.pickle` holds the allocator's history with stacks, for https://pytorch.org/memory_viz.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

MOST_EVENTS = 100_000
"""Number of newest events of the allocator's history that are kept."""
_ROWS = 40


class Recording:
    """Records from its construction to `stop`."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = folder
        self._cuda = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._profile = profile(activities=activities, record_shapes=True, profile_memory=True)
        if self._cuda:
            torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
        self._profile.start()

    def stop(self) -> None:
        """End the recording and write its files."""
        self._profile.stop()
        if self._cuda:
            torch.cuda.memory._dump_snapshot(str(self._folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profile.export_chrome_trace(str(self._folder / "trace.json.gz"))
        order = "self_cuda_memory_usage" if self._cuda else "self_cpu_memory_usage"
        table = self._profile.key_averages(group_by_input_shape=True).table(order, row_limit=_ROWS)
        (self._folder / "operators.txt").write_text(table)
