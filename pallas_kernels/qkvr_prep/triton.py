"""One program a row (or a few) and a group of heads of q, of k or of v; the last one carries r across.

A program owns its heads' channels of a sequence: what it reads of their ring, no other program of the launch writes
(see `_conv`). Pages are only written.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._conv import RowPlan, convolve, load_taps
from pallas_kernels._dispatch import Implementation, fence, next_power_of_2, pallas_call
from pallas_kernels._rows import Columns, both, load_stored
from pallas_kernels.qkvr_prep.layout import QKVR, Heads, Pages, Weights

THREADS = 128
DECODE_COLUMNS = 2 * THREADS  # of one program: two heads of 128 are soon done, and no thread needs another's taps
PREFILL_COLUMNS = 8 * THREADS  # 16-byte loads


@dataclass(frozen=True, slots=True)
class Prep:
    """Everything static about one call."""

    heads: Heads
    plan: RowPlan
    taps: int
    group: int
    tau: bool
    pages: bool
    kv_rows: int | None
    eps: float
    on_a_card: bool

    @property
    def q_groups(self) -> int:
        return pl.cdiv(self.heads.queries, self.group)

    @property
    def kv_groups(self) -> int:
        return pl.cdiv(self.heads.kv, self.group)

    def tile(self, index: jax.Array, heads: int) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Head numbers [G, 1], columns [1, D] and the mask [G, D], if one is needed, of a group of `heads` heads."""
        head = (index * self.group + jnp.arange(self.group))[:, None]
        column = jnp.arange(next_power_of_2(self.heads.dim))[None, :]
        whole = heads % self.group == 0 and column.size == self.heads.dim
        return head, column, None if whole else (head < heads) & (column < self.heads.dim)


def load(ref, index: tuple, mask: jax.Array | None, whether: jax.Array | bool = True) -> jax.Array:
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
    return load_stored(ref.at[index], both(mask, whether, shape))


def store(ref, index: tuple, value: jax.Array, mask: jax.Array | None, whether: jax.Array | bool = True) -> None:
    plt.store(ref.at[index], value.astype(ref.dtype), mask=both(mask, whether, value.shape))


def load_norm(ref, column: jax.Array, mask: jax.Array | None, group: int) -> jax.Array:
    """The norm's weight once for each head: a tile of one row would be loaded 2 bytes at a time."""
    return load(ref, (jnp.broadcast_to(column, (group, column.size)),), mask)


