from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.rel_attention import triton
from tests.kernels.attention_oracle import UNIT, assert_close, attend64, jitted, scatter_to_pages
from tests.kernels.oracle import bits, random

SMALL = triton.Tiles(rows=16, block=16, num_warps=2, num_stages=2)
GPU = pytest.mark.gpu
VARIANTS = [("xla", None), ("interpret", SMALL)]
VARIANTS += [pytest.param(("triton", tiles), marks=GPU) for tiles in (None, SMALL)]
PATCHED = ("choose_tiles", "load_bias", "load_logits", "cached_block", "new_block")


def choose_small(*_):
    return SMALL


@pytest.fixture(params=VARIANTS, ids=str)
def kernel(request, monkeypatch):
    """The implementation; interpreted, and on a card once more, with tiles that cut tiny chunks into many."""
    implementation, tiles = request.param
    if tiles is not None:
        monkeypatch.setattr(triton, "choose_tiles", choose_small)
    return implementation


@pytest.fixture(params=["interpret", pytest.param("triton", marks=GPU)])
def pallas(request) -> str:
    """The implementations that have tiles."""
    return request.param


@dataclass
class Setting:
    """Sequences of `starts[b]` cached rows, None for no pages, and `counts[b]` new ones out of `rows`."""

    starts: list[int] | None
    counts: list[int]
    rows: int = 20
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    page: int = 16
    max_pages: int = 5
    extent: int = 20
    window: int | None = None
    rel_dim: int = 16
    bias: str = "project"
    tau: bool = False
    ring: int | None = None
    dtype: Any = jnp.float32

    def __post_init__(self):
        draw = partial(random, dtype=self.dtype)
        shape, kv = (len(self.counts), self.rows, self.heads), (self.kv_heads, self.head_dim)
        self.before = self.starts or [0] * len(self.counts)
        ends = [s + c for s, c in zip(self.before, self.counts, strict=True)]
        self.keys = [np.array(draw(10 + b, (end, *kv))) for b, end in enumerate(ends)]
        self.values = [np.array(draw(50 + b, (end, *kv))) for b, end in enumerate(ends)]
        self.q = np.array(draw(1, (*shape, self.head_dim)))
        self.r, self.proj = np.array(draw(2, (*shape, self.rel_dim))), np.array(draw(3, (self.rel_dim, self.extent)))
        self.row_tau = (1 + np.random.default_rng(4).random(shape[:2])).astype(np.float32)

    def rel64(self) -> np.ndarray:
        return self.r.astype(np.float64) @ self.proj.astype(np.float64)

    def exact(self) -> np.ndarray:
        out = np.zeros(self.q.shape)
        for b, (start, count) in enumerate(zip(self.before, self.counts, strict=True)):
            rel = None if self.bias == "none" else self.rel64()[b]
            tau = self.row_tau[b] if self.tau else None
            row = self.q[b, :count], self.keys[b], self.values[b], start + np.arange(count), rel, tau
            out[b, :count] = attend64(*row, scale=1 / self.head_dim, extent=self.extent, window=self.window)
        return out

    def first(self) -> list[int] | None:
        """The first cached row that a sequence needs, where it may give older pages back."""
        return None if self.window is None or self.ring else [start - self.window + 1 for start in self.before]

    def arguments(self) -> tuple[tuple, dict]:
        """The arrays, with NaN in every row that is not real and in every page row that holds no cached key."""

        def poisoned(x):
            real = np.arange(self.rows) < np.array(self.counts)[:, None]
            return np.where(real.reshape(*real.shape, *(1,) * (x.ndim - 2)), x, np.nan).astype(x.dtype)

        def fresh(rows):
            new = (x[start:] for x, start in zip(rows, self.before, strict=True))
            return poisoned(np.stack([np.pad(x, ((0, self.rows - len(x)), (0, 0), (0, 0))) for x in new]))

        arrays: dict[str, Any] = {"count": np.array(self.counts, np.int32)}
        if self.starts is not None:
            for name, rows in (("k_pages", self.keys), ("v_pages", self.values)):
                old = [x[:start] for x, start in zip(rows, self.starts, strict=True)]
                pages = scatter_to_pages(old, self.page, self.max_pages, self.ring, self.first())
                arrays[name], arrays["page_table"] = pages
            arrays["start"] = np.array(self.starts, np.int32)
        if self.bias == "project":
            arrays |= dict(r=poisoned(self.r), rel_proj=self.proj)
        if self.bias == "logits":
            arrays["rel_logits"] = poisoned(self.rel64().astype(np.float32))
        if self.tau:
            arrays["tau"] = poisoned(self.row_tau)
        return (poisoned(self.q), fresh(self.keys), fresh(self.values)), arrays

    def run(self, implementation: str, only: int | None = None) -> np.ndarray:
        """The public function under jit, on the whole batch or on one of its sequences alone."""
        args, arrays = self.arguments()
        if only is not None:
            one, whole = slice(only, only + 1), ("rel_proj", "k_pages", "v_pages")
            args = tuple(x[one] for x in args)
            arrays = {name: x if name in whole else x[one] for name, x in arrays.items()}
        patches = tuple(getattr(triton, name) for name in PATCHED)
        options: dict[str, Any] = dict(scale=1 / self.head_dim, extent=self.extent, window=self.window)
        call = jitted(pallas_kernels.rel_attention, patches, implementation, **options)
        return np.asarray(call(*args, **arrays))

    def check(self, implementation: str) -> None:
        """The kernel keeps the bias in float16 for 16-bit inputs: half a unit of its largest value."""
        half = 0.0 if self.dtype == jnp.float32 or self.bias == "none" else UNIT["float16"] * np.abs(self.rel64()).max()
        assert_close(self.run(implementation), self.exact(), np.concatenate(self.values), 2 * half)


