from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.rel_paged_attention import triton
from tests.kernels.attention_oracle import assert_close, attend64, jitted, scatter_to_pages
from tests.kernels.oracle import bits, random

SMALL = triton.Tiles(block=16, chunk=16, num_warps=2, num_stages=2)
GPU = pytest.mark.gpu
VARIANTS = [("xla", None), ("interpret", SMALL)]
VARIANTS += [pytest.param(("triton", tiles), marks=GPU) for tiles in (None, SMALL)]
PATCHED = ("choose_tiles", "make_bias", "seen", "first_key", "SERIAL_PROGRAMS")


def choose_small(*_):
    return SMALL


@pytest.fixture(params=VARIANTS, ids=str)
def kernel(request, monkeypatch):
    """The implementation; interpreted, and on a card once more, with tiles that split tiny contexts into chunks."""
    implementation, tiles = request.param
    if tiles is not None:
        monkeypatch.setattr(triton, "choose_tiles", choose_small)
    return implementation


@pytest.fixture(params=["interpret", pytest.param("triton", marks=GPU)])
def pallas(request) -> str:
    """The implementations that split the context."""
    return request.param


@dataclass
class Setting:
    lengths: list[int]
    rows: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    page: int = 16
    max_pages: int = 6
    extent: int = 20
    window: int | None = None
    rel_dim: int = 16
    counts: list[int] | None = None
    bias: str = "project"
    tau: bool = False
    ring: int | None = None
    dtype: Any = jnp.float32

    def __post_init__(self):
        draw = partial(random, dtype=self.dtype)
        shape = len(self.lengths), self.rows, self.heads
        kv = [self.kv_heads, self.head_dim]
        self.keys = [np.array(draw(10 + b, (s, *kv))) for b, s in enumerate(self.lengths)]
        self.values = [np.array(draw(50 + b, (s, *kv))) for b, s in enumerate(self.lengths)]
        self.q = draw(1, (*shape, self.head_dim))
        self.r, self.proj = draw(2, (*shape, self.rel_dim)), draw(3, (self.rel_dim, self.extent))
        self.count = np.array(self.counts or [self.rows] * len(self.lengths), np.int32)
        padding = np.arange(self.rows) >= self.count[:, None]
        self.q, self.r = (jnp.where(padding[..., None, None], jnp.nan, x).astype(x.dtype) for x in (self.q, self.r))
        self.row_tau = jnp.asarray(1 + np.random.default_rng(4).random(shape[:2]), jnp.float32) if self.tau else None

    def rel64(self):
        if self.bias == "none":
            return None
        return np.asarray(self.r).astype(np.float64) @ np.asarray(self.proj).astype(np.float64)

    def exact(self) -> np.ndarray:
        rel = self.rel64()
        options: dict[str, Any] = dict(scale=1 / self.head_dim, extent=self.extent, window=self.window)
        out = []
        for b, length in enumerate(self.lengths):
            t = np.arange(self.rows)
            positions = np.where(t < self.count[b], length - self.count[b] + t, -1)
            tau = None if self.row_tau is None else np.asarray(self.row_tau[b])
            row = None if rel is None else rel[b]
            out.append(attend64(self.q[b], self.keys[b], self.values[b], positions, row, tau, **options))
        return np.stack(out)

    def arguments(self) -> tuple[tuple, dict]:
        first = None if self.window is None or self.ring else [n - self.rows - self.window + 1 for n in self.lengths]
        k_pages, table = scatter_to_pages(self.keys, self.page, self.max_pages, self.ring, first)
        v_pages, _ = scatter_to_pages(self.values, self.page, self.max_pages, self.ring, first)
        given = {"project": dict(r=self.r, rel_proj=self.proj), "none": {}}
        if self.bias == "logits":
            given["logits"] = dict(rel_logits=jnp.asarray(self.rel64(), jnp.float32))
        args = self.q, jnp.asarray(k_pages), jnp.asarray(v_pages), table, np.array(self.lengths, np.int32)
        count = None if self.counts is None else jnp.asarray(self.count)
        return tuple(map(jnp.asarray, args)), {**given[self.bias], "tau": self.row_tau, "count": count}

    def run(self, implementation, only: int | None = None) -> np.ndarray:
        """The public function under jit, on the whole batch or on one of its sequences alone."""
        (q, k_pages, v_pages, table, lengths), arrays = self.arguments()
        if only is not None:
            one = slice(only, only + 1)
            q, table, lengths = q[one], table[one], lengths[one]
            arrays = {n: x if x is None or n == "rel_proj" else x[one] for n, x in arrays.items()}
        patches = tuple(getattr(triton, name) for name in PATCHED)
        options: dict[str, Any] = dict(scale=1 / self.head_dim, extent=self.extent, window=self.window)
        call = jitted(pallas_kernels.rel_paged_attention, patches, implementation, **options)
        return np.asarray(call(q, k_pages, v_pages, table, lengths, **arrays))

    def check(self, implementation) -> None:
        assert_close(self.run(implementation), self.exact(), np.concatenate(self.values))


