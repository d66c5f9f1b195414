"""Modules filled with given parameters, and the whole teacher-forced computation as one compiled function."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from inkling_jax.cache import Rows
from inkling_jax.config import InklingConfig
from inkling_jax.nn import InklingModel, abstract_parameters


def build(config: InklingConfig, params: Mapping[str, Any], dtype: str = "float32") -> InklingModel:
    """An `InklingModel` that holds `params` (dotted path -> array), each cast to the dtype its module declares."""
    wanted = abstract_parameters(config, dtype)
    assert set(wanted) == set(params)
    arrays = {path: jnp.asarray(params[path]).astype(spec.dtype) for path, spec in wanted.items()}
    assert {path: spec.shape for path, spec in wanted.items()} == {path: a.shape for path, a in arrays.items()}
    graph, state = nnx.split(nnx.eval_shape(lambda: InklingModel(config, dtype=dtype, rngs=nnx.Rngs(0))))
    filled = [(path, leaf.replace(arrays[".".join(map(str, path))])) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def run(model: InklingModel, tokens: Any, start: int = 0) -> dict[str, Any]:
    """tokens [B, T] -> hidden, logits and a list of every depth's logits, without any cache.

    `start` is the position of the first token. One compilation for each config, dtype and shape of tokens.
    """
    graph, state = nnx.split(model)
    return teacher_forced(graph, state, jnp.asarray(tokens, jnp.int32), jnp.int32(start))


@partial(jax.jit, static_argnums=0)
def teacher_forced(
    graph: nnx.GraphDef[InklingModel], state: Any, tokens: jax.Array, start: jax.Array
) -> dict[str, Any]:
    model = nnx.merge(graph, state)
    batch, length = tokens.shape

    def rows(count: int) -> Rows:
        return Rows(jnp.full(batch, start), jnp.full(batch, count, jnp.int32))

    hidden, _ = model.hidden(tokens, rows(length))
    found: dict[str, Any] = {"hidden": hidden, "logits": model.logits(hidden), "depths": []}
    for d in range(len(model.mtp)):
        count = length - d - 1
        hidden, _ = model.depth(d, hidden[:, :count], tokens[:, d + 1 :], rows(count))
        found["depths"].append(model.logits(hidden))
    return found
