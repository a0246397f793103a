"""The kernels in Triton's language. Importing this module imports Triton."""

# Triton reads annotations of the function itself, so that they are not postponed here.
import triton
import triton.language as tl


@triton.jit  # type: ignore[misc,unused-ignore]
def cross_entropy(  # type: ignore[no-untyped-def]
    scores, targets, nats, factor, stride, vocabulary, columns, cap,
    capped: tl.constexpr, with_gradient: tl.constexpr, one_factor: tl.constexpr, masked: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One row: its nats, and its gradient in place of its logits. All rows have the same factor if `one_factor`."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    target = tl.load(targets + row)
    counts = target != masked
    # Read before the sums below, for which threads wait: after them, another thread may overwrite it.
    target_logit = tl.load(scores + target, mask=counts, other=0.0).to(tl.float32)
    if capped:
        target_logit = cap * (1.0 - 2.0 / (tl.exp(2.0 * target_logit / cap) + 1.0))
    offsets = tl.arange(0, block)
    # Each lane has a maximum and a sum of its own; lanes are added up after the row.
    lane_max = tl.full((block,), -1e30, tl.float32)
    lane_sum = tl.zeros((block,), tl.float32)
    for start in range(0, columns, block):
        column = start + offsets
        # Padding is read too: a multiple of 16 columns is read in wide words.
        x = tl.load(scores + column, mask=column < columns, other=0.0).to(tl.float32)
        if capped:
            x = cap * (1.0 - 2.0 / (tl.exp(2.0 * x / cap) + 1.0))
        x = tl.where(column < vocabulary, x, -float("inf"))
        new_max = tl.maximum(lane_max, x)
        lane_sum = lane_sum * tl.exp(lane_max - new_max) + tl.exp(x - new_max)
        lane_max = new_max
    row_max = tl.max(lane_max, axis=0)
    row_sum = tl.sum(lane_sum * tl.exp(lane_max - row_max), axis=0)
    tl.store(nats + row, tl.where(counts, tl.log(row_sum) + row_max - target_logit, 0.0))
    if with_gradient:
        if not one_factor:
            factor += row
        row_factor = tl.where(counts, tl.load(factor), 0.0)
        for start in range(0, columns, block):
            column = start + offsets
            x = tl.load(scores + column, mask=column < columns, other=0.0).to(tl.float32)
            cap_derivative = 1.0
            if capped:
                tanh = 1.0 - 2.0 / (tl.exp(2.0 * x / cap) + 1.0)
                x, cap_derivative = cap * tanh, 1.0 - tanh * tanh
            gradient = tl.exp(x - row_max) / row_sum - tl.where(column == target, 1.0, 0.0)
            gradient = tl.where(column < vocabulary, gradient * row_factor * cap_derivative, 0.0)
            tl.store(scores + column, gradient.to(scores.dtype.element_ty), mask=column < columns)


@triton.jit  # type: ignore[misc,unused-ignore]
def adamw(  # type: ignore[no-untyped-def]
    weight, gradient, first, second, first_scales, second_scales, second_values, first_values, second_lookup, first_lookup,
    size, first_share, second_share, epsilon, decay, step_size,
    factors_on_device: tl.constexpr, quantized: tl.constexpr, half: tl.constexpr, tiny: tl.constexpr, blocks: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Some blocks of a weight and of its moments, which are codes if `quantized`, else fp32."""
    if factors_on_device:
        first_share, second_share = tl.load(first_share), tl.load(second_share)
        epsilon, decay, step_size = tl.load(epsilon), tl.load(decay), tl.load(step_size)
    rows = tl.program_id(0).to(tl.int64) * blocks + tl.arange(0, blocks)
    at = rows[:, None] * block + tl.arange(0, block)[None, :]
    inside, row_inside = at < size, rows * block < size
    g = tl.load(gradient + at, mask=inside, other=0.0)
    m = tl.load(first + at, mask=inside, other=0)
    v = tl.load(second + at, mask=inside, other=0)
    if quantized:
        m = tl.load(first_values + m.to(tl.int32))
        m *= tl.load(first_scales + rows, mask=row_inside, other=0.0)[:, None]
        m = tl.where(inside, m, 0.0)
        v = tl.load(second_values + v.to(tl.int32))
        v *= tl.load(second_scales + rows, mask=row_inside, other=0.0)[:, None]
    m += first_share * (g - m)
    v += second_share * (g * g - v)
    w = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(weight + at, decay * w - step_size * m / (tl.sqrt_rn(v) + epsilon), mask=inside)
    if quantized:
        scale = tl.max(tl.abs(m), axis=1)
        tl.store(first_scales + rows, scale, mask=row_inside)
        m = tl.load(first_lookup + _lookup_rows(m, scale, half, tiny))
        scale = tl.max(v, axis=1)
        tl.store(second_scales + rows, scale, mask=row_inside)
        v = tl.load(second_lookup + _lookup_rows(v, scale, half, tiny))
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, v, mask=inside)


@triton.jit  # type: ignore[misc,unused-ignore]
def _lookup_rows(moment, scale, half: tl.constexpr, tiny: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of the lookup table for the elements of blocks with these scales: the upper 16 bits of scaled elements."""
    reciprocal = tl.where(scale < tiny, 0.0, tl.div_rn(1.0, tl.maximum(scale, tiny)))
    bits = (moment * reciprocal[:, None]).to(tl.int32, bitcast=True)
    return ((bits + half) >> 16) & 0xFFFF


@triton.jit(do_not_specialize=["begin", "key", "other", "parity"])  # type: ignore[misc,unused-ignore]
def round_stochastically(  # type: ignore[no-untyped-def]
    target, words, size, begin, key, other, parity,
    block: tl.constexpr, lanes: tl.constexpr, counters: tl.constexpr,
):  # fmt: skip
    """The elements of some counters of Threefry-2x32, four of each counter."""
    k0 = key.to(tl.uint32, bitcast=True)
    k1 = other.to(tl.uint32, bitcast=True)
    k2 = parity.to(tl.uint32, bitcast=True)
    counter = tl.program_id(0).to(tl.int64) * counters + tl.arange(0, counters)
    x = (counter + begin).to(tl.uint32) + k0
    y = tl.zeros((counters,), tl.uint32) + k1
    x, y = _four_rounds(x, y, 13, 15, 26, 6)
    x, y = x + k1, y + k2 + 1
    x, y = _four_rounds(x, y, 17, 29, 16, 24)
    x, y = x + k2, y + k0 + 2
    x, y = _four_rounds(x, y, 13, 15, 26, 6)
    x, y = x + k0, y + k1 + 3
    x += y
    y = ((y << 17) | (y >> 15)) ^ x
    at = counter // lanes * block + counter % lanes
    _add_and_truncate(target, words, at, size, x & 0xFFFF)
    _add_and_truncate(target, words, at + lanes, size, x >> 16)
    _add_and_truncate(target, words, at + 2 * lanes, size, y & 0xFFFF)
    _add_and_truncate(target, words, at + 3 * lanes, size, y >> 16)


@triton.jit  # type: ignore[misc,unused-ignore]
def _four_rounds(  # type: ignore[no-untyped-def]
    x, y, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, d: tl.constexpr
):  # fmt: skip
    """Four rounds of Threefry with these rotation distances."""
    x += y
    y = ((y << a) | (y >> (32 - a))) ^ x
    x += y
    y = ((y << b) | (y >> (32 - b))) ^ x
    x += y
    y = ((y << c) | (y >> (32 - c))) ^ x
    x += y
    y = ((y << d) | (y >> (32 - d))) ^ x
    return x, y


@triton.jit  # type: ignore[misc,unused-ignore]
def _add_and_truncate(target, words, at, size, bits):  # type: ignore[no-untyped-def]
    """Add random bits to fp32 words, and store the upper halves, which are bf16."""
    word = tl.load(words + at, mask=at < size, other=0).to(tl.uint32, bitcast=True) + bits
    tl.store(target + at, (word >> 16).to(tl.uint16).to(tl.int16, bitcast=True), mask=at < size)


@triton.jit  # type: ignore[misc,unused-ignore]
def dequantize(  # type: ignore[no-untyped-def]
    out, codes, scales, pairs, count, paired: tl.constexpr, blocks: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Some blocks, of `count`, of a matrix stored as codes: two in each byte if `paired`."""
    rows = (tl.program_id(0).to(tl.int64) * blocks + tl.arange(0, blocks))[:, None]
    columns = tl.arange(0, block)[None, :]
    if paired:
        half = tl.arange(0, block // 2)[None, :]
        byte = tl.load(codes + rows * (block // 2) + half, mask=rows < count, other=0).to(tl.int32)
        value = tl.interleave(tl.load(pairs + 2 * byte), tl.load(pairs + 2 * byte + 1))
    else:
        value = tl.load(codes + rows * block + columns, mask=rows < count, other=0)
        value = value.to(tl.int8, bitcast=True).to(tl.float32)
    value *= tl.load(scales + rows, mask=rows < count, other=0.0)
    tl.store(out + rows * block + columns, value.to(out.dtype.element_ty), mask=rows < count)