SETTINGS = {
    "global, one row": Setting([1, 0, 96, 37, 20, 21]),
    "verify, fewer keys than rows": Setting([2, 4, 0, 67, 25], rows=4, tau=True),
    "fewer real rows than others": Setting([30, 4, 0, 67, 25], rows=4, counts=[2, 4, 0, 1, 3], tau=True),
    "the same in a window": Setting([30, 4, 67], rows=4, counts=[2, 4, 1], window=24, extent=24, tau=True),
    "window is the extent": Setting([24, 25, 26, 5, 90], rows=3, window=24, extent=24, tau=True),
    "window beyond the extent": Setting([40, 41, 70, 3, 13], rows=2, window=40, extent=10, heads=6),
    "window within the extent": Setting([20, 30, 31, 90], rows=2, window=9, extent=33),
    "one head for all, 12 in the group": Setting([50, 17], rows=2, heads=12, kv_heads=1, head_dim=48, rel_dim=12),
    "a head each": Setting([50, 17, 1], heads=3, kv_heads=3, head_dim=80),
    "16 rows, several tiles of rows": Setting([16, 61, 9], rows=16, heads=10, kv_heads=2, extent=24),
    "page of 48": Setting([140, 48, 49, 0], page=48, max_pages=3, head_dim=64),
    "page of 80": Setting([100, 80, 161], page=80, max_pages=3, head_dim=80, window=70, extent=70),
    "page of 256": Setting([257, 3], rows=2, page=256, max_pages=2, heads=2, kv_heads=1),
    "ring of pages": Setting([90, 25, 64, 5], rows=3, window=24, extent=24, ring=2),
    "ring of pages, no power of two": Setting([290, 100], page=48, max_pages=7, window=70, extent=70, ring=2),
    "logits given": Setting([96, 19, 20], rows=2, bias="logits", tau=True),
    "logits given, window": Setting([96, 19, 20], rows=2, bias="logits", window=20, head_dim=256, heads=2, kv_heads=1),
    "no bias": Setting([96, 19, 20], rows=2, bias="none"),
    "extent beyond the context": Setting([30, 31], extent=300, max_pages=2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_equals_the_oracle(kernel, name):
    SETTINGS[name].check(kernel)


@pytest.mark.parametrize(
    ("dtype", "bias"), [(jnp.bfloat16, "project"), (jnp.bfloat16, "logits"), (jnp.float16, "project")]
)
def test_dtypes(implementation, dtype, bias):
    Setting([96, 19, 20, 0], rows=3, bias=bias, dtype=dtype, tau=True).check(implementation)


def test_long_context_in_several_chunks(implementation):
    """With the chunks that the package chooses; one long sequence among short ones."""
    setting = Setting([600, 3, 257, 0], page=32, max_pages=32, extent=100, dtype=jnp.bfloat16)
    assert triton.choose_tiles(1024, None, 1, 2, 160, triton.dispatch.target()).chunk < 600
    setting.check(implementation)


def test_the_split_does_not_change_the_result(pallas, monkeypatch):
    setting = Setting([1, 0, 96, 37], rows=2)
    results = []
    for chunk in (96, 32, 16):
        monkeypatch.setattr(triton, "choose_tiles", lambda *_, chunk=chunk: replace(SMALL, chunk=chunk))
        results.append(setting.run(pallas))
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], atol=3e-6)


