"""Dropout (Srivastava et al. 2014): where numbers are dropped, and what their random masks depend on.

While training, each number is dropped with the plan's probability p and the others grow by 1 / (1 - p):

- `train.dropout`: the embedded tokens, windows or items, and the outputs of attention and MLP that are added to the residual stream;
- `train.attention_dropout`: the attention weights after the softmax (called "shares" in the code);
- `optimize.lora_dropout`: the input of each adapter (Hu et al. 2021), not of the matrix beside it.

A mask depends on the plan's seed, the step, the micro-batch and its place in the model. In JAX a mask of attention also
depends on how many queries the device computes at a time, and in torch every mask on the process's number. It is
never kept: the backward pass, and a recomputed block, draw it again. So a resumed run has the same masks. Evaluation,
samples and answers drop nothing.
"""

from __future__ import annotations

import hashlib

from memconsole.plan.plan import Plan


def drops(plan: Plan) -> bool:
    """Whether training drops anything."""
    t = plan.train
    return t.dropout > 0 or t.attention_dropout > 0 or plan.optimize.lora_dropout > 0


def key_of(*parts: int) -> int:
    """63 random bits that depend on every part, such as seed, step, micro-batch and place."""
    text = "/".join(map(str, ("dropout", *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
