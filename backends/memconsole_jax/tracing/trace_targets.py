"""Devices that XLA compiles for, one or several: host devices of this CPU, TPUs through libtpu, and NVIDIA GPUs through
the CUDA plugin. The TPUs and GPUs need not be present."""

from __future__ import annotations

import importlib.util
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

import jax
from jaxlib import xla_client

from memconsole.extras import to_install
from memconsole.plan import catalog
from memconsole.plan.catalog import CatalogDevice
from memconsole.plan.plan import PlanError
from memconsole_jax.devices import matmul_with_eigen

TOPOLOGIES = {
    "tpu-v2": "v2:2x2",
    "tpu-v3": "v3:2x2",
    "tpu-v4": "v4:2x2x1",
    "tpu-v5e": "v5e:2x2",
    "tpu-v5p": "v5p:2x2x1",
    "tpu-v6e": "v6e:2x2",
    "tpu-7x": "tpu7x:2x2x1",
}
"""One host of each TPU, as libtpu names it."""
UNTUNED_CAVEAT = (
    "compiled without the GPU: kernels are not tuned, and a stand-in replaces 16-bit attention"
)
COLLECTIVES_CAVEAT = "buffers of the library that connects the devices are not counted"
MEGACORE = ("tpu-v4",)
"""Chips whose two cores work as one device."""


@dataclass(frozen=True)
class Target:
    """What to compile for."""

    devices: tuple[Any, ...]
    """The devices of a plan. All of them run the same program, each with its part of the arrays."""
    kind: str
    """cpu | gpu | rocm | tpu"""
    name: str
    is_absent: bool
    """Whether the devices are only described, and not in this machine."""
    compiler: str
    """What compiles, with versions."""
    caveat: str = ""
    options: tuple[tuple[str, bool | str], ...] = ()
    """XLA's compiler options."""


def prepare_environment() -> None:
    """Set the environment so that libtpu and the CUDA plugin load without their devices, and open no present device."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    jax.config.update("jax_platforms", "cpu")
    matmul_with_eigen()


def target(name: str, kind: str, count: int = 1, nodes: int = 1) -> Target:
    """`count` devices to compile for, spread over `nodes`: those of a catalog name, or of this machine for "".
    Raises `PlanError`."""
    if not name:
        return _local(kind, count)
    device = catalog.catalog_device(name)
    if device.kind == "tpu":
        return _tpu(name, device, count)
    if device.kind == "gpu":
        return _nvidia(name, device, count, nodes)
    if device.kind == "rocm":
        raise PlanError(
            f"{device.label}: XLA's ROCm plugin does not compile without an AMD GPU here; only the formula estimates it"
        )
    raise PlanError(f"{device.label}: JAX does not train on it")


def _local(kind: str, count: int) -> Target:
    if kind != "cpu":
        raise PlanError(
            "XLA compiles for devices of the catalog: a tracer opens no accelerator, which may be training"
        )
    return Target(
        _host_devices(count),
        "cpu",
        "this CPU",
        False,
        f"XLA {version('jaxlib')}",
        "XLA for CPUs drops recomputation and keeps more temporaries than for GPUs and TPUs",
    )


def _host_devices(count: int) -> tuple[Any, ...]:
    """`count` host devices of this CPU. JAX fixes their number when it opens the CPU, so for several devices a new client
    is made."""
    own = jax.local_devices(backend="cpu")
    if count <= len(own):
        return tuple(own[:count])
    client: Any = xla_client.make_cpu_client(num_devices=count)
    return tuple(client.devices())


def _tpu(name: str, known: CatalogDevice, count: int) -> Target:
    if importlib.util.find_spec("libtpu") is None:
        raise PlanError(
            f"compiling for {known.label} needs libtpu, but no TPU: {to_install('tpu')}"
        )
    if name not in TOPOLOGIES:
        raise PlanError(f"{known.label}: libtpu's name for it is not known")
    options = {"chip_config_name": "megacore"} if name in MEGACORE else {}
    every = (_topology(one, "tpu", **options) for one in slices(TOPOLOGIES[name]))
    description = next(one for one in every if len(one.devices) >= count)
    compiler = f"XLA {version('jaxlib')} with libtpu {version('libtpu')}"
    return Target(tuple(description.devices[:count]), "tpu", known.label, True, compiler)


def slices(host: str) -> Iterator[str]:
    """The names that libtpu gives to one `host` of TPUs and to ever larger slices. Each slice doubles the last one of the
    shortest sides of the one before it, as Google's slices do."""
    generation, _, shape = host.partition(":")
    sides = [int(side) for side in shape.split("x")]
    while True:
        yield f"{generation}:{'x'.join(map(str, sides))}"
        shortest = max(i for i, side in enumerate(sides) if side == min(sides))
        sides[shortest] *= 2


def _nvidia(name: str, known: CatalogDevice, count: int, nodes: int) -> Target:
    plugin = _cuda_plugin()
    if plugin is None:
        raise PlanError(
            f"compiling for {known.label} needs XLA's CUDA plugin, but no GPU: {to_install('cuda-plan')}"
        )
    facts = _gpus()["device"].get(name)
    if facts is None:
        raise PlanError(f"{known.label}: what XLA must know of it is not known")
    shape = f"1x{nodes}x{count // nodes}"  # slices, nodes of each, devices of each
    description = _topology("one", "cuda", target_config=_config(known, facts), topology=shape)
    return Target(
        tuple(description.devices),
        "gpu",
        known.label,
        True,
        f"XLA {version('jaxlib')} with {plugin} {version(plugin)}",
        UNTUNED_CAVEAT if count == 1 else f"{UNTUNED_CAVEAT}; {COLLECTIVES_CAVEAT}",
        (("xla_gpu_autotune_level", "0"),),
    )


def _topology(name: str, platform: str, **options: str) -> Any:
    """A description of devices that need not be present. Raises `PlanError`."""
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(name, platform=platform, **options)
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise PlanError(f"XLA cannot describe {name} on {platform}: {first}") from error


def _cuda_plugin() -> str | None:
    """The name of the installed package of XLA's CUDA plugin."""
    for name in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return name
    return None


@lru_cache(maxsize=1)
def _gpus() -> dict[str, Any]:
    """What XLA must know of GPUs that are not here."""
    return tomllib.loads(files("memconsole_jax").joinpath("gpus.toml").read_text())


def _config(known: CatalogDevice, facts: dict[str, Any]) -> str:
    """`stream_executor.GpuTargetConfigProto` as text."""
    major, minor = facts["capability"].split(".")
    capability = _gpus()["capability"][facts["capability"]]
    numbers = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_core": capability["shared_kib"] * 1024,
        "shared_memory_per_block_optin": capability["shared_block_kib"] * 1024,
        "threads_per_core_limit": capability["threads"],
        "core_count": facts["multiprocessors"],
        "fpus_per_core": capability["lanes"],
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": int(known.bandwidth_bytes_per_second or 0),
        "l2_cache_size": facts["l2_mib"] * 2**20,
        "clock_rate_ghz": facts["clock_ghz"],
        "device_memory_size": known.total_bytes,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    lines = [f"  {key}: {value}" for key, value in numbers.items()]
    return "\n".join(
        [
            "gpu_device_info {",
            *lines,
            f"  cuda_compute_capability {{ major: {major} minor: {minor} }}",
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 10 }",
            "runtime_version { major: 12 minor: 9 }",
            f'device_description_str: "{known.label}"',
        ]
    )