@pytest.mark.parametrize("window", [None, 24])
def test_alone_as_in_the_batch(kernel, window):
    setting = Setting([5, 96, 0, 41], rows=2, window=window, extent=24, dtype=jnp.bfloat16)
    batch = setting.run(kernel)
    for b in range(4):
        np.testing.assert_array_equal(bits(setting.run(kernel, only=b)[0]), bits(batch[b]))


@pytest.mark.parametrize("window", [None, 24])
def test_many_sequences_give_the_bits_of_few(pallas, monkeypatch, window):
    """Where sequences are many, one program walks all chunks of one: no other result than that of the combine.

    On a CPU, XLA may fuse a product and a sum in one of two programs and not in the other: there after rounding.
    """
    dtype = jnp.float32 if pallas == "triton" else jnp.bfloat16
    setting = Setting([5, 96, 0, 41], rows=2, window=window, extent=24, tau=True, dtype=dtype)
    monkeypatch.setattr(triton, "choose_tiles", choose_small)
    few = setting.run(pallas)
    monkeypatch.setattr(triton, "SERIAL_PROGRAMS", ((triton.SERIAL_REACH, 1),))
    np.testing.assert_array_equal(bits(setting.run(pallas)), bits(few))


@pytest.mark.parametrize(("rows", "group"), [(2, 2), (5, 8), (9, 4)])
@pytest.mark.parametrize("window", [None, 512])
def test_a_row_has_the_same_bits_alone_and_among_others(pallas, window, rows, group):
    """The last of several rows against a step of its own: other tiles, another first block of the window."""
    lengths = [700, 1023, 3, 530] if pallas == "triton" else [150, 3]
    window = window and (512 if pallas == "triton" else 70)
    setting = Setting(
        lengths, rows, 2 * group, 2, 128, 64, 16, window or 600, window, tau=True,
        dtype=jnp.bfloat16 if pallas == "triton" else jnp.float32,
    )  # fmt: skip
    alone = replace(setting, rows=1)
    alone.keys, alone.values, alone.proj = setting.keys, setting.values, setting.proj
    alone.q, alone.r, alone.row_tau = setting.q[:, -1:], setting.r[:, -1:], setting.row_tau[:, -1:]
    one, among = alone.run(pallas)[:, 0], setting.run(pallas)[:, -1]
    if pallas == "triton":
        np.testing.assert_array_equal(bits(one), bits(among))
    else:  # a CPU's products may add in another order for another number of rows
        np.testing.assert_allclose(one, among, atol=3e-6)


@pytest.mark.parametrize("bias", ["project", "logits"])
@pytest.mark.parametrize("hot", [0, 1, 15, 16, 19])
def test_one_hot_distance_names_the_key(kernel, bias, hot):
    """All weight on one distance, values that hold their own position: each row must answer its position - hot."""
    setting = Setting([96, 53, 33, 23], rows=4, bias=bias)
    setting.keys = [np.zeros_like(k) for k in setting.keys]
    setting.values = [np.zeros_like(v) + np.arange(len(v), dtype=v.dtype)[:, None, None] for v in setting.values]
    setting.r = jnp.zeros_like(setting.r).at[..., 0].set(1)
    setting.proj = jnp.zeros_like(setting.proj).at[0, hot].set(60)
    expected = np.array(setting.lengths)[:, None] - 4 + np.arange(4) - hot
    assert expected.min() >= 0
    np.testing.assert_allclose(setting.run(kernel), expected[..., None, None] + np.zeros(setting.q.shape), atol=1e-4)


