"""On a mesh every device gets its slice, to the bit, and no byte is read that no device here holds."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from inkling_jax.checkpoint import CheckpointError, files, find_quantization, load_parameters, read
from inkling_jax.checkpoint.windows import Cut, merged, runs, shape_of, whole, window_of
from inkling_jax.nn import abstract_parameters, logical_axes

from . import handmade, tiny

MESHES = [(1, 8), (4, 2), (2, 4), (8, 1), (2, 2)]  # expert x tensor
TABLE = {"expert": "expert", "mlp": "tensor", "expert_mlp": "tensor", "vocab": "tensor", "token": "tensor"}
AXES = ("expert", "tensor")
CONFIG = tiny.replace(tiny.WIDE, num_experts=8, dense_size=16, expert_size=256)


def mesh_of(*sizes: int) -> Mesh:
    return jax.make_mesh(sizes, AXES, devices=jax.devices()[: sizes[0] * sizes[1]])


def on(mesh: Mesh, quantization: Any = None, table: dict[str, str] = TABLE, config: Any = CONFIG) -> dict[str, Any]:
    """Abstract parameters with shardings."""
    axes = logical_axes(config, quantization)
    return {
        path: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=NamedSharding(mesh, PartitionSpec(*(table.get(axis or "") for axis in axes[path]))),
        )
        for path, x in abstract_parameters(config, quantization=quantization).items()
    }


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Bytes read of every tensor."""
    found: dict[str, int] = {}
    fill = files._fill

    def counting(piece: memoryview, file: Any, tensor: files.Tensor, window: Any) -> None:
        found[tensor.name] = found.get(tensor.name, 0) + len(piece)
        fill(piece, file, tensor, window)

    monkeypatch.setattr(files, "_fill", counting)
    yield found


def test_windows() -> None:
    array = np.arange(4 * 6 * 10).reshape(4, 6, 10)
    for index in np.ndindex(4, 3, 2):
        at = (slice(0, index[0] + 1), slice(index[1], index[1] + 2), slice(5 * index[2], 5 * index[2] + 5))
        window = window_of(at, array.shape)
        found = [i for start, count in runs(window) for i in range(start, start + count)]
        assert found == array[at].ravel().tolist()
    assert list(runs(whole(array.shape))) == [(0, array.size)]
    assert list(runs((Cut(1, 3, 4), *whole((6, 10))))) == [(60, 120)]
    assert list(runs((Cut(0, 2, 4), Cut(2, 4, 6), Cut(0, 10, 10)))) == [(20, 20), (80, 20)]


def test_windows_that_touch_are_read_together() -> None:
    quarters = [(rows, Cut(i, i + 2, 8)) for rows in (Cut(0, 1, 2), Cut(1, 2, 2)) for i in (0, 2, 6)]
    boxes = merged(reversed(quarters))
    assert [box for box, _ in boxes] == [
        (rows, Cut(*ends, 8)) for rows in (Cut(0, 1, 2), Cut(1, 2, 2)) for ends in ((0, 4), (6, 8))
    ]
    assert sorted(window for _, windows in boxes for window in windows) == sorted(quarters)
    assert all(shape_of(box) in ((1, 4), (1, 2)) for box, _ in boxes)


