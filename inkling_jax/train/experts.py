"""A mixture layer made for training: every expert on every row, in two large products.

Decoding must touch few weights and many cheap rows; training a model whose experts are tiny is the other way round, and
gradients through a scan over blocks would cost more than all experts together. It also counts who was chosen, which
balancing needs.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ..cache import Rows
from ..nn import InklingModel
from ..nn.mlp import MoE
from ..ops.linear import precision


class AllExperts(MoE):
    """Has the parameters of a MoE and, to rounding, its output. `load` is the last call's rows by routed expert."""

    def __init__(self, moe: MoE):
        self.router, self.experts, self.shared = moe.router, moe.experts, moe.shared
        self.load: Float[Array, " E"] = nnx.data(jnp.zeros(moe.router.bias.shape))

    def __call__(self, x: Float[Array, "B T H"], rows: Rows) -> Float[Array, "B T H"]:
        """All of `x` must be real rows: padding would count in the load."""
        flat = x.reshape(-1, x.shape[-1])
        w13 = jnp.concatenate([self.experts.w13[...], self.shared.w13[...]])
        w2 = jnp.concatenate([self.experts.w2[...], self.shared.w2[...]])
        product = functools.partial(jnp.einsum, precision=precision(x.dtype), preferred_element_type=jnp.float32)
        gate, up = product("mh,ekfh->kmef", flat, w13)
        inner = (jax.nn.silu(gate) * up * self._weights(flat)[:, :, None]).astype(x.dtype)
        return product("mef,ehf->mh", inner, w2).astype(x.dtype).reshape(x.shape)

    def _weights(self, x: Float[Array, "M H"]) -> Float[Array, "M ES"]:
        """The weight of every expert for every row, 0 where it was not chosen; counts the choices."""
        ids, weights = self.router(x)
        chosen, few = jax.nn.one_hot(ids, self.router.bias.shape[0]), ids.shape[1]
        self.load = chosen.sum((0, 1))
        routed = jnp.einsum("mae,ma->me", chosen, weights[:, :few])
        return jnp.concatenate([routed, weights[:, few:]], axis=1)


def with_all_experts(model: InklingModel) -> dict[str, AllExperts]:
    """Swaps every mixture of `model` in place; returns the new layers by the path of their selection bias."""
    swapped = {}
    for i, layer in enumerate(model.layers):
        if isinstance(layer.mlp, MoE):
            layer.mlp = swapped[f"layers.{i}.mlp.router.bias"] = AllExperts(layer.mlp)
    return swapped
