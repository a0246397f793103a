"""The Triton program of `loss_kernel`. Importing this module imports Triton."""

# Triton reads annotations of the function itself, so that they are not postponed here.
import triton
import triton.language as tl


@triton.jit  # type: ignore[misc,unused-ignore]
def slopes(  # type: ignore[no-untyped-def]
    scores, targets, nats, factor, stride, vocabulary, columns, cap,
    capped: tl.constexpr, wanted: tl.constexpr, masked: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One row: its nats, and its gradient in place of its logits."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    target = tl.load(targets + row)
    counts = target != masked
    # Read before the sums below, for which threads wait: after them, another thread may overwrite it.
    picked = tl.load(scores + target, mask=counts, other=0.0).to(tl.float32)
    if capped:
        picked = cap * (1.0 - 2.0 / (tl.exp(2.0 * picked / cap) + 1.0))
    offsets = tl.arange(0, block)
    # Each lane has a maximum and a sum of its own; lanes are added up after the row.
    most = tl.full((block,), -1e30, tl.float32)
    total = tl.zeros((block,), tl.float32)
    for start in range(0, columns, block):
        at = start + offsets
        # Padding is read too: a multiple of 16 columns is read in wide words.
        x = tl.load(scores + at, mask=at < columns, other=0.0).to(tl.float32)
        if capped:
            x = cap * (1.0 - 2.0 / (tl.exp(2.0 * x / cap) + 1.0))
        x = tl.where(at < vocabulary, x, -float("inf"))
        higher = tl.maximum(most, x)
        total = total * tl.exp(most - higher) + tl.exp(x - higher)
        most = higher
    highest = tl.max(most, axis=0)
    sum_of_all = tl.sum(total * tl.exp(most - highest), axis=0)
    tl.store(nats + row, tl.where(counts, tl.log(sum_of_all) + highest - picked, 0.0))
    if wanted:
        share = tl.where(counts, tl.load(factor), 0.0)
        for start in range(0, columns, block):
            at = start + offsets
            x = tl.load(scores + at, mask=at < columns, other=0.0).to(tl.float32)
            bend = 1.0
            if capped:
                bent = 1.0 - 2.0 / (tl.exp(2.0 * x / cap) + 1.0)
                x, bend = cap * bent, 1.0 - bent * bent
            slope = tl.exp(x - highest) / sum_of_all - tl.where(at == target, 1.0, 0.0)
            slope = tl.where(at < vocabulary, slope * share * bend, 0.0)
            tl.store(scores + at, slope.to(scores.dtype.element_ty), mask=at < columns)