@pytest.mark.parametrize("layout", ["original", "transformers"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_slice_is_that_of_the_whole(
    tmp_path: Path, layout: str, sizes: tuple[int, int], reads: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PIECE_BYTES", 1000)
    params = tiny.random_parameters(config=CONFIG)
    tensors = tiny.original(params) if layout == "original" else tiny.transformers(params)
    directory = tiny.write(tmp_path / "model", tensors, CONFIG.to_dict("original"), shards=2)
    mesh = mesh_of(*sizes)
    for table in (TABLE, {"hidden": "tensor", "expert": "expert"}):
        reads.clear()
        abstract = on(mesh, table=table)
        loaded = load_parameters(directory, CONFIG, abstract, progress=False)
        assert tiny.same(loaded, params)
        assert all(loaded[path].sharding == spec.sharding for path, spec in abstract.items())
        for shard in loaded["layers.1.mlp.experts.w13"].addressable_shards:
            np.testing.assert_array_equal(shard.data, params["layers.1.mlp.experts.w13"][shard.index])
        assert reads == {name: array.nbytes for name, array in tensors.items()}  # each byte once, replicated or not


class Elsewhere:
    """A sharding of which this process holds the devices of one row of the mesh, as one of several processes does."""

    def __init__(self, sharding: NamedSharding, mine: set[Any]):
        self.sharding, self.mine = sharding, mine

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.sharding.shard_shape(shape)

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[Any, Any]:
        found = self.sharding.addressable_devices_indices_map(shape)
        return {device: index for device, index in found.items() if device in self.mine}


@pytest.mark.parametrize("sizes", MESHES[:3], ids=str)
@pytest.mark.parametrize("format", [None, "modelopt", "quark"])
def test_a_process_reads_what_its_devices_hold(
    tmp_path: Path, sizes: tuple[int, int], format: str | None, reads: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of each tensor against its size over the number of slices that are elsewhere."""
    config = tiny.replace(CONFIG, num_experts=8)
    monkeypatch.setattr(tiny, "WIDE", config)
    made = handmade.make(format) if format else None
    tensors = made.tensors if made else tiny.original(tiny.random_parameters(config=config))
    directory = tiny.write(tmp_path / "model", tensors, made.raw if made else config.to_dict("original"))
    quantization = find_quantization(directory, config)
    mesh = mesh_of(*sizes)
    mine = set(jax.devices()[:2])  # neighbours along tensor, where that has any
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", lambda shape, sharding, arrays, dtype: arrays)
    abstract = {
        path: Fake(spec.shape, spec.dtype, Elsewhere(spec.sharding, mine))
        for path, spec in on(mesh, quantization, config=config).items()
    }
    loaded = load_parameters(directory, config, abstract, progress=False)  # type: ignore[arg-type]
    w2 = loaded["layers.1.mlp.experts.w2"]
    expected = tiny.random_parameters(config=config)["layers.1.mlp.experts.w2"]
    indices = abstract["layers.1.mlp.experts.w2"].sharding.addressable_devices_indices_map(expected.shape)
    for shard, (device, index) in zip(w2, indices.items(), strict=True):
        assert shard.devices() == {device}
        np.testing.assert_array_equal(shard, expected[index])
    along = {"expert": sizes[0], "tensor": sizes[1]}
    for name, array in tensors.items():
        parts = along["expert"] * along["tensor"] // 2 if ".experts." in name else 1
        if "w2_md" in name or "w13_dn" in name or "shared_" in name or "embed.weight" in name:
            parts = max(1, along["tensor"] // 2)
        if name.endswith("scale2"):
            parts = along["expert"]
        if name in reads:
            assert reads[name] == array.nbytes // parts, name
        else:
            assert name.endswith(("input_amax", "original_shape"))


class Fake:
    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, sharding: Elsewhere):
        self.shape, self.dtype, self.sharding, self.size = shape, dtype, sharding, int(np.prod(shape))


@pytest.mark.parametrize("sizes", MESHES[1:3], ids=str)
@pytest.mark.parametrize("spelling", ["modelopt", "compressed", "quark"])
@pytest.mark.parametrize("keep", [True, False])
def test_weights_in_4_bits(
    tmp_path: Path, sizes: tuple[int, int], spelling: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed and unpacked, slices along experts, rows and inputs are those of loading it whole."""
    monkeypatch.setattr(tiny, "WIDE", CONFIG)
    made = handmade.make(spelling)
    directory = tiny.write(tmp_path / "model", made.tensors, made.raw)
    quantization = find_quantization(directory, CONFIG) if keep else None
    abstract = abstract_parameters(CONFIG, quantization=quantization)
    expected = load_parameters(directory, CONFIG, abstract, progress=False)
    loaded = load_parameters(directory, CONFIG, on(mesh_of(*sizes), quantization), progress=False)
    assert tiny.same(loaded, expected)


@pytest.mark.parametrize("sizes", [None, (2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("nbytes", [1, 3000])
def test_parameters_in_parts(
    tmp_path: Path, nbytes: int, sizes: tuple[int, int] | None, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row, and a few rows at a time, are those of loading it at once."""
    monkeypatch.setattr(tiny, "WIDE", CONFIG)
    made = handmade.make("modelopt")
    directory = tiny.write(tmp_path / "model", made.tensors, made.raw)
    quantization = find_quantization(directory, CONFIG) if keep else None
    abstract = abstract_parameters(CONFIG, quantization=quantization)
    expected = load_parameters(directory, CONFIG, abstract, progress=False)
    monkeypatch.setattr(read, "_PART_BYTES", nbytes)
    monkeypatch.setattr(read, "_AHEAD_BYTES", 5 * nbytes)
    given = abstract if sizes is None else on(mesh_of(*sizes), quantization)
    loaded = load_parameters(directory, CONFIG, given, progress=False)
    assert tiny.same(loaded, expected)
    assert all(loaded[path].sharding == spec.sharding for path, spec in given.items() if spec.sharding)


@pytest.mark.parametrize(("rows", "lengths"), [(12, [3] * 4), (13, [2] * 6 + [1]), (3, [3]), (14, [2] * 7)])
def test_rows_are_cut_to_one_length_if_that_is_easy(
    rows: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "_PART_BYTES", 3 * 10 * 2)
    box = (Cut(5, 5 + rows, 99), Cut(0, 10, 20))
    parts = list(read._cut(box, 2))
    assert [part[0].extent for part in parts] == lengths and all(part[1] == box[1] for part in parts)
    assert [part[0].start for part in parts] == [5 + sum(lengths[:i]) for i in range(len(lengths))]


def test_no_more_is_read_ahead_than_memory_is_meant_to_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [3, 1, 2, 9, 1, 1]
    parts = [read._Part("", whole((n,)), np.dtype(np.uint8), [], 0) for n in sizes]
    begun: list[int] = []
    done = threading.Condition()

    def reading(plan: Any, path: str, window: Any, dtype: Any) -> np.ndarray:
        with done:
            begun.append(window[0].size)
            done.notify()
        return np.zeros(shape_of(window), np.uint8)

    monkeypatch.setattr(read, "_read", reading)
    monkeypatch.setattr(read, "_AHEAD_BYTES", 6)
    held = []
    for part, host in read._read_ahead(None, parts):  # type: ignore[arg-type]
        assert host.shape == shape_of(part.window)
        ahead = {3: 3, 1: 3, 2: 3, 9: 4}.get(part.nbytes, 6) if len(held) < 4 else 6
        with done:
            assert done.wait_for(lambda: len(begun) >= ahead, 10)  # noqa: B023
        assert len(begun) == ahead
        held.append(part.nbytes)
    assert held == sizes


def test_inputs_that_cut_a_block_are_unpacked_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.replace(CONFIG, expert_size=64)
    monkeypatch.setattr(tiny, "WIDE", config)
    made = handmade.make("quark")
    directory = tiny.write(tmp_path / "model", made.tensors, made.raw)
    expected = load_parameters(directory, config, abstract_parameters(config), progress=False)
    loaded = load_parameters(directory, config, on(mesh_of(1, 8), config=config), progress=False)  # 8 inputs of 32
    assert tiny.same(loaded, expected)


def test_a_block_is_never_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.replace(CONFIG, expert_size=64)
    monkeypatch.setattr(tiny, "WIDE", config)
    made = handmade.make("quark")
    directory = tiny.write(tmp_path / "model", made.tensors, made.raw)
    quantization = find_quantization(directory, config)
    with pytest.raises(ValueError, match=r"w2.scales: \[8, 32, 2\] cannot be cut evenly"):
        load_parameters(directory, config, on(mesh_of(1, 8), quantization, config=config), progress=False)
    abstract = on(mesh_of(1, 8), quantization, config=config)
    for path in [path for path in abstract if path.endswith("scales")]:
        spec = abstract[path]
        whole = NamedSharding(spec.sharding.mesh, PartitionSpec())
        abstract[path] = jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=whole)
    with pytest.raises(ValueError, match=r"w2.codes: 8 inputs a device are not whole blocks of 32"):
        load_parameters(directory, config, abstract, progress=False)


def test_an_axis_that_does_not_divide(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts.w13: \[5, 2, 6, 12\] cannot be cut evenly"):
        load_parameters(tmp_path, tiny.CONFIG, on(mesh_of(2, 1), config=tiny.CONFIG), progress=False)


def test_a_file_cut_short_after_its_header_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny.write(tmp_path / "model", tiny.original(tiny.random_parameters(config=CONFIG)))
    monkeypatch.setattr(files, "_validate", lambda file: None)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="model.safetensors: cut short within "):
        load_parameters(directory, CONFIG, on(mesh_of(2, 4)), progress=False)
