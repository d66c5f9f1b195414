"""One program a row: gather, norm, write; the next norm reads the rounded row from registers."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels._dispatch import Implementation, fence, pallas_call
from pallas_kernels._rows import Columns, norm_tiles, rounded


def embed_norm_kernel(ids_ref, table_ref, weight_ref, *refs, vocab: int, columns: Columns, eps: float, on_a_card: bool):
    """Weights come first: they wait for no id."""
    t = pl.program_id(0)
    row = jnp.clip(ids_ref[t], 0, vocab - 1)
    next_weight, outs = (refs[0], refs[1:]) if len(refs) == 3 else (None, refs)
    weight = columns.load(weight_ref)
    following = None if next_weight is None else columns.load(next_weight)
    fence(on_a_card)
    x = norm_tiles(columns.load(table_ref, row), weight, columns.width, eps)
    columns.store(outs[0], x, t)
    if following is not None:
        x = norm_tiles(rounded(x, outs[0].dtype), following, columns.width, eps)
        columns.store(outs[1], x, t)


def embed_norm_triton(
    token_ids: jax.Array,
    embed_table: jax.Array,
    weight: jax.Array,
    next_weight: jax.Array | None,
    eps: float,
    implementation: Implementation,
) -> tuple[jax.Array, ...]:
    """The kernel's call; shapes as in the reference."""
    (rows,), (vocab, width) = token_ids.shape, embed_table.shape
    extra = () if next_weight is None else (next_weight,)
    out = jax.ShapeDtypeStruct((rows, width), embed_table.dtype)
    call = pallas_call(
        functools.partial(
            embed_norm_kernel,
            vocab=vocab,
            columns=Columns.of(width),
            eps=eps,
            on_a_card=implementation == "triton",
        ),
        op="embed_norm",
        implementation=implementation,
        grid=(rows,),
        out_shape=[out] * (1 + len(extra)),
        threads=256,
    )
    return tuple(call(token_ids, embed_table, weight, *extra))