SETTINGS = {
    "prefill of unequal prompts": Setting(None, [20, 1, 0, 17]),
    "no bias": Setting([33, 0], [20, 7], bias="none"),
    "chunk over cached rows": Setting([37, 16, 0, 70, 5], [20, 20, 13, 0, 1], tau=True),
    "more rows than the extent": Setting([37, 8], [50, 41], rows=50, extent=12, heads=2, kv_heads=1),
    "window is the extent": Setting([37, 24, 23, 3], [20, 20, 20, 9], window=24, extent=24, tau=True),
    "window beyond the extent": Setting([50, 9], [33, 40], rows=40, window=30, extent=10, heads=6),
    "window within the extent": Setting([50, 9], [33, 40], rows=40, window=9, extent=33),
    "window of one": Setting([18, 0], [20, 5], window=1, extent=20),
    "one head for all, 12 in the group": Setting([17], [11], rows=11, heads=12, kv_heads=1, head_dim=48, rel_dim=12),
    "a head each": Setting([17, 40], [20, 3], heads=3, kv_heads=3, head_dim=80, page=48, max_pages=2),
    "page of 80": Setting([81, 79], [9, 5], rows=9, page=80, max_pages=2, extent=64, bias="logits"),
    "page of 256": Setting([257, 3], [4, 4], rows=4, page=256, max_pages=2, extent=300, heads=2, kv_heads=1),
    "logits given": Setting([37, 16], [20, 13], bias="logits", tau=True),
    "head of 256, window": Setting([37], [20], bias="logits", window=20, head_dim=256, heads=2, kv_heads=1),
    "extent beyond the context": Setting([9], [20], extent=300, max_pages=1),
    "ring of pages": Setting([75, 30, 48], [20, 20, 3], window=24, extent=24, ring=2),
    "ring shorter than the chunk": Setting([75, 5], [50, 44], rows=50, window=17, extent=17, ring=2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_equals_the_oracle(kernel, name):
    SETTINGS[name].check(kernel)


@pytest.mark.parametrize(
    ("dtype", "bias"), [(jnp.bfloat16, "project"), (jnp.bfloat16, "logits"), (jnp.float16, "project")]
)
def test_dtypes(implementation, dtype, bias):
    Setting([37, 16, 0], [20, 13, 5], bias=bias, dtype=dtype, tau=True).check(implementation)


def test_one_long_sequence_among_short_ones(implementation):
    """With the tiles that the package chooses, several of each."""
    shape: dict[str, Any] = dict(rows=90, page=64, extent=50, heads=2, kv_heads=1)
    Setting([300, 3, 0, 1], [90, 70, 2, 0], **shape, dtype=jnp.bfloat16).check(implementation)


@pytest.mark.parametrize("window", [None, 24])
def test_alone_as_in_the_batch(kernel, window):
    setting = Setting([5, 70, 0, 41], [20, 11, 17, 0], window=window, extent=24, dtype=jnp.bfloat16)
    batch = setting.run(kernel)
    for b in range(4):
        np.testing.assert_array_equal(bits(setting.run(kernel, only=b)[0]), bits(batch[b]))


@pytest.mark.parametrize("bias", ["project", "logits"])
@pytest.mark.parametrize("hot", [0, 1, 15, 16, 19])
def test_one_hot_distance_names_the_key(kernel, bias, hot):
    """All weight on one distance, values that hold their own position: each row must answer its position - hot."""
    setting = Setting([60, 19, 33], [20, 17, 6], bias=bias)
    setting.keys = [np.zeros_like(k) for k in setting.keys]
    setting.values = [np.zeros_like(v) + np.arange(len(v), dtype=v.dtype)[:, None, None] for v in setting.values]
    setting.r = np.zeros_like(setting.r)
    setting.r[..., 0] = 1
    setting.proj = np.zeros_like(setting.proj)
    setting.proj[0, hot] = 60
    out = setting.run(kernel)
    for b, (start, count) in enumerate(zip(setting.before, setting.counts, strict=True)):
        expected = start + np.arange(count) - hot
        np.testing.assert_allclose(out[b, :count], expected[:, None, None] + 0 * out[b, :count], atol=1e-4)
        assert expected.min() >= 0 and not out[b, count:].any()


@pytest.mark.parametrize("bias", ["project", "logits"])
def test_the_bias_reaches_the_result(kernel, bias):
    """Every row that sees more than itself answers differently."""
    one, other = (Setting([60, 19, 33], [20, 17, 6], bias=which).run(kernel) for which in (bias, "none"))
    for b, count in enumerate((20, 17, 6)):
        assert np.abs(one - other)[b, :count].max(axis=(1, 2)).min() > 0.02


def test_the_tiles_do_not_change_the_result(pallas, monkeypatch):
    setting = Setting([37, 70, 0], [20, 13, 7], window=24)
    for rows, block in ((16, 32), (64, 16)):
        tiles = triton.Tiles(rows=rows, block=block, num_warps=2, num_stages=2)
        monkeypatch.setattr(triton, "choose_tiles", lambda *_, tiles=tiles: tiles)
        setting.check(pallas)


BROKEN = {
    "bias one position off": ("load_logits", lambda whole: lambda *args: lambda distance: whole(*args)(distance + 1)),
    "bias dropped": ("load_logits", lambda whole: lambda *args: lambda distance: 0 * whole(*args)(distance)),
    "bias of the block before": ("load_bias", lambda whole: lambda *args: whole(*args[:-1], args[-1] - 1)),
    "padding rows seen as keys": ("new_block", lambda whole: lambda *args: whole(*args[:-2], None, args[-1])),
    "last cached key lost": ("cached_block", lambda whole: lambda *args: lose_last_key(*whole(*args))),
}


def lose_last_key(block, key, live, k, v):
    lost = (key == -1)[:, None]
    return block, key, live, jnp.where(lost, 0, k), jnp.where(lost, 0, v)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_rejected(monkeypatch, trace_anew, name):
    """The suite's own check of itself, on the interpreter."""
    attribute, breaks = BROKEN[name]
    setting = Setting([37, 16], [20, 13])
    monkeypatch.setattr(triton, "choose_tiles", choose_small)
    setting.check("interpret")
    monkeypatch.setattr(triton, attribute, breaks(getattr(triton, attribute)))
    trace_anew()
    with pytest.raises(AssertionError, match="off by"):
        setting.check("interpret")


BAD = {
    "q": (lambda k: k.update(q=k["q"][0]), "q has shape"),
    "heads": (lambda k: k.update(q=k["q"][:, :, :3]), "3 heads and k 2"),
    "rows": (lambda k: k.update(k=k["k"][:, :5], v=k["v"][:, :5]), "k has shape"),
    "head size": (lambda k: k.update(q=np.zeros((2, 20, 4, 64), np.float32)), "head size 32 and q has 64"),
    "small heads": (
        lambda k: k.update({n: k[n][..., :16] for n in ("q", "k", "v")}),
        "head size 16; expected 32 to 256",
    ),
    "page": (lambda k: k.update({n: k[n][:, :, :8] for n in ("k_pages", "v_pages")}), "pages of 8 rows.*16 to 256"),
    "page heads": (lambda k: k.update({n: k[n][:, :1] for n in ("k_pages", "v_pages")}), "k_pages has shape"),
    "dtype": (lambda k: k.update(v=k["v"].astype(np.float16)), "v is float16"),
    "index": (lambda k: k.update(page_table=k["page_table"].astype(np.int16)), "page_table is int16"),
    "start": (lambda k: k.update(start=k["start"][:1]), "start has shape"),
    "count": (lambda k: k.update(count=k["count"].astype(np.float32)), "count is float32"),
    "pages incomplete": (lambda k: k.pop("page_table"), "come together; page_table missing"),
    "both": (lambda k: k.update(rel_logits=np.zeros((2, 20, 4, 20), np.float32)), "only one"),
    "half": (lambda k: k.pop("r"), "r is missing"),
    "extent": (lambda k: k.update(extent=21), "rel_proj has shape"),
    "window": (lambda k: k.update(window=0), "window 0"),
    "tau": (lambda k: k.update(tau=np.ones((2,), np.float32)), "tau has shape"),
    "implementation": (lambda k: k.update(implementation="cuda"), "implementation is 'cuda'"),
}


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_gives_nothing(implementation, shape):
    q, kv = jnp.ones((*shape, 4, 32)), jnp.ones((*shape, 2, 32))
    assert pallas_kernels.rel_attention(q, kv, kv, scale=1.0, extent=0, implementation=implementation).shape == q.shape


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    change, message = BAD[name]
    (q, k, v), arrays = Setting([20, 3], [20, 5]).arguments()
    given: dict[str, Any] = dict(q=q, k=k, v=v, **arrays, scale=0.1, extent=20)
    change(given)
    with pytest.raises(ValueError, match=message):
        pallas_kernels.rel_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks for what a CPU cannot do")
def test_triton_on_a_cpu_says_why_not():
    args, arrays = Setting([20, 3], [20, 5]).arguments()
    with pytest.raises(NotImplementedError, match="needs an NVIDIA or AMD GPU"):
        pallas_kernels.rel_attention(*args, **arrays, scale=0.1, extent=20, implementation="triton")
