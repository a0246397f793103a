"""What refusals and rows advise holds for the plan that they are said of."""

from __future__ import annotations

import pytest

from memconsole.devices.budget import budget
from memconsole.memory.coefficients import runtime
from memconsole.memory.estimate import table_of
from memconsole.memory.exact.sharpen import KnownExact, sharpened
from memconsole.memory.exact.timeline import Exact, ExactPhase
from memconsole.plan import catalog
from memconsole.plan.check import check
from memconsole.plan.plan import Plan, PlanError, replace
from memconsole.plan.toggles.update import OPTIMIZER


def test_a_decoder_that_is_not_here_is_refused_by_the_setting_that_names_it() -> None:
    plan = replace(catalog.preset("efficientids"), {"model.decoder": "nobody/no-such-model"})
    with pytest.raises(PlanError, match=r"model\.decoder = .*not in the local") as found:
        catalog.model(plan)
    assert found.value.key == "model.decoder"


@pytest.mark.parametrize("stride", [1, 3, 5])
def test_the_advised_full_phase_is_long_enough_for_its_stride(stride: int) -> None:
    hybrid = {"hybrid.mode": "balanced", "hybrid.snapshot_stride": stride}
    with pytest.raises(PlanError, match=rf"hybrid\.full_steps to at least {3 * stride}$"):
        check(replace(Plan(), {**hybrid, "hybrid.full_steps": 2}))
    check(replace(Plan(), {**hybrid, "hybrid.full_steps": 3 * stride}))


def test_eight_bit_optimizers_say_that_adapters_keep_their_state_in_32_bits() -> None:
    assert OPTIMIZER.saves_nothing is not None
    narrow = replace(Plan(), {"optimize.optimizer": "adamw-8bit"})
    assert OPTIMIZER.saves_nothing(narrow, "gpu") is None
    adapters = replace(narrow, {"optimize.lora_rank": 8})
    assert (
        OPTIMIZER.saves_nothing(adapters, "gpu") == "adapters keep their optimizer state in 32 bits"
    )


def test_exact_numbers_count_the_context_of_the_cards_own_kind() -> None:
    plan = replace(Plan(), {"device.name": "h100-80gb"})
    table = table_of(plan, budget(plan, None))
    phases = {"backward": ExactPhase(total_bytes=9 << 30, components={"weights": 1 << 30})}
    exact = sharpened(table, KnownExact(exact=Exact(phases=phases, source="a test")))
    own, other = (runtime("torch", "gpu", name).context_bytes for name in ("h100-80gb", ""))
    assert exact.device_bytes - exact.reserved_bytes == own != other
