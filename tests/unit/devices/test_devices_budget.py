"""A plan is judged by what its framework could really take of the device it would pick."""

from __future__ import annotations

import pytest

from memconsole.devices.budget import PROCESS, DevicesUnknown, budget
from memconsole.devices.frameworks import Framework, framework_of, jax_of, torch_of
from memconsole.devices.reading import Bytes, DeviceReading, Devices, Missing
from memconsole.memory.coefficients import runtime
from memconsole.memory.estimate import estimate
from memconsole.plan import catalog
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, PlanError, apply_settings
from memconsole.units import MIB

GIB = 1 << 30


def device(
    identifier: str, kind: str, total: Bytes, free: Bytes, name: str = "a device"
) -> DeviceReading:
    unknown = Missing("not asked")
    return DeviceReading(
        id=identifier,
        name=name,
        kind=kind,
        memory_label="host RAM" if kind == "cpu" else "VRAM",
        total_bytes=total,
        used_bytes=unknown,
        free_bytes=free,
        utilization_percent=unknown,
        temperature_celsius=unknown,
        power_watts=unknown,
    )


HOST = device("cpu", "cpu", 32 * GIB, 20 * GIB, "a processor")
GPU = device("cuda:0", "gpu", 24 * GIB, 23 * GIB, "NVIDIA GeForce RTX 4090")
RADEON = device("cuda:0", "rocm", 12 * GIB, 11 * GIB, "AMD Radeon RX 6750 XT")
MAC = device("mps", "apple", 16 * GIB, 14 * GIB, "Apple M2")
TPU = device("tpu:0", "tpu", Missing("owner only"), Missing("owner only"), "TPU v5e")
EVERY_KIND = frozenset({"cpu", "gpu", "rocm", "apple", "tpu"})


def price(
    settings: list[str],
    *found: DeviceReading,
    kinds: frozenset[str] = EVERY_KIND,
    environment: dict[str, str] | None = None,
    notes: tuple[str, ...] = (),
    unanswered: tuple[str, ...] = (),
) -> Budget:
    return budget(
        apply_settings(Plan(), settings),
        Devices(devices=found, notes=notes, unanswered=unanswered),
        framework=lambda name: Framework(name=name, version="1", kinds=kinds),
        environment=environment or {},
    )


@pytest.mark.parametrize(
    ("backend", "found", "kind"),
    [
        ("torch", (GPU, HOST), "gpu"),
        ("torch", (RADEON, HOST), "rocm"),
        ("torch", (MAC, HOST), "apple"),
        ("torch", (TPU, HOST), "cpu"),
        ("torch", (HOST,), "cpu"),
        ("jax", (GPU, TPU, HOST), "tpu"),
        ("jax", (GPU, HOST), "gpu"),
        ("jax", (MAC, HOST), "cpu"),
    ],
)
def test_auto_is_what_the_backend_would_pick(
    backend: str, found: tuple[DeviceReading, ...], kind: str
) -> None:
    resolved = price([f"backend={backend}"], *found)
    assert resolved.kind == kind
    assert resolved.local


def test_a_gpu_the_framework_was_not_built_for_is_passed_over_and_named() -> None:
    resolved = price([], GPU, HOST, kinds=frozenset({"cpu"}))
    assert resolved.kind == "cpu"
    assert "RTX 4090 not used: torch 1 here is built without it" in resolved.why


def test_jax_platforms_decides_for_jax_alone() -> None:
    environment = {"JAX_PLATFORMS": "cpu"}
    assert price(["backend=jax"], GPU, HOST, environment=environment).kind == "cpu"
    assert price(["backend=torch"], GPU, HOST, environment=environment).kind == "gpu"
    assert price(["backend=jax"], GPU, HOST, environment={"JAX_PLATFORMS": "cuda"}).kind == "gpu"


def test_a_lost_gpu_is_not_picked_and_says_why() -> None:
    lost = device("cuda:0", "gpu", Missing("GPU lost"), Missing("GPU lost"), "RTX")
    resolved = price([], lost, HOST)
    assert resolved.kind == "cpu"
    assert "GPU lost" in resolved.why


