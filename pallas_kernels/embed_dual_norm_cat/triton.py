"""Two programs a row, one for each half of the concatenated buffer; nothing is written twice."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels._dispatch import Implementation, fence, pallas_call
from pallas_kernels._rows import Columns, norm_tiles, rounded


def dual_norm_kernel(hidden_ref, embed_ref, hidden_w_ref, embed_w_ref, *refs, vocab, pre_norm, columns, eps, on_a_card):
    """`refs` are the ids where rows are gathered (vocab is not None), the pre-norm's weight if any, the output.

    Weights come first: they wait for no id.
    """
    out_ref, t, width = refs[-1], pl.program_id(0), columns.width

    @pl.when(pl.program_id(1) == 0)
    def hidden_half():
        weight = columns.load(hidden_w_ref)
        x = columns.load(hidden_ref, t)
        columns.store(out_ref, norm_tiles(x, weight, width, eps), t)

    @pl.when(pl.program_id(1) == 1)
    def embed_half():
        row = t if vocab is None else jnp.clip(refs[0][t], 0, vocab - 1)
        pre_weight = columns.load(refs[-2]) if pre_norm else None
        weight = columns.load(embed_w_ref)
        fence(on_a_card)
        x = columns.load(embed_ref, row)
        if pre_weight is not None:
            x = rounded(norm_tiles(x, pre_weight, width, eps), out_ref.dtype)
        columns.store(out_ref, norm_tiles(x, weight, width, eps), t, start=width)


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
        columns=Columns.of(width),
        eps=eps,
        on_a_card=implementation == "triton",
    )
    call = pallas_call(
        kernel,
        op="embed_dual_norm_cat",
        implementation=implementation,
        grid=(rows, 2),
        out_shape=jax.ShapeDtypeStruct((rows, 2 * width), hidden.dtype),
        threads=256,
    )
    return call(hidden, embeds, hidden_weight, embed_weight, *extra)
