"""Two programs a row, one for each half of the concatenated buffer; nothing is written twice."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._dispatch import Implementation, pallas_call
from pallas_kernels._rows import Columns, norm_tiles, rounded

EARLY = False
THREADS = 256


def dual_norm_kernel(hidden_ref, embed_ref, hidden_w_ref, embed_w_ref, *refs, vocab, pre_norm, columns, eps):
    """`refs` are the ids where rows are gathered (vocab is not None), the pre-norm's weight if any, the output."""
    out_ref, t, width = refs[-1], pl.program_id(0), columns.width

    @pl.when(pl.program_id(1) == 0)
    def hidden_half():
        weight = columns.load(hidden_w_ref) if EARLY else None
        x = columns.load(hidden_ref, t)
        if EARLY:
            plt.debug_barrier()
        else:
            weight = columns.load(hidden_w_ref)
        columns.store(out_ref, norm_tiles(x, weight, width, eps), t)

    @pl.when(pl.program_id(1) == 1)
    def embed_half():
        row = t if vocab is None else jnp.clip(refs[0][t], 0, vocab - 1)
        if EARLY:
            w0, w1 = columns.load(refs[-2]), columns.load(embed_w_ref)
            plt.debug_barrier()
        x = columns.load(embed_ref, row)
        if pre_norm:
            x = rounded(norm_tiles(x, w0 if EARLY else columns.load(refs[-2]), width, eps), out_ref.dtype)
        columns.store(out_ref, norm_tiles(x, w1 if EARLY else columns.load(embed_w_ref), width, eps), t, start=width)


def embed_dual_norm_cat_triton(
    hidden: jax.Array,
    embeds: jax.Array,
    hidden_weight: jax.Array,
    embed_weight: jax.Array,
    token_ids: jax.Array | None,
    pre_norm_weight: jax.Array | None,
    eps: float,
    implementation: Implementation,
) -> jax.Array:
    """The kernel's call. `embeds` is the table where token_ids is given, else the rows themselves."""
    rows, width = hidden.shape
    extra = [x for x in (token_ids, pre_norm_weight) if x is not None]
    kernel = functools.partial(
        dual_norm_kernel,
        vocab=None if token_ids is None else embeds.shape[0],
        pre_norm=pre_norm_weight is not None,
        columns=Columns.of(width, most=8 * THREADS if THREADS < 512 else 2048),
        eps=eps,
    )
    call = pallas_call(
        kernel,
        op="embed_dual_norm_cat",
        implementation=implementation,
        grid=(rows, 2),
        out_shape=jax.ShapeDtypeStruct((rows, 2 * width), hidden.dtype),
        threads=THREADS,
    )
    return call(hidden, embeds, hidden_weight, embed_weight, *extra)