@pytest.mark.parametrize("bias", ["project", "logits"])
def test_the_bias_reaches_the_result(kernel, bias):
    one, other = (Setting([96, 53, 33, 23], rows=4, bias=which).run(kernel) for which in (bias, "none"))
    assert np.abs(one - other).max(axis=(2, 3)).min() > 0.02


BROKEN = {
    "bias one position off": ("make_bias", lambda whole: shifted_bias(whole)),
    "bias dropped": ("make_bias", lambda whole: lambda *args: None),
    "rows past the length read": ("seen", lambda whole: lambda plan, key, length: key >= 0),
    "first block of the window lost": ("first_key", lambda whole: lambda plan, n: whole(plan, n) + plan.block),
}


def shifted_bias(whole):
    def make(plan, refs, sequence, tile, row, query_head, real, oldest):
        bias = whole(plan, refs, sequence, tile, row, query_head, real, oldest)
        return lambda key, distance: bias(key - 1, distance + 1)

    return make


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_rejected(monkeypatch, trace_anew, name):
    """The suite's own check of itself, on the interpreter."""
    attribute, breaks = BROKEN[name]
    setting = Setting([96, 25, 40], rows=2, window=24 if "window" in name else None)
    monkeypatch.setattr(triton, "choose_tiles", choose_small)
    setting.check("interpret")
    monkeypatch.setattr(triton, attribute, breaks(getattr(triton, attribute)))
    trace_anew()
    with pytest.raises(AssertionError, match="off by"):
        setting.check("interpret")


BAD = {
    "q": (lambda a, k: a.update(q=a["q"][0]), "q has shape"),
    "rows": (lambda a, k: a.update(q=jnp.zeros((2, 17, 4, 32))), "17 rows.*1 to 16"),
    "heads": (lambda a, k: a.update(q=jnp.zeros((2, 1, 3, 32))), "3 heads and k_pages 2"),
    "head size": (lambda a, k: a.update(q=jnp.zeros((2, 1, 4, 64))), "head size 32 and q has 64"),
    "page": (lambda a, k: a.update({n: a[n][:, :, :8] for n in ("k_pages", "v_pages")}), "pages of 8 rows.*16 to 256"),
    "dtype": (lambda a, k: a.update(v_pages=a["v_pages"].astype(jnp.bfloat16)), "v_pages is bfloat16"),
    "index": (lambda a, k: a.update(page_table=a["page_table"].astype(jnp.int16)), "page_table is int16"),
    "lengths": (lambda a, k: a.update(lengths=a["lengths"][:1]), "lengths has shape"),
    "both": (lambda a, k: k.update(rel_logits=jnp.zeros((2, 1, 4, 20))), "only one"),
    "half": (lambda a, k: k.pop("r"), "r is missing"),
    "extent": (lambda a, k: k.update(extent=21), "rel_proj has shape"),
    "window": (lambda a, k: k.update(window=0), "window 0"),
    "tau": (lambda a, k: k.update(tau=jnp.ones((2,))), "tau has shape"),
    "implementation": (lambda a, k: k.update(implementation="cuda"), "implementation is 'cuda'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    change, message = BAD[name]
    args, arrays = Setting([20, 3]).arguments()
    positional = dict(zip(("q", "k_pages", "v_pages", "page_table", "lengths"), args, strict=True))
    keywords = dict(arrays, scale=0.1, extent=20)
    change(positional, keywords)
    with pytest.raises(ValueError, match=message):
        pallas_kernels.rel_paged_attention(*positional.values(), **keywords)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks for what a CPU cannot do")
def test_triton_on_a_cpu_says_why_not():
    args, arrays = Setting([20, 3]).arguments()
    with pytest.raises(NotImplementedError, match="needs an NVIDIA or AMD GPU"):
        pallas_kernels.rel_paged_attention(*args, **arrays, scale=0.1, extent=20, implementation="triton")
