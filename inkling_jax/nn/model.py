"""The text model with its MTP depths."""

import dataclasses
from functools import lru_cache

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import Implementation

from ..cache import Cache, Rows
from ..collectives import index, parts
from ..config import InklingConfig
from ..ops import linear
from ..quantization import Format, Quantization
from .basic import Embedding, RMSNorm, normal
from .layer import DecoderLayer, Depth


class Unembedding(nnx.Module):
    """The LM head. The padded part of the vocabulary never leaves it, or at -inf in a device's part of a mesh."""

    def __init__(self, config: InklingConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.weight = normal(rngs, (config.vocab_size, config.hidden_size), ("vocab", "hidden"), dtype)
        self.real, self.divisor = config.real_vocab_size, config.logits_divisor

    def __call__(self, h: Float[Array, "B T H"], implementation: Implementation = "xla") -> Float[Array, "B T V"]:
        scale, outputs = jnp.full((), 1 / self.divisor, jnp.float32), self.real if parts("vocab") == 1 else None
        logits = linear(h, self.weight[...], jnp.float32, scale=scale, outputs=outputs, implementation=implementation)
        if parts("vocab") == 1:
            return logits
        ids = index("vocab") * logits.shape[-1] + jnp.arange(logits.shape[-1])
        return jnp.where(ids < self.real, logits, -jnp.inf)


class InklingModel(nnx.Module):
    """An Inkling text model: embedding, a list of decoder layers, final norm, LM head, MTP depths.

    Random initialisation: matrices N(0, 1 / fan_in), norms and scales 1, selection bias 0. `quantization` says which
    layers hold their routed experts in 4 bits.
    """

    def __init__(
        self,
        config: InklingConfig,
        *,
        dtype: DTypeLike = "bfloat16",
        quantization: Quantization | None = None,
        rngs: nnx.Rngs,
    ):
        dtype = jnp.dtype(dtype)
        formats: list[Format | None] = [None] * config.num_layers
        if quantization is not None:
            quantization.check(config)
            formats = [quantization.of_layer(i) for i in range(config.num_layers)]
        self.chained = config.chain_norm
        self.embed = Embedding(config.vocab_size, config.hidden_size, config.norm_eps, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [
                DecoderLayer(config, config.is_local(i), config.is_dense(i), formats[i], dtype=dtype, rngs=rngs)
                for i in range(config.num_layers)
            ]
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, "hidden", dtype=dtype)
        self.unembed = Unembedding(config, dtype=dtype, rngs=rngs)
        self.mtp = nnx.List(
            [Depth(config, config.mtp_is_local(d), dtype=dtype, rngs=rngs) for d in range(config.mtp_depths)]
        )
        if config.chain_norm:
            self.mtp_chain_norm = RMSNorm(config.hidden_size, config.norm_eps, "hidden", dtype=dtype)

    def hidden(
        self, tokens: Int[Array, "B T"], rows: Rows | None = None, cache: Cache | None = None
    ) -> tuple[Float[Array, "B T H"], Cache | None]:
        """Tokens to hidden rows after the final norm; with a cache, the rows continue what it holds.

        Without `rows` every row is real and starts at position 0. Differentiable without a cache.
        """
        rows = rows or _whole(tokens)
        layers = []
        x, normed = self.embed.begin(tokens, self.layers[0].attn_norm, rows)
        norms = [layer.attn_norm for layer in self.layers[1:]] + [self.norm]
        for i, (layer, next_norm) in enumerate(zip(self.layers, norms, strict=True)):
            own = None if cache is None else cache.layers[i]
            table = None if cache is None or own is None else cache.page_table(own)
            x, normed, own = layer(x, normed, next_norm, rows, own, table)
            layers.append(own)
        if cache is not None:
            cache = dataclasses.replace(cache, layers=tuple(layers))
        return normed, cache

    def logits(self, h: Float[Array, "B T H"], implementation: Implementation = "xla") -> Float[Array, "B T V"]:
        """float32 logits over the real vocabulary: `(h / divisor) U^T`. Of the final norm's output, or of a depth's.

        On a mesh, those of this device's part of the padded vocabulary. `implementation` as in `Rows`.
        """
        return self.unembed(h, implementation)

    def depth(
        self,
        d: int,
        h_prev: Float[Array, "B T H"],
        tokens: Int[Array, "B T"],
        rows: Rows | None = None,
        cache: Cache | None = None,
    ) -> tuple[Float[Array, "B T H"], Cache | None]:
        """Depth `d` on rows i: from `h_prev[i]` and token i + d + 1, the row that predicts token i + d + 2.

        `h_prev` is what `hidden` gave for d = 0 and what depth d - 1 gave otherwise, `tokens` those at i + d + 1.
        """
        rows = rows or _whole(tokens)
        own = None if cache is None else cache.depths[d]
        table = None if cache is None or own is None else cache.page_table(own)
        # The chain norm's output is what the logits and the next depth take (vLLM, SGLang, transformers).
        chain_norm = self.mtp_chain_norm if self.chained else None
        out, own = self.mtp[d](h_prev, tokens, self.embed, chain_norm, rows, own, table)
        if cache is not None and own is not None:
            cache = dataclasses.replace(cache, depths=(*cache.depths[:d], own, *cache.depths[d + 1 :]))
        return out, cache


def _whole(tokens: Int[Array, "B T"]) -> Rows:
    return Rows(jnp.zeros(tokens.shape[0], jnp.int32), jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32))


@lru_cache(maxsize=16)
def _abstract(config: InklingConfig, dtype: DTypeLike, quantization: Quantization | None) -> dict[str, nnx.Variable]:
    model = nnx.eval_shape(lambda: InklingModel(config, dtype=dtype, quantization=quantization, rngs=nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): variable for path, variable in flat}


def abstract_parameters(
    config: InklingConfig, dtype: DTypeLike = "bfloat16", quantization: Quantization | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter by its dotted path, from the modules themselves; nothing is allocated."""
    variables = _abstract(config, jnp.dtype(dtype), quantization)
    return {path: variable.get_value() for path, variable in variables.items()}


def logical_axes(config: InklingConfig, quantization: Quantization | None = None) -> dict[str, tuple[str | None, ...]]:
    """The logical axes of every parameter by its dotted path: the input of any sharding.

    Words and scales of packed weights have the axes of the weights: along the input, one for eight values and one for
    a block.
    """
    variables = _abstract(config, jnp.dtype("bfloat16"), quantization)
    return {path: variable.get_metadata()["axes"] for path, variable in variables.items()}
