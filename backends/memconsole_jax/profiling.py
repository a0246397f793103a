"""Records steps in JAX: XLA's trace, and a profile of the device's memory.

`perfetto_trace.json.gz` opens in https://ui.perfetto.dev; the `xplane.pb` beside it in XProf.
`memory.prof` lists live buffers by the line of Python that made them, in the format of pprof.
"""

from __future__ import annotations

from pathlib import Path

import jax


class Recording:
    """Records from its construction to `stop`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        jax.profiler.start_trace(str(folder), create_perfetto_trace=True)

    def stop(self) -> None:
        """End the recording and write its files."""
        jax.profiler.stop_trace()
        jax.profiler.save_device_memory_profile(str(self._folder / "memory.prof"))
