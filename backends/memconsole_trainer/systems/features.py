"""The model's input for a system: padded states, and the numbers of states and controls in binary."""

from __future__ import annotations

import numpy as np

from memconsole_trainer.systems.family import Matrix

MOST_STATES = 12
MOST_CONTROLS = 6
CONTROL_BITS, STATE_BITS = 3, 4
FEATURES = MOST_STATES + CONTROL_BITS + STATE_BITS


def code(n_states: int, n_controls: int) -> Matrix:
    """The seven features after the states: the number of controls in 3 bits and of states in 4,
    the highest bit first."""
    bits = f"{n_controls:0{CONTROL_BITS}b}{n_states:0{STATE_BITS}b}"
    return np.array([float(bit) for bit in bits])


def features(states: Matrix, n_controls: int) -> np.ndarray:
    """(..., n) normalized states -> (..., 19) float32."""
    n_states = states.shape[-1]
    found = np.zeros((*states.shape[:-1], FEATURES), np.float32)
    found[..., :n_states] = states
    found[..., MOST_STATES:] = code(n_states, n_controls)
    return found