def head_norm(x: jax.Array, weight: jax.Array, dim: int, eps: float) -> jax.Array:
    """RMSNorm of each row of a tile [G, D] in float32; lanes past `dim` hold 0."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) / dim + eps) * weight.astype(jnp.float32)


def query_rows(prep: Prep, b, program, count, index, x_ref, norm_ref, tau_ref, out_ref) -> None:
    head, column, mask = prep.tile(index, prep.heads.queries)
    weight = load_norm(norm_ref, column, mask, prep.group)

    def row(t, _):
        x = load(x_ref, (b, t, head * prep.heads.dim + column), mask, prep.plan.loads(t, count))
        y = head_norm(x.astype(jnp.float32), weight, prep.heads.dim, prep.eps).astype(out_ref.dtype)
        if tau_ref is not None:
            y = y.astype(jnp.float32) * tau_ref[b, t]
        store(out_ref, (b, t, head, column), jnp.where(t < count, y, 0.0), mask)

    prep.plan.for_each_row(program, row, None)


def rel_rows(prep: Prep, b, program, count, x_ref, out_ref) -> None:
    columns = Columns.of(prep.heads.queries * prep.heads.rel)

    def row(t, _):
        for cols, mask in columns.ranges():
            r = load(x_ref, (b, t, prep.heads.starts[3] + cols), mask, prep.plan.loads(t, count))
            store(out_ref, (b, t, cols), jnp.where(t < count, r, 0.0), mask)

    prep.plan.for_each_row(program, row, None)


def key_or_value_rows(prep: Prep, b, program, place_refs, index, first, refs) -> None:
    """place_refs: start, count. refs: product, taps [K * D * W], norm weight or None, page table or None, ring
    [B, R, K, D], rows or pages.
    """
    x_ref, conv_ref, norm_ref, table_ref, ring_ref, out_ref = refs
    dim, plan, alone = prep.heads.dim, prep.plan, prep.plan.block == 1
    head, column, mask = prep.tile(index, prep.heads.kv)

    def load_new(t, whether):
        return [load(x_ref, (b, t, first + head * dim + column), mask, whether if alone else whether & (t < count))]

    def load_ring(slot, whether):
        return [load(ring_ref, (b, slot, head, column), mask, whether)]

    in_turn = index * prep.group * dim if column.size == dim else None
    taps = load_taps(conv_ref, prep.taps, head * dim + column, mask, in_turn)
    weight = None if norm_ref is None else load_norm(norm_ref, column, mask, prep.group)

    # A row alone has all its loads under way before it uses the first; those that wait for `start` come last.
    own = load_new(program, True) if alone else None
    fence(prep.on_a_card and alone)
    start, count = read_place(prep, b, place_refs)
    window = plan.rows_before(program, start, prep.taps, load_new, load_ring)

    def place_of(t):
        return None if table_ref is None else page_of(prep, b, t, start, count, table_ref, out_ref)

    def row(t, window, x, place):
        window = [*window, x]
        y = convolve([tile for [tile] in window], taps).astype(out_ref.dtype)
        if weight is not None:
            y = head_norm(y.astype(jnp.float32), weight, dim, prep.eps)
        if place is None:
            store(out_ref, (b, t, head, column), jnp.where(t < count, y, 0.0), mask)
        else:
            page, slot, allocated = place
            store(out_ref, (page, head, slot, column), y, mask, allocated)
        return window[1:]

    def store_ring(slot, x, whether):
        store(ring_ref, (b, slot, head, column), x[0], mask, whether)

    if own is not None:
        place = place_of(program)
        fence(prep.on_a_card)
        plan.write_ring(program, start, count, lambda *_: own, store_ring, prep.on_a_card)
        row(program, window, own, place)
    else:
        plan.for_each_row(program, lambda t, w: row(t, w, load_new(t, True), place_of(t)), window)
        plan.write_ring(program, start, count, load_new, store_ring, prep.on_a_card)


def read_place(prep: Prep, b, place_refs) -> tuple[jax.Array, jax.Array]:
    """start and count of a sequence."""
    start_ref, count_ref = place_refs
    return start_ref[b], jnp.minimum(count_ref[b], prep.plan.rows)


def page_of(prep: Prep, b, t, start, count, table_ref, pages_ref) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Page and slot of row t, and whether the row is real, kept and has a page."""
    position = start + t
    index, slot = position // pages_ref.shape[2], position % pages_ref.shape[2]
    kept = (t < count) & (index < table_ref.shape[1])
    if prep.kv_rows is not None:
        kept &= t >= count - prep.kv_rows
    page = table_ref[b, jnp.minimum(index, table_ref.shape[1] - 1)]
    return jnp.maximum(page, 0), slot, kept & (page >= 0) & (page < pages_ref.shape[0])


