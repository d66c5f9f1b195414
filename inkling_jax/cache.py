"""What decoding remembers: paged keys and values, and the inputs of the short convolutions.

Everything is addressed by absolute position. A row that turns out to come from a rejected draft needs no undoing:
the next round writes over it, and nothing reads a position that has not been written since.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import Implementation

from . import collectives
from .config import InklingConfig
from .sharding import TABLE, parts_of, spec_of

PAGE_SIZE = 64
LEAST_CAPACITY = 1024  # rows of the shortest sequence that is compiled for
VERIFY_ROWS = 16  # steps of at most so many rows are written before they attend (`ops.attend`)
STATIC: dict[str, Any] = {"static": True}
Leaf = Any  # an array, or what stands in for one while JAX takes a tree apart and rebuilds it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """New rows of a batch: row t of sequence b stands at position `start[b] + t` and is real when `t < count[b]`.

    `implementation` runs them where there is a cache: "xla" is plain JAX, "triton" and "interpret" the kernels.
    """

    start: Leaf  # int32 [B]
    count: Leaf  # int32 [B]
    implementation: Implementation = field(default="xla", metadata=STATIC)

    def positions(self, new: int) -> Int[Array, "B T"]:
        return self.start[:, None] + jnp.arange(new, dtype=jnp.int32)

    def real(self, new: int) -> Bool[Array, "B T"]:
        return jnp.arange(new) < self.count[:, None]

    def last(self, new: int, keep: int) -> Bool[Array, "B T"]:
        """The real rows less those that a ring of `keep` rows would overwrite within this very step."""
        t = jnp.arange(new)
        return (t < self.count[:, None]) & (t >= self.count[:, None] - keep)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedKV:
    """Keys and values of one layer. `ring`: rows a sequence keeps (the window's), None where it keeps all."""

    k: Leaf  # [P, K, page, D]
    v: Leaf  # [P, K, page, D]
    ring: int | None = field(default=None, metadata=STATIC)

    def write(
        self, k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], page_table: Int[Array, "B pages"], rows: Rows
    ) -> "PagedKV":
        """Stores the real rows at their positions; padding and unallocated pages (-1) are dropped, never clamped."""
        pages, _, page_size, _ = self.k.shape
        new, width = k.shape[1], page_table.shape[1]
        positions = rows.positions(new)
        page = positions // page_size
        keep = rows.last(new, new if self.ring is None else self.ring) & (page >= 0) & (page < width)
        at = jnp.take_along_axis(page_table, jnp.clip(page, 0, width - 1), axis=1)
        at = jnp.where(keep & (at >= 0), at, pages)
        slot = positions % page_size
        return dataclasses.replace(
            self,
            k=self.k.at[at, :, slot].set(k, mode="drop"),
            v=self.v.at[at, :, slot].set(v, mode="drop"),
        )

    def read(
        self, pages: Int[Array, "B n"], live: Bool[Array, "B S"]
    ) -> tuple[Float[Array, "B S K D"], Float[Array, "B S K D"]]:
        """The rows of n pages a sequence, in order; rows that are not `live` read as zeros, whatever lies there."""
        ids = jnp.clip(pages, 0, self.k.shape[0] - 1)

        def rows(pool: Float[Array, "P K page D"]) -> Float[Array, "B S K D"]:
            found = pool[ids].transpose(0, 1, 3, 2, 4)
            found = found.reshape(*live.shape, *found.shape[3:])
            return jnp.where(live[..., None, None], found, jnp.zeros((), pool.dtype))

        return rows(self.k), rows(self.v)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ring:
    """The last rows of a stream, position p in row p % size. `axis`: the logical axis of its channels on a mesh."""

    rows: Leaf  # [B, size, C]
    axis: str | None = field(default=None, metadata=STATIC)

    def read(self, first: Int[Array, " B"], count: int) -> Float[Array, "B count C"]:
        """Rows at positions first .. first + count - 1; zeros before the start of the sequence."""
        positions = first[:, None] + jnp.arange(count, dtype=jnp.int32)
        found = jnp.take_along_axis(self.rows, (positions % self.rows.shape[1])[..., None], axis=1)
        return jnp.where(positions[..., None] >= 0, found, jnp.zeros((), found.dtype))

    def write(self, x: Float[Array, "B T C"], rows: Rows) -> "Ring":
        batch, size, _ = self.rows.shape
        new = x.shape[1]
        at = jnp.where(rows.last(new, size), rows.positions(new) % size, size)
        return dataclasses.replace(self, rows=self.rows.at[jnp.arange(batch)[:, None], at].set(x, mode="drop"))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """One decoder layer: its keys and values, and the inputs of its four short convolutions."""

    kv: PagedKV
    k_conv: Ring
    v_conv: Ring
    attn_conv: Ring
    mlp_conv: Ring


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """All layers of the backbone and of the MTP depths that draft, with the two page tables they share."""

    layers: tuple[LayerCache, ...]
    depths: tuple[LayerCache, ...]
    global_pages: Leaf  # int32 [B, pages]
    local_pages: Leaf  # int32 [B, pages]
    implementation: Implementation = field(default="xla", metadata=STATIC)

    def rows(self, start: Int[Array, " B"], count: Int[Array, " B"]) -> Rows:
        """New rows that continue this cache."""
        return Rows(start, count, self.implementation)

    def page_table(self, layer: LayerCache) -> Int[Array, "B pages"]:
        return self.global_pages if layer.kv.ring is None else self.local_pages


