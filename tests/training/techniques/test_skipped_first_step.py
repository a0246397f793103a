"""A first fp16 step that overflows changes nothing, whatever the optimizer."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from memconsole.plan.plan import OptimizerName
from memconsole_trainer.techniques import loss_scale
from tests.training.harness import offloaded
from tests.training.harness.adapted import batch, built


@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
def test_a_first_step_that_overflows_leaves_weights_and_state_to_the_bit(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scale, "START", 2.0**120)
    changes = {"optimize.precision": "fp16", "optimize.optimizer": optimizer}
    plan = offloaded.plan_with("torch", changes)
    engine = built(plan)
    counts = (loss_scale.NAME, "optimizer.step")
    before = {name: array.copy() for name, array in engine.state() if name not in counts}
    engine.train_step(batch(plan, 0))
    after = dict(engine.state())
    assert engine.take_metrics()[-1].loss_scale == 2.0**120
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
