"""How many devices a plan needs, against the table of each number of devices."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from memconsole.cli.main import cli
from memconsole.devices.planned import catalog_budgets, check_count, devices_allowed
from memconsole.devices.reading import DeviceReading, Devices, Missing
from memconsole.memory.answers.cards import cards_table, needed
from memconsole.memory.answers.places import counts, placed
from memconsole.memory.estimate import model_of, table_of
from memconsole.memory.exchange import exchange_seconds
from memconsole.memory.seconds import seconds_per_unit, step_seconds
from memconsole.memory.verdict import Verdict
from memconsole.plan import plan as plans
from memconsole.plan.machine.budget import Budget
from memconsole.plan.plan import Plan, PlanError
from memconsole.units import format_bytes
from tests.unit.memory.cards import card

GIB = 2**30
LLAMA = plans.apply_settings(
    Plan(),
    ["model.name=llama-3.1-8b", "device.name=h100-80gb", "data.sequence_length=2048", "train.batch_size=8"],
)  # fmt: skip
NO = Missing("not read here")


def h100(plan: Plan) -> Budget:
    return catalog_budgets(plan)["h100-80gb"]


def test_the_answer_is_the_first_number_of_devices_whose_own_table_fits() -> None:
    for backend in ("torch", "jax"):
        plan = plans.replace(LLAMA, {"backend": backend})
        device = h100(plan)
        found = needed(plan, table_of(plan, device))
        assert found is not None
        assert found.found is not None
        assert found.found.table == table_of(found.found.plan, device)
        assert found.found.plan.effective_batch == plan.effective_batch
        verdicts = {}
        for count in (2, 4, 8):
            each = plans.replace(plan, {"device.count": count, "train.batch_size": 8 // count})
            ways = [plans.replace(each, {"optimize.sharding": how}) for how in ("ddp", "fsdp")]
            verdicts[count] = [table_of(way, device).verdict for way in ways]
        fitting = [count for count, found in verdicts.items() if Verdict.FITS in found]
        assert found.found.count == fitting[0] == 8
        tight = [count for count, found in verdicts.items() if Verdict.TIGHT in found]
        assert found.tight == (tight[0] if tight and tight[0] < 8 else None)
        each = format_bytes(found.found.table.device_bytes)
        assert found.words.startswith(f"fits 8 × NVIDIA H100 SXM 80 GB with fsdp ({each} each)")


def test_a_plan_that_fits_one_device_and_devices_of_which_there_is_one_have_no_answer() -> None:
    small = plans.replace(Plan(), {"device.name": "h100-80gb"})
    assert needed(small, table_of(small, h100(small))) is None
    for kind in ("cpu", "apple"):
        one = card(GIB, kind)
        table = table_of(LLAMA, one)
        assert not table.fits
        assert needed(LLAMA, table) is None
        assert cards_table(LLAMA, one) == ()


def test_rows_that_devices_cannot_share_become_more_and_the_answer_says_so() -> None:
    plan = plans.replace(LLAMA, {"train.batch_size": 1})
    found = needed(plan, table_of(plan, h100(plan)))
    assert found is not None
    assert found.found is not None
    assert found.found.plan.train.batch_size == 1
    assert f"a step then has {found.found.count} rows, not 1" in found.words
    for rows, count in ((6, 4), (7, 8), (12, 3), (5, 2)):
        batch = plans.replace(Plan(), {"train.batch_size": rows})
        other = placed(batch, count, "ddp")
        assert rows <= other.effective_batch < rows + count
        assert other.train.batch_size <= rows


def test_what_cannot_be_split_gives_the_reason() -> None:
    plan = plans.replace(LLAMA, {"optimize.optimizer": "muon"})
    found = needed(plan, table_of(plan, h100(plan)))
    assert found is not None
    assert found.found is None
    assert "with ddp either" in found.words
    assert "its update orthogonalizes whole matrices" in found.words
    both = plans.replace(plan, {"optimize.precision": "bf16-sr"})
    found = needed(both, table_of(both, h100(both)))
    assert found is not None
    assert found.words.startswith("does not train on several devices: gradients of 16-bit weights")


def test_the_table_goes_from_one_device_to_the_first_that_fits() -> None:
    found = cards_table(LLAMA, h100(LLAMA))
    assert [(row.count, row.sharding) for row in found] == [
        (1, "none"), (2, "ddp"), (2, "fsdp"), (4, "ddp"), (4, "fsdp"), (8, "ddp"), (8, "fsdp"),
    ]  # fmt: skip
    assert all(row.table.verdict is not Verdict.FITS for row in found[:-1])
    assert found[-1].table.verdict is Verdict.FITS


def test_the_page_on_scaling_shows_the_table_that_plan_prints() -> None:
    page = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text(encoding="utf-8")
    command = page.split("$ memconsole plan --cards", 1)[1].split("…", 1)[0].replace("\\\n", " ")
    printed = CliRunner().invoke(cli, ["plan", "--cards", *command.split()]).output
    table = printed[printed.index("on several NVIDIA") :].rstrip()
    assert table.count("\n") == 8
    assert f"…\n{table}\n```" in page


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_step_on_more_devices_takes_the_time_of_its_share_and_of_the_exchange(how: str) -> None:
    device = h100(LLAMA)
    model = model_of(LLAMA)
    many = placed(LLAMA, 8, how)
    share = plans.replace(LLAMA, {"train.batch_size": 1})
    exchanged = exchange_seconds(many, model, device)
    assert step_seconds(many, model, device) == step_seconds(share, model, device) + exchanged
    elements = sum(parameter.size for parameter in model.parameters())
    sent = {"ddp": 2 * 4 * elements, "fsdp": (2 * 4 + 4) * elements}[how]
    assert exchanged == pytest.approx(sent * 7 / 8 / (450e9 * 0.7))
    processor = card(80 * GIB, "cpu")
    two = placed(LLAMA, 2, how)
    assert seconds_per_unit(two, model, processor) >= seconds_per_unit(LLAMA, model, processor)


def test_counts_double_up_to_the_most() -> None:
    assert [counts(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


def gpu(index: int, name: str = "NVIDIA H100", free: int = 79 * GIB) -> DeviceReading:
    return DeviceReading(
        id=f"cuda:{index}", name=name, kind="gpu", memory_label="HBM", total_bytes=80 * GIB,
        used_bytes=80 * GIB - free, free_bytes=free, utilization_percent=NO,
        temperature_celsius=NO, power_watts=NO,
    )  # fmt: skip


def test_devices_of_this_machine_count_if_they_are_alike_and_as_free() -> None:
    here = Devices(devices=(gpu(0), gpu(1), gpu(2, free=20 * GIB), gpu(3)))
    own = msgspec.structs.replace(
        card(79 * GIB), name="NVIDIA H100", total_bytes=80 * GIB, local=True
    )

    def allowed(name: str, count: int = 1, devices: Devices = here) -> int:
        how = "none" if count == 1 else "fsdp"
        settings = {"device.name": name, "device.count": count, "optimize.sharding": how}
        return devices_allowed(plans.replace(Plan(), settings), devices, own)

    assert allowed("auto") == 2
    assert allowed("cuda:1") == 1
    assert allowed("cuda:0", count=4) == 4, "the plan says so itself"
    mixed = Devices(devices=(gpu(0), gpu(1, name="NVIDIA T4")))
    assert allowed("auto", devices=mixed) == 1
    elsewhere = msgspec.structs.replace(own, local=False)
    assert devices_allowed(LLAMA, here, elsewhere) == 1, "nobody said there are more"


@pytest.mark.parametrize(
    ("name", "count", "words"),
    [
        ("auto", 4, ""),
        ("cuda:2", 2, ""),
        ("auto", 5, "device.count = 5: this machine has 4 of them; expected at most 4"),
        ("cuda:2", 3, "from cuda:2 on, this machine has 2 of them"),
    ],
)
def test_a_launch_on_more_devices_than_there_are_is_refused(
    name: str, count: int, words: str
) -> None:
    here = Devices(devices=tuple(gpu(index) for index in range(4)))
    own = msgspec.structs.replace(card(79 * GIB), name="NVIDIA H100", local=True)
    settings = {"device.name": name, "device.count": count, "optimize.sharding": "fsdp"}
    plan = plans.replace(Plan(), settings)
    check_count(plan, None, own)
    check_count(plan, here, msgspec.structs.replace(own, local=False))
    if not words:
        check_count(plan, here, own)
        return
    with pytest.raises(PlanError, match=words):
        check_count(plan, here, own)