@pytest.mark.parametrize(
    ("settings", "found", "usable", "why"),
    [
        (["device.name=cuda:0"], GPU, 23 * GIB, "free now"),
        (["device.name=cuda:0", "backend=jax"], GPU, 18 * GIB, "75 % of total (JAX)"),
        (
            ["device.name=cuda:0", "backend=jax"],
            device("cuda:0", "gpu", 24 * GIB, 5 * GIB),
            5 * GIB,
            "free now",
        ),
        (
            ["device.name=cuda:0", "backend=jax", "device.memory_fraction=0.5"],
            GPU,
            12 * GIB,
            "50 % of total (device.memory_fraction)",
        ),
        (
            ["device.name=cuda:0", "device.memory_fraction=0.25"],
            GPU,
            6 * GIB,
            "25 % of total (device.memory_fraction)",
        ),
        (["device.name=cpu"], HOST, 20 * GIB - 293 * MIB, "free now, less 293 MiB for PyTorch"),
        (
            ["device.name=cpu", "backend=jax"],
            HOST,
            20 * GIB - 339 * MIB,
            "free now, less 339 MiB for JAX",
        ),
        (
            ["device.name=cpu", "device.memory_fraction=0.25"],
            HOST,
            8 * GIB,
            "25 % of total (device.memory_fraction)",
        ),
        (["device.name=cuda:0"], RADEON, 11 * GIB, "free now"),
    ],
)
def test_usable_bytes_of_a_local_device(
    settings: list[str], found: DeviceReading, usable: int, why: str
) -> None:
    resolved = price(settings, found)
    assert (resolved.usable_bytes, resolved.why) == (usable, why)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_cpu_keeps_room_for_the_process_itself(backend: str) -> None:
    taken = PROCESS[backend][1]
    assert taken == pytest.approx(runtime(backend, "cpu").host_bytes, rel=0.01)
    small = device("cpu", "cpu", 300 * MIB, 270 * MIB)
    assert price(["device.name=cpu", f"backend={backend}"], small).usable_bytes == 0


def test_a_device_that_does_not_tell_its_free_memory_is_judged_by_its_total() -> None:
    silent = device("cuda:0", "gpu", 8 * GIB, Missing("not supported"))
    resolved = price(["device.name=cuda:0"], silent)
    assert resolved.usable_bytes == 8 * GIB
    assert resolved.why == "total; free now is n/a: not supported"


def test_apple_is_judged_by_its_working_set_and_by_what_is_free() -> None:
    resolved = price(["device.name=mps"], MAC, HOST)
    assert resolved.usable_bytes == 16 * GIB * 2 // 3
    assert "working set" in resolved.why
    busy = device("mps", "apple", 16 * GIB, 4 * GIB)
    assert price(["device.name=mps"], busy).usable_bytes == 4 * GIB


def test_a_tpu_is_known_by_its_type() -> None:
    resolved = price(["device.name=tpu", "backend=jax"], TPU, HOST)
    assert resolved.total_bytes == catalog.catalog_device("tpu-v5e").total_bytes
    assert resolved.local


def test_a_tpu_of_unknown_type_is_an_error_not_a_guess() -> None:
    unknown = Missing("owner only")
    strange = device("tpu:0", "tpu", unknown, unknown, "TPU of unknown type")
    with pytest.raises(PlanError, match="owner only"):
        price(["device.name=tpu"], strange)


def test_catalog_devices_are_priced_without_being_here() -> None:
    entry = catalog.catalog_device("rtx-3060-12gb")
    torch = price(["device.name=rtx-3060-12gb"], HOST)
    assert (torch.usable_bytes, torch.local) == (entry.usable_bytes, False)
    assert torch.peak_flops == entry.peak_flops
    jax = price(["device.name=rtx-3060-12gb", "backend=jax"], HOST)
    assert jax.usable_bytes == int(0.75 * entry.total_bytes)


@pytest.mark.parametrize("name", sorted(catalog.devices()))
def test_every_catalog_device_has_a_budget_within_its_memory(name: str) -> None:
    for backend in ("torch", "jax"):
        resolved = price([f"device.name={name}", f"backend={backend}"], HOST)
        assert 0 < resolved.usable_bytes <= resolved.total_bytes


@pytest.mark.parametrize(
    ("name", "catalog_name"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
    ],
)
def test_a_local_gpu_has_the_rates_of_the_same_product(name: str, catalog_name: str) -> None:
    entry = catalog.catalog_device(catalog_name)
    here = device("cuda:0", "gpu", int(entry.total_bytes * 1.01), 1 * GIB, name)
    assert price(["device.name=cuda:0"], here).peak_flops == entry.peak_flops