def qkvr_prep_kernel(*refs, prep: Prep):
    """refs: product, the four weights, start, count, [tau], [page table], then those in place, and the outputs."""
    x_ref, k_conv, v_conv, q_norm, k_norm, *rest = refs
    place_refs, rest = rest[:2], rest[2:]
    tau_ref = rest.pop(0) if prep.tau else None
    table_ref = rest.pop(0) if prep.pages else None
    q_ref, r_ref, k_ref, v_ref, k_ring, v_ring = rest[-6:]
    b, program, g = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    k_group, v_group = g - prep.q_groups, g - prep.q_groups - prep.kv_groups
    _, k_first, v_first, _ = prep.heads.starts

    @pl.when(k_group < 0)
    def queries():
        _, count = read_place(prep, b, place_refs)
        query_rows(prep, b, program, count, g, x_ref, q_norm, tau_ref, q_ref)

    @pl.when((k_group >= 0) & (v_group < 0))
    def keys():
        refs = (x_ref, k_conv, k_norm, table_ref, k_ring, k_ref)
        key_or_value_rows(prep, b, program, place_refs, k_group, k_first, refs)

    @pl.when((v_group >= 0) & (v_group < prep.kv_groups))
    def values():
        refs = (x_ref, v_conv, None, table_ref, v_ring, v_ref)
        key_or_value_rows(prep, b, program, place_refs, v_group, v_first, refs)

    @pl.when(v_group == prep.kv_groups)
    def relative():
        _, count = read_place(prep, b, place_refs)
        rel_rows(prep, b, program, count, x_ref, r_ref)


def qkvr_prep_triton(
    qkvr: jax.Array,
    weights: Weights,
    k_ring: jax.Array,
    v_ring: jax.Array,
    start: jax.Array,
    count: jax.Array,
    tau: jax.Array | None,
    pages: Pages | None,
    heads: Heads,
    kv_rows: int | None,
    eps: float,
    implementation: Implementation,
) -> QKVR:
    """The kernel's call; shapes and results as in the reference."""
    batch, rows, _ = qkvr.shape
    taps = weights.k_conv.shape[1]
    plan = RowPlan.of(batch, rows, k_ring.shape[1], taps)
    columns = DECODE_COLUMNS if plan.block == 1 else PREFILL_COLUMNS
    group = min(max(columns // next_power_of_2(heads.dim), 1), next_power_of_2(heads.kv))
    prep = Prep(
        heads=heads,
        plan=plan,
        taps=taps,
        group=group,
        tau=tau is not None,
        pages=pages is not None,
        kv_rows=kv_rows,
        eps=eps,
        on_a_card=implementation == "triton",
    )
    by_head = lambda x: x.reshape(*x.shape[:-1], heads.kv, heads.dim)  # noqa: E731
    rings = [by_head(k_ring), by_head(v_ring)]
    in_place = [*(pages[:2] if pages is not None else ()), *rings]
    operands = [
        qkvr,
        *(w.reshape(-1) for w in (weights.k_conv, weights.v_conv)),
        weights.q_norm,
        weights.k_norm,
        start,
        count,
        *(x for x in (tau, None if pages is None else pages.table) if x is not None),
    ]
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    new = jax.ShapeDtypeStruct((batch, rows, heads.kv, heads.dim), qkvr.dtype)
    out_shape = [
        jax.ShapeDtypeStruct((batch, rows, heads.queries, heads.dim), qkvr.dtype),
        jax.ShapeDtypeStruct((batch, rows, heads.queries * heads.rel), qkvr.dtype),
        *([new, new] if pages is None else [like(pages.k), like(pages.v)]),
        *(like(ring) for ring in rings),
    ]
    call = pallas_call(
        functools.partial(qkvr_prep_kernel, prep=prep),
        op="qkvr_prep",
        implementation=implementation,
        grid=(batch, prep.plan.programs, prep.q_groups + 2 * prep.kv_groups + 1),
        out_shape=out_shape,
        threads=THREADS,
        num_stages=1,
        aliases={len(operands) + i: len(out_shape) - len(in_place) + i for i in range(len(in_place))},
    )
    q, r, k, v, k_ring_out, v_ring_out = call(*operands, *in_place)
    r = r.reshape(batch, rows, heads.queries, heads.rel)
    rings = k_ring_out.reshape(k_ring.shape), v_ring_out.reshape(v_ring.shape)
    return QKVR(q, r, k, v, *rings, None, None) if pages is None else QKVR(q, r, None, None, *rings, k, v)
