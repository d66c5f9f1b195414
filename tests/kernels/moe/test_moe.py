import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

import pallas_kernels
from pallas_kernels import _dispatch
from pallas_kernels.fp4 import BLOCK_OF, FP4
from pallas_kernels.moe import triton
from pallas_kernels.moe.shapes import with_ragged_dot
from pallas_kernels.moe.tiles import choose_tiles
from pallas_kernels.moe.unpack import Packing
from tests.kernels.gpu_free import lower
from tests.kernels.oracle import DTYPES, bits, f64, jitted, random

moe = jitted(pallas_kernels.moe)
FORMATS = ("nvfp4", "mxfp4")
KINDS = (None, *FORMATS)
# One rounding of the SwiGLU product, each weighted 1 / sqrt(F) of it in a sum of F, and one of the result: a few units
# of the largest output. float32: its sums.
TOLERANCE = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-19}


def pack(rng: np.random.Generator, shape: tuple[int, ...], form: str) -> FP4:
    """Random codes; scales that give weights of about 1 / sqrt(inputs)."""
    scales = (*shape[:-1], shape[-1] // BLOCK_OF[form])
    codes = jnp.asarray(rng.integers(0, 2**32, (*shape[:-1], shape[-1] // 8), np.uint32))
    root = np.sqrt(shape[-1]) * 3
    if form == "mxfp4":
        exponent = 127 - int(np.log2(root)) + rng.integers(-1, 2, scales)
        return FP4(codes, jnp.asarray(exponent.astype(np.uint8)), None, form)
    expert = rng.uniform(0.5, 2.0, shape[0]) / root
    bits_of = rng.uniform(0.5, 2.0, scales).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return FP4(codes, jnp.asarray(bits_of), jnp.asarray(expert.astype(np.float32)), form)


def unpack64(w: FP4 | jax.Array) -> np.ndarray:
    """The weights by the number types of ml_dtypes, two values a byte, the first in the low half."""
    if not isinstance(w, FP4):
        return f64(w)
    codes = np.asarray(w.codes).view(np.uint8)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
    kind = ml_dtypes.float8_e4m3fn if w.format == "nvfp4" else ml_dtypes.float8_e8m0fnu
    scales = np.asarray(w.scales).view(kind).astype(np.float64)
    values = nibbles.astype(np.float64).reshape(*scales.shape, -1) * scales[..., None]
    values = values.reshape(w.shape)
    if w.expert_scale is not None:
        values *= f64(w.expert_scale).reshape(-1, *(1,) * (values.ndim - 1))
    return values


def make(rows, experts, per_row, *, shared=2, hidden=96, width=160, form=None, dtype=jnp.float32, seed=0) -> dict:
    """The arguments, by name."""
    rng = np.random.default_rng(seed)
    array = lambda *s: random(rng.integers(2**31), s, dtype, s[-1] ** -0.5)  # noqa: E731
    expert = array if form is None else lambda *s: pack(rng, s, form)
    ids = [rng.permutation(experts)[:per_row] for _ in range(rows)]
    return dict(
        x=random(seed + 1, (rows, hidden), dtype),
        ids=jnp.asarray(np.array(ids), jnp.int32),
        weights=jnp.asarray(rng.uniform(0.1, 1.0, (rows, per_row + shared)), jnp.float32),
        w13=expert(experts, 2, width, hidden),
        w2=expert(experts, hidden, width),
        shared_w13=array(shared, 2, width, hidden) if shared else None,
        shared_w2=array(shared, hidden, width) if shared else None,
    )


def moe64(x, ids, weights, w13, w2, shared_w13=None, shared_w2=None, valid=None) -> np.ndarray:
    """A loop over rows and experts."""
    x, weights, w13, w2 = f64(x), f64(weights), unpack64(w13), unpack64(w2)
    ids, out = np.asarray(ids), np.zeros(x.shape)
    shared = [] if shared_w13 is None else list(zip(f64(shared_w13), f64(shared_w2), strict=True))
    for m in range(len(x)):
        if valid is not None and not valid[m]:
            continue
        own = [(w13[e], w2[e]) if 0 <= e < len(w13) else None for e in ids[m]]
        for weight, expert in zip(weights[m], own + shared, strict=True):
            if expert is not None:
                gate, up = expert[0] @ x[m]
                out[m] += weight * (expert[1] @ (gate * (1 + np.tanh(gate / 2)) / 2 * up))
    return out


def assert_close(actual: np.ndarray, exact: np.ndarray) -> None:
    worst = np.abs(f64(actual) - exact).max() / np.abs(exact).max()
    assert worst <= TOLERANCE[actual.dtype.name], f"off by {worst} of the largest output"


def run(a: dict, implementation: str, valid=None) -> np.ndarray:
    """With a mask always: the tests share shapes, so that one compilation serves many of them."""
    valid = np.ones(len(a["x"]), bool) if valid is None else valid
    return moe(**a, valid=jnp.asarray(valid), implementation=implementation)


def usual(form: str | None, dtype=jnp.bfloat16, seed=0) -> dict:
    return make(20, 5, 2, shared=1, form=form, dtype=dtype, seed=seed)


def rows_of(a: dict, rows) -> dict:
    return a | {name: a[name][rows] for name in ("x", "ids", "weights")}


@pytest.mark.parametrize(
    ("rows", "experts", "per_row", "shared", "form"),
    [
        (5, 4, 1, 0, None),
        (33, 6, 4, 1, None),
        (1, 8, 3, 2, None),
        (3, 256, 8, 4, None),
        (33, 6, 4, 0, "nvfp4"),
        (1, 8, 3, 2, "nvfp4"),
        (9, 4, 3, 3, "mxfp4"),
    ],
)
def test_matches_float64(implementation, rows, experts, per_row, shared, form):
    small = dict(hidden=32, width=64) if experts > 100 else {}
    a = make(rows, experts, per_row, shared=shared, form=form, **small)
    assert_close(moe(**a, implementation=implementation), moe64(**a))


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_half_types_match_float64(implementation, dtype, form):
    a = usual(form, dtype)
    actual = run(a, implementation)
    assert actual.dtype == dtype
    assert_close(actual, moe64(**a))


@pytest.mark.parametrize("rows", [200, 512])
def test_many_rows_match_float64(implementation, rows):
    a = make(rows, 4, 2, shared=1, hidden=40, width=72)
    assert_close(moe(**a, implementation=implementation), moe64(**a))


@pytest.mark.parametrize(("rows", "form"), [(24, "nvfp4"), (200, None), (200, "mxfp4"), (600, None), (600, "nvfp4")])
def test_every_kind_of_tiles_matches_float64(implementation, rows, form, monkeypatch):
    """12, 100 and 300 rows an expert, the interpreter with an H200's tiles too."""
    if implementation == "interpret":
        h200 = _dispatch.Target("cuda", "sm_90")
        on_h200 = lambda *sizes: choose_tiles(*sizes[:-1], h200)  # noqa: E731
        monkeypatch.setattr(triton, "choose_tiles", on_h200)
    a = make(rows, 4, 2, shared=1, hidden=96, width=160, form=form, dtype=jnp.bfloat16)
    run_it = jax.jit(functools.partial(pallas_kernels.moe, implementation=implementation))
    assert_close(np.asarray(run_it(**a)), moe64(**a))


@pytest.mark.parametrize("form", [None, "nvfp4"])
def test_all_rows_on_one_expert_and_the_others_not_read(implementation, form):
    """Whoever nobody visits holds NaN: multiplied by a weight of 0 it would show."""
    a = usual(form)
    a["ids"] = jnp.full_like(a["ids"], 3)
    exact = moe64(**a)
    alone = np.arange(5) == 3
    for name in ("w13", "w2"):
        w, keep = a[name], alone.reshape(-1, *(1,) * (len(a[name].shape) - 1))
        if form is None:
            a[name] = jnp.where(keep, w, jnp.nan)
        else:
            a[name] = FP4(w.codes, jnp.where(keep, w.scales, 255), w.expert_scale, form)
    assert_close(run(a, implementation), exact)


def test_the_same_expert_twice_counts_twice(implementation):
    a = usual(None)
    a["ids"] = a["ids"].at[:, 1].set(a["ids"][:, 0])
    assert_close(run(a, implementation), moe64(**a))


@pytest.mark.parametrize("form", KINDS)
def test_padding_rows_give_zeros_whatever_they_hold(implementation, form):
    a = usual(form)
    valid = np.arange(20) % 3 == 1
    exact = moe64(**a, valid=valid)
    a["x"] = jnp.where(valid[:, None], a["x"], jnp.nan)
    a["ids"] = jnp.where(valid[:, None], a["ids"], 2**31 - 1)
    out = run(a, implementation, valid)
    assert not out[~valid].any()
    assert_close(out, exact)


def test_one_padding_row_gives_zeros(implementation):
    a = make(1, 5, 2, dtype=jnp.bfloat16)
    a["x"] = jnp.full_like(a["x"], jnp.nan)
    assert not run(a, implementation, np.zeros(1, bool)).any()


def test_experts_elsewhere_change_no_value(implementation):
    """Experts 2 .. 5 of 6 are here; the pairs of the others are other devices'."""
    a = make(20, 6, 3, shared=0)
    here = a | dict(ids=a["ids"] - 2, w13=a["w13"][2:], w2=a["w2"][2:])
    out = pallas_kernels.moe(**here, elsewhere=2, implementation=implementation)
    assert_close(np.asarray(out), moe64(**here))


@pytest.mark.parametrize("rows", [1, 20])
def test_ids_out_of_range_add_nothing(implementation, rows):
    a = rows_of(make(20, 5, 3, shared=0), slice(0, rows))
    a["ids"] = a["ids"].at[0].set(jnp.asarray([-1, 2, 2**31 - 1])).at[-1, 0].set(5)
    assert_close(run(a, implementation), moe64(**a))


def test_nan_stays_in_its_row(implementation):
    a = usual(None)
    clean = run(a, implementation)
    a["x"] = a["x"].at[3, 7].set(jnp.nan)
    out = run(a, implementation)
    others = np.arange(20) != 3
    assert np.isnan(out[3]).all()
    np.testing.assert_array_equal(bits(out[others]), bits(clean[others]))


@pytest.mark.parametrize(("form", "dtype"), [(None, jnp.float32), *((form, jnp.bfloat16) for form in KINDS)])
def test_rows_of_7e4_stay_finite(implementation, dtype, form):
    """More than float16 holds: in the rows, in the SwiGLU product (4e9) and in what comes out."""
    a = usual(form, dtype)
    a["x"] = jnp.where(jnp.arange(96) % 5 == 0, 7e4, a["x"]).astype(dtype)
    exact = moe64(**a)
    assert np.abs(exact).max() > 7e4
    assert_close(run(a, implementation), exact)


@pytest.mark.parametrize("form", KINDS)
def test_a_row_does_not_depend_on_its_neighbours(implementation, form):
    """Bitwise, in one program; the rows beside it, their experts and their number of real ones change."""
    a = usual(form)
    together = run(a, implementation)
    order = np.random.default_rng(0).permutation(20)
    np.testing.assert_array_equal(bits(run(rows_of(a, order), implementation)), bits(together[order]))
    for alone in (0, 13):
        out = run(a, implementation, np.arange(20) == alone)
        np.testing.assert_array_equal(bits(out[alone]), bits(together[alone]))


@pytest.mark.parametrize(
    ("pallas", "form"),
    [("interpret", None), *(pytest.param("triton", form, marks=pytest.mark.gpu) for form in (None, "nvfp4"))],
)
def test_decoding_gives_the_same_for_any_number_of_rows(pallas, form):
    """Up to 128 rows, of few experts too: a row is bitwise the same alone (without blocks) and in any batch."""
    a = make(128, 8, 2, form=form, dtype=jnp.bfloat16, shared=1, hidden=96, width=64)
    together = moe(**a, implementation=pallas)
    for rows in (1, 7, 64):
        few = rows_of(a, slice(0, rows))
        np.testing.assert_array_equal(bits(moe(**few, implementation=pallas)), bits(together[:rows]))


def every_code_and_scale(form: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes [256, 64]: each row all bytes, in every place of a word; scales [256, blocks]: row r has r everywhere."""
    byte = (np.arange(256)[None] + np.arange(256)[:, None]).astype(np.uint8)
    blocks = 512 // BLOCK_OF[form]
    return byte.view(np.uint32), np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (256, blocks)).copy()


def unpack_kernel(codes_ref, scales_ref, out_ref, *, packing: Packing, rows: int):
    row = pl.program_id(0) * rows + jnp.arange(rows)
    load = lambda ref: plt.load(ref.at[row[:, None], jnp.arange(ref.shape[1])[None]])  # noqa: E731
    codes, words = load(codes_ref), jnp.arange(codes_ref.shape[1])
    scales = packing.spread(load(scales_ref), codes.shape[1], out_ref.dtype)
    for t in range(8):
        plt.store(out_ref.at[t, row[:, None], words[None]], packing.value(codes, scales, t))


@pytest.mark.parametrize("pallas", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("form", FORMATS)
def test_unpacking_is_exact_for_every_byte_and_every_scale(pallas, form):
    """Against the number types of ml_dtypes. Subnormals, and the scale 2^-127, may count as 0: a CPU flushes them."""
    codes, scales = every_code_and_scale(form)
    packing = Packing(form, _dispatch.target().capability if pallas == "triton" else 0)
    call = _dispatch.pallas_call(
        functools.partial(unpack_kernel, packing=packing, rows=16),
        op="moe",
        implementation=pallas,
        grid=(16,),
        out_shape=jax.ShapeDtypeStruct((8, *codes.shape), jnp.bfloat16),
    )
    actual = f64(jax.jit(call)(jnp.asarray(codes), jnp.asarray(scales))).transpose(1, 2, 0).reshape(256, -1)
    actual *= packing.factor
    with np.errstate(over="ignore"):
        exact = f64(unpack64(FP4(jnp.asarray(codes), jnp.asarray(scales), None, form)).astype(ml_dtypes.bfloat16))
    flushed = (np.abs(exact) < 2.0**-126) | ((form == "mxfp4") & (scales[:, :1] == 0))
    assert np.array_equal(actual[~flushed], exact[~flushed], equal_nan=True)
    assert np.all((actual[flushed] == exact[flushed]) | (actual[flushed] == 0))


def swap_nibbles(w: FP4) -> FP4:
    codes = ((w.codes & 0x0F0F0F0F) << 4) | ((w.codes >> 4) & 0x0F0F0F0F)
    return FP4(codes, w.scales, w.expert_scale, w.format)


def interleave_scales(w: FP4) -> FP4:
    """Scale rows gate 0, up 0, gate 1, ... beside codes of all gate rows, then all up rows."""
    scales = w.scales.swapaxes(1, 2).reshape(w.scales.shape)
    return FP4(w.codes, scales, w.expert_scale, w.format)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("spoil", [swap_nibbles, interleave_scales])
def test_the_tolerance_rejects_weights_in_another_order(implementation, form, spoil):
    a = usual(form)
    exact = moe64(**a)
    a["w13"] = spoil(a["w13"])
    with pytest.raises(AssertionError, match="of the largest output"):
        assert_close(run(a, implementation), exact)


def test_the_tolerance_rejects_gate_and_up_swapped(implementation):
    a = usual(None)
    exact = moe64(**a)
    a["w13"] = a["w13"][:, ::-1]
    with pytest.raises(AssertionError, match="of the largest output"):
        assert_close(run(a, implementation), exact)


def shapes(rows: int, experts: int, form: str | None, hidden=64, width=128, per_row=2, shared=1) -> dict:
    return jax.eval_shape(lambda: make_zeros(rows, experts, form, hidden, width, per_row, shared))


def make_zeros(rows, experts, form, hidden, width, per_row, shared) -> dict:
    bf16 = lambda *s: jnp.zeros(s, jnp.bfloat16)  # noqa: E731

    def expert(*s):
        if form is None:
            return bf16(*s)
        scale = jnp.zeros(s[0]) if form == "nvfp4" else None
        scales = jnp.zeros((*s[:-1], s[-1] // BLOCK_OF[form]), jnp.uint8)
        return FP4(jnp.zeros((*s[:-1], s[-1] // 8), jnp.uint32), scales, scale, form)

    return dict(
        x=bf16(rows, hidden),
        ids=jnp.zeros((rows, per_row), jnp.int32),
        weights=jnp.zeros((rows, per_row + shared)),
        w13=expert(experts, 2, width, hidden),
        w2=expert(experts, hidden, width),
        shared_w13=bf16(shared, 2, width, hidden),
        shared_w2=bf16(shared, hidden, width),
    )


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("rows", [1, 64, 512])
def test_nothing_as_large_as_rows_times_experts(rows, form):
    """In the compiled reference by the compiler's own account, in the kernels' program by the shapes it names."""
    experts, hidden, width, pairs = 64, 64, 128, 2 * rows
    a = shapes(rows, experts, form)
    reference = jax.jit(functools.partial(pallas_kernels.moe, implementation="xla")).lower(**a).compile()
    room = 2 * (3 * hidden * width * 4) + 3 * (pairs + rows) * hidden * 4
    memory = reference.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < room < experts * 3 * hidden * width * 2
    assert rows == 1 or room < rows * experts * hidden * 2
    text = lower(functools.partial(call_triton, tuple(a)), tuple(a.values()), "sm_90").as_text()
    without_ones = lambda shape: tuple(n for n in shape if n != 1)  # noqa: E731
    given = {without_ones(leaf.shape) for leaf in jax.tree.leaves(a)}
    named = {tuple(map(int, s.split("x")[:-1])) for s in re.findall(r"tensor<((?:\d+x)+)", text)}
    largest = max(np.prod(s) for s in map(without_ones, named) if s not in given)
    assert largest <= (pairs + rows) * width


def call_triton(names: tuple[str, ...], *values):
    return pallas_kernels.moe(**dict(zip(names, values, strict=True)), implementation="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [256])
def test_the_last_of_256_experts_at_true_widths(experts):
    """w2 alone has 2.4 GB of codes, w13 4.8: a 32-bit offset would wrap. Only the first and the last expert count."""
    hidden, width = 6144, 3072
    rng = np.random.default_rng(0)
    a = make(2, 2, 2, shared=0, hidden=hidden, width=width, form="nvfp4", dtype=jnp.bfloat16)
    first_and_last = jnp.asarray([0, experts - 1])
    place = lambda small: jnp.zeros((experts, *small.shape[1:]), small.dtype).at[first_and_last].set(small)  # noqa: E731
    wide = {name: jax.tree.map(place, a[name]) for name in ("w13", "w2")}
    ids = jnp.asarray(np.where(rng.permutation(np.asarray(a["ids"])) == 1, experts - 1, 0), jnp.int32)
    small = a | dict(ids=jnp.where(ids == experts - 1, 1, 0))
    for rows in (slice(0, 1), slice(0, 2)):
        few = {name: small[name][rows] for name in ("x", "ids", "weights")}
        big = few | dict(ids=ids[rows])
        assert_close(moe(**(a | wide | big), implementation="triton"), moe64(**(a | few)))


def test_bad_arguments_are_named():
    a = make(2, 4, 2)
    packed = pack(np.random.default_rng(0), (4, 2, 160, 96), "nvfp4")
    for change, message in [
        (dict(x=a["x"][0]), r"x has shape \[96\]"),
        (dict(ids=a["ids"].astype(jnp.int8)), "ids is int8; expected int32"),
        (dict(ids=a["ids"][:1]), r"ids has shape \[1, 2\]"),
        (dict(weights=a["weights"][:, :3]), r"weights has shape \[2, 3\]; expected \[2, 4\]"),
        (dict(weights=a["weights"].astype(jnp.bfloat16)), "weights is bfloat16; expected float32"),
        (dict(w13=a["w13"][:, :1]), r"w13 has shape \[4, 1, 160, 96\]; expected \[any, 2, any, 96\]"),
        (dict(w2=a["w2"].astype(jnp.bfloat16)), "w2 is bfloat16; expected float32"),
        (dict(w2=a["w2"][:3]), r"w2 has shape \[3, 96, 160\]; expected \[4, 96, 160\]"),
        (dict(shared_w2=None), "shared_w13 and shared_w2"),
        (dict(shared_w13=a["shared_w13"][:1]), r"shared_w2 has shape \[2, 96, 160\]; expected \[1, 96, 160\]"),
        (dict(valid=jnp.ones(2)), "valid is float32; expected bool"),
        (dict(elsewhere=-1), "elsewhere is -1; expected 0 or more"),
        (dict(w13=FP4(packed.codes, packed.scales, None, "nvfp4")), "w13.expert_scale is for 'nvfp4'"),
        (dict(w13=FP4(packed.codes, packed.scales, packed.expert_scale, "fp4")), "w13 has format 'fp4'"),
        (dict(w13=FP4(packed.codes, packed.scales[..., :3], packed.expert_scale, "nvfp4")), r"w13.scales has shape"),
        (dict(w13=FP4(packed.codes.view(jnp.int32), packed.scales, packed.expert_scale, "nvfp4")), "codes is int32"),
        (dict(ids=jnp.zeros((2, 0), jnp.int32), weights=a["weights"][:, :2]), "ids have 0 columns"),
    ]:
        with pytest.raises(ValueError, match=message):
            moe(**(a | change))
    with pytest.raises(ValueError, match="implementation is 'cuda'"):
        moe(**a, implementation="cuda")


def test_no_rows_give_no_rows(implementation):
    a = make(1, 4, 2)
    none = a | {name: a[name][:0] for name in ("x", "ids", "weights")}
    assert moe(**none, implementation=implementation).shape == (0, 96)


def test_what_it_is_timed_against_computes_the_same():
    rng = np.random.default_rng(0)
    shapes = {"x": (9, 64), "weights": (9, 2), "w13": (6, 2, 32, 64), "w2": (6, 64, 32)}
    arrays = {name: jnp.asarray(rng.standard_normal(shape) / 4, jnp.float32) for name, shape in shapes.items()}
    ids = jnp.asarray(rng.integers(0, 6, (9, 2)), jnp.int32)
    found = jax.jit(with_ragged_dot)(ids=ids, **arrays)
    np.testing.assert_allclose(found, pallas_kernels.moe(ids=ids, **arrays, implementation="xla"), atol=1e-5)