@pytest.mark.parametrize(
    ("name", "gibibytes"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 24),
        ("NVIDIA H100 PCIe", 80),
        ("NVIDIA GeForce RTX 4090", 16),
        ("NVIDIA A1000", 40),
        ("NVIDIA", 24),
    ],
)
def test_another_product_does_not_borrow_its_rates(name: str, gibibytes: int) -> None:
    here = device("cuda:0", "gpu", gibibytes * GIB, 1 * GIB, name)
    assert price(["device.name=cuda:0"], here).peak_flops == {}


def test_a_device_that_is_not_here_says_what_is_and_why() -> None:
    with pytest.raises(PlanError) as raised:
        price(["device.name=cuda:1"], GPU, HOST, notes=("NVIDIA: 1 GPU hidden", "AMD: none"))
    message = str(raised.value)
    assert "NVIDIA: 1 GPU hidden" in message
    assert "here: cuda:0, cpu" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "driver"),
    [
        ("cuda:0", "NVIDIA"),
        ("cuda:0", "device probe"),
        ("mps", "device probe"),
        ("tpu", "device probe"),
    ],
)
def test_a_device_whose_driver_has_not_answered_is_not_called_absent(
    name: str, driver: str
) -> None:
    notes = (f"{driver}: the driver has not answered for 30 s", "AMD: no amdgpu device")
    with pytest.raises(DevicesUnknown) as raised:
        price([f"device.name={name}"], HOST, notes=notes, unanswered=(driver,))
    message = str(raised.value)
    assert f"not known yet ({notes[0]}); try again" in message
    assert "no such device" not in message


def test_auto_tells_which_driver_it_could_not_ask() -> None:
    silent = ("NVIDIA",)
    assert price([], HOST, unanswered=silent).why.endswith(
        "GPUs are unknown: no answer from NVIDIA"
    )
    assert "unknown" not in price([], RADEON, HOST, unanswered=silent).why


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(PlanError, match="rtx-4090"):
        price(["device.name=rtx-409"], HOST)


def test_before_the_first_reading_the_processor_and_the_catalog_are_known() -> None:
    assert budget(Plan(), None).kind == "cpu"
    assert budget(apply_settings(Plan(), ["device.name=l4"]), None).local is False
    with pytest.raises(PlanError, match="not known yet"):
        budget(apply_settings(Plan(), ["device.name=cuda:0"]), None)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None", ""),
        ("__version__ = '2.11.0+cu126'\ncuda: Optional[str] = '12.6'\nhip = None", "gpu"),
        ("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None", "gpu"),
        ("__version__ = '2.9.1+rocm6.4'\ncuda = None\nhip: Optional[str] = '6.4.43482'", "rocm"),
        ("__version__ = '2.13.0'\ncuda: Optional[str] = None\nhip: Optional[str] = None", "apple"),
    ],
)
def test_a_torch_build_is_known_without_importing_it(text: str, kinds: str) -> None:
    assert torch_of(text).kinds == {"cpu"} | set(kinds.split())


def test_jax_uses_what_its_plugins_are_for() -> None:
    assert jax_of({"jax", "jaxlib"}, "0.10").kinds == {"cpu"}
    assert jax_of({"jax", "jax-cuda13-plugin"}, "0.10").kinds == {"cpu", "gpu"}
    assert jax_of({"jax", "libtpu"}, "0.10").kinds == {"cpu", "tpu"}


def test_the_installed_frameworks_are_found() -> None:
    import importlib.util

    for backend in ("torch", "jax"):
        found = framework_of(backend)
        assert (found is not None) == (importlib.util.find_spec(backend) is not None)
        if found is not None:
            assert found.version
            assert "cpu" in found.kinds


def test_the_peak_rate_of_a_gpu_outside_the_catalog_is_not_known() -> None:
    plan = apply_settings(Plan(), ["device.name=cuda:0"])
    unknown = device("cuda:0", "gpu", 24 * GIB, 23 * GIB, "NVIDIA Imaginary 9999")
    for reading, known in ((GPU, True), (unknown, False), (HOST, True)):
        name = "cpu" if reading is HOST else "cuda:0"
        found = estimate(plan, price([f"device.name={name}"], reading))
        assert found.peak_is_known == known