def bucket(n: int, least: int) -> int:
    """The next size at or above n in steps of a quarter of a power of two: at most a quarter is wasted."""
    if n <= least:
        return least
    step = max(1, 1 << ((n - 1).bit_length() - 3))
    return -(-n // step) * step


def padded(sequences: int) -> int:
    """How many sequences a batch is compiled for on a device: a power of two."""
    return 1 << (sequences - 1).bit_length()


@dataclass(frozen=True)
class CacheShape:
    """The sizes that a cache is compiled for: `rows` is the most rows a sequence adds in one round of decoding.

    Sequences and global pages fall into `groups` of equal size, one for each device of the data axis. A page's number
    counts within its group.
    """

    batch: int
    pages: int  # global pages, of all sequences together
    width: int  # entries of a page table: the longest sequence in pages
    drafts: int
    page_size: int = PAGE_SIZE
    groups: int = 1

    @classmethod
    def of(cls, needed: np.ndarray, drafts: int, groups: int = 1) -> "CacheShape":
        """The bucket of sizes for sequences of `needed[b]` rows: pages in steps of a quarter of a power of two."""
        pages = -(-needed // PAGE_SIZE)
        width = bucket(int(pages.max()), LEAST_CAPACITY // PAGE_SIZE)
        total = bucket(int(pages.reshape(groups, -1).sum(axis=1).max()), width) * groups
        return cls(batch=len(needed), pages=total, width=width, drafts=drafts, groups=groups)

    @property
    def rows(self) -> int:
        return self.drafts + 1

    def local_pages(self, config: InklingConfig) -> int:
        """Pages a sequence keeps in a local layer: the window before the oldest row of a round, and the round."""
        rows = config.window - 1 + max(self.rows, VERIFY_ROWS)
        return min(self.width, -(-rows // self.page_size))


def make_cache(
    config: InklingConfig,
    shape: CacheShape,
    dtype: DTypeLike,
    implementation: Implementation = "xla",
    mesh: Mesh | None = None,
) -> Cache:
    """An empty cache; `specs` says how it lies on a mesh. `allocate_pages` makes the page tables."""
    layers = [config.is_local(i) for i in range(config.num_layers)]
    depths = [config.mtp_is_local(d) for d in range(shape.drafts)]
    table = partial(jnp.full, (shape.batch, shape.width), -1, jnp.int32)
    return Cache(
        layers=tuple(_layer_cache(config, local, shape, dtype, mesh) for local in layers),
        depths=tuple(_layer_cache(config, local, shape, dtype, mesh) for local in depths),
        global_pages=table(),
        local_pages=table(),  # two arrays: a donated one may not be given twice
        implementation=implementation,
    )


def _layer_cache(
    config: InklingConfig, local: bool, shape: CacheShape, dtype: DTypeLike, mesh: Mesh | None
) -> LayerCache:
    """On a mesh with more devices along tensor than KV heads, each device has a head, several the same one.

    Rings of the residual branches are split where a round of decoding has many rows (`collectives.few`).
    """
    attention = config.attention(local)
    per_sequence = shape.local_pages(config)
    pages = shape.batch * per_sequence if local else shape.pages
    kv_heads = max(attention.kv_heads, 1 if mesh is None else parts_of(mesh, TABLE["kv_heads"]))
    kv = (pages, kv_heads, shape.page_size, attention.head_dim)
    rows = max(shape.rows, 2)  # of a sequence in a step, at most (`decode.loop.verify`)
    size = config.conv_width - 1 + rows  # so that a kernel's rows read and write the ring side by side
    many = shape.batch // shape.groups * shape.rows > collectives.WHOLE_ROWS

    def ring(channels: int, axis: str | None) -> Ring:
        return Ring(jnp.zeros((shape.batch, size, channels), dtype), axis)

    def residual(axis: str) -> Ring:
        return ring(config.hidden_size, axis if mesh is not None and parts_of(mesh, TABLE[axis]) > 1 and many else None)

    def pool() -> Array:
        return jnp.zeros(kv, dtype)

    return LayerCache(
        kv=PagedKV(pool(), pool(), per_sequence * shape.page_size if local else None),
        k_conv=ring(kv_heads * attention.head_dim, "kv_heads"),
        v_conv=ring(kv_heads * attention.head_dim, "kv_heads"),
        attn_conv=residual("heads"),
        mlp_conv=residual("mlp"),
    )


def specs(state: Any) -> Any:
    """How a cache, or any state around one, lies on a mesh: its tree with a PartitionSpec for each array."""

    def of(part: Any) -> Any:
        if isinstance(part, PagedKV):
            pages = spec_of(("pages", "kv_heads", None, None))
            return dataclasses.replace(part, k=pages, v=pages)
        if isinstance(part, Ring):
            return dataclasses.replace(part, rows=spec_of(("batch", None, part.axis)))
        return spec_of(("batch",) if part.ndim else ())

    return jax.tree.map(of, state, is_leaf=lambda part: isinstance(part, PagedKV | Ring))


def allocate_pages(config: InklingConfig, shape: CacheShape, capacity: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Page tables (global, local) for sequences of at most `capacity[b]` rows.

    A global layer gets as many pages as the sequence can need and -1 beyond. A local layer's entries repeat every
    `local_pages`: that repetition is all there is to its ring.
    """
    needed = -(-capacity // shape.page_size)
    groups = needed.reshape(shape.groups, -1)
    if groups.sum(axis=1).max() * shape.groups > shape.pages or needed.max(initial=0) > shape.width:
        raise ValueError(f"{needed.sum()} pages of {shape.page_size} rows needed, the cache holds {shape.pages}")
    index = np.arange(shape.width)
    first = (np.cumsum(groups, axis=1) - groups).reshape(-1)
    everything = np.where(index < needed[:, None], first[:, None] + index, -1)
    local = shape.local_pages(config)
    ring = np.arange(shape.batch)[:, None] % (shape.batch // shape.groups) * local + index % local
    return everything.astype(np.int32), ring.astype(np.int32)


def cache_bytes(
    config: InklingConfig, batch: int, context: int, draft_tokens: int, dtype: str = "bfloat16"
) -> dict[str, int]:
    """Bytes of the cache for `batch` sequences of `context` tokens, by part; "depths" is all of the drafting depths.

    In the sizes that are compiled for, which are a quarter larger at most and of up to twice as many sequences.
    """
    needed = np.where(np.arange(padded(batch)) < batch, context + draft_tokens + 1, 0)
    shape = CacheShape.of(needed, draft_tokens)
    cache = jax.eval_shape(lambda: make_cache(config, shape, jnp.dtype(dtype)))

    def size(tree: Any) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    parts = {
        "global_kv": sum(size(layer.kv) for layer in cache.layers if layer.kv.ring is None),
        "local_kv": sum(size(layer.kv) for layer in cache.layers if layer.kv.ring is not None),
        "conv": sum(size(layer) - size(layer.kv) for layer in cache.layers),
        "depths": size(cache.depths),
    }
    return {**parts, "total": sum(parts.values())}
