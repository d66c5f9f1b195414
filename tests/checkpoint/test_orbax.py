"""Orbax: what is saved on one mesh loads on any other, to the bit; what is not whole is said to be so."""

import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tqdm import tqdm

import inkling_jax
from inkling_jax.checkpoint import (
    CheckpointError,
    convert,
    find_quantization,
    inspect,
    load_parameters,
    quantize,
    save_checkpoint,
    save_in_background,
)
from inkling_jax.checkpoint.files import watch_files
from inkling_jax.config import InklingConfig
from inkling_jax.nn import abstract_parameters
from inkling_jax.quantization import Quantization
from inkling_jax.sharding import make_mesh, shardings

from . import handmade, tiny

CONFIG = tiny.replace(
    tiny.WIDE,
    num_experts=8,
    dense_size=64,
    expert_size=256,
    num_heads=8,
    num_kv_heads=4,
    local_num_heads=8,
    local_num_kv_heads=2,
)
PARAMS = tiny.random_parameters(config=CONFIG)
MESHES: list[Any] = [None, {"tensor": 8}, {"expert": 8}, {"tensor": 2, "expert": 4}, {"data": 2, "tensor": 2}]


def on(sizes: Any, quantization: Quantization | None = None, dtype: str = "bfloat16") -> dict[str, Any]:
    """Abstract parameters on a mesh."""
    abstract = abstract_parameters(CONFIG, dtype, quantization)
    if sizes is None:
        return abstract
    where = shardings(CONFIG, make_mesh(sizes), quantization)
    return {path: spec.update(sharding=where[path]) for path, spec in abstract.items()}


def load(directory: Path, sizes: Any = None, quantization: Quantization | None = None, dtype: str = "bfloat16") -> Any:
    abstract = on(sizes, quantization, dtype)
    loaded = load_parameters(directory, CONFIG, abstract, progress=False)
    assert sizes is None or all(loaded[path].sharding == spec.sharding for path, spec in abstract.items())
    return loaded


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("orbax") / "original", tiny.original(PARAMS), CONFIG.to_dict("original"))


@pytest.fixture(scope="module")
def saved(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved from a mesh of 2 x 4."""
    directory = tmp_path_factory.mktemp("orbax") / "saved"
    (original / "tokenizer_config.json").write_text("{}")
    params = load(original, {"tensor": 2, "expert": 4})
    save_checkpoint(directory, CONFIG, params, layout="orbax", tokenizer_dir=original)
    (original / "tokenizer_config.json").unlink()
    return directory


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_onto_another_mesh(saved: Path, sizes: Any) -> None:
    assert tiny.same(load(saved, sizes), PARAMS)


@pytest.mark.parametrize("sizes", MESHES[:3], ids=str)
def test_from_another_mesh_and_through_safetensors(original: Path, tmp_path: Path, sizes: Any) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    save_in_background(there, CONFIG, load(original, sizes)).result()
    params = load(there, {"tensor": 4})
    assert tiny.same(params, PARAMS)
    save_checkpoint(back, CONFIG, params, layout="transformers")
    assert tiny.same(tiny.read(back), tiny.transformers(PARAMS, text_only=True))
    assert tiny.same(load(back, {"expert": 2}), PARAMS)


@pytest.mark.parametrize("sizes", [None, {"tensor": 2}], ids=str)
def test_arrays_larger_than_what_is_under_way(
    original: Path, tmp_path: Path, sizes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inkling_jax.checkpoint.orbax._GROUP_BYTES", 2000)
    monkeypatch.setattr("inkling_jax.checkpoint.orbax._CHUNK_BYTES", 1000)
    save_checkpoint(tmp_path / "saved", CONFIG, load(original, sizes), layout="orbax")
    assert tiny.same(load(tmp_path / "saved", sizes), PARAMS)


def test_what_lies_beside_the_parameters(saved: Path) -> None:
    assert InklingConfig.from_path(saved) == CONFIG
    assert sorted(path.name for path in saved.iterdir()) == [
        "config.json",
        "orbax.json",
        "params",
        "tokenizer_config.json",
    ]
    assert sorted(path.name for path in saved.parent.iterdir()) == ["saved"]


def test_another_dtype(saved: Path) -> None:
    expected = {path: x.astype(np.float32) for path, x in PARAMS.items()}
    for sizes in (None, {"tensor": 2}):
        assert tiny.same(load(saved, sizes, dtype="float32"), expected)


@pytest.mark.parametrize("spelling", ["modelopt", "quark"])
def test_weights_in_4_bits(original: Path, tmp_path: Path, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "WIDE", CONFIG)
    made = handmade.make(spelling)
    packed = tiny.write(tmp_path / "packed", made.tensors, made.raw)
    there, again, back = (tmp_path / name for name in ("there", "again", "back"))
    quantization = find_quantization(packed, CONFIG)
    expected, unpacked = load(packed, None, quantization), load(packed)
    convert(packed, there, "orbax", progress=False)
    assert find_quantization(there, CONFIG) == quantization
    params = load(there, {"tensor": 2, "expert": 4}, quantization)
    assert tiny.same(params, expected)
    for sizes in (None, {"tensor": 8}):
        assert tiny.same(load(there, sizes), unpacked)
    save_checkpoint(again, CONFIG, params, layout="orbax")
    assert tiny.same(load(again, None, quantization), expected)
    convert(again, back, "original", progress=False)
    assert find_quantization(back, CONFIG) == quantization
    assert tiny.same(load(back, {"expert": 2}, quantization), expected)
    with pytest.raises(CheckpointError, match="4 bits can be converted to the original layout only"):
        convert(again, tmp_path / "other", "transformers", progress=False)
    with pytest.raises(CheckpointError, match="is asked for, and no quantisation is there"):
        load(original, None, quantization)
    found = inspect(there)
    assert found.fits and found.quantization == quantization and found.layout == "orbax"
    assert (found.parts, found.saved) == (inspect(packed).parts, inspect(packed).saved)


@pytest.mark.parametrize("layout", ["original", "transformers"])
def test_conversion_there_and_back(tmp_path: Path, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Towers, their config and small files come along."""
    monkeypatch.setattr("inkling_jax.checkpoint.orbax._GROUP_BYTES", 2000)  # more than one group, a group too large
    params = tiny.random_parameters()
    kind = layout == "transformers"
    tensors = (tiny.transformers(params) if kind else tiny.original(params)) | tiny.towers()[kind]
    src = tiny.write(tmp_path / "src", tensors, tiny.nested_config(layout), shards=3, mtp_file=True)
    (src / "LICENSE").write_text("free")
    there, back = tmp_path / "there", tmp_path / "back"
    convert(src, there, "orbax", progress=False)
    assert (there / "LICENSE").read_text() == "free" and not list(there.glob("*.index.json"))
    assert tiny.same(load_parameters(there, tiny.CONFIG, tiny.ABSTRACT, progress=False), params)
    parts = inspect(there).parts
    assert parts == inspect(src).parts and inspect(there).fits
    convert(there, back, layout, progress=False)
    assert tiny.same(tiny.read(back), tensors)
    assert (back / "LICENSE").exists() and not (back / "orbax.json").exists()
    assert json.loads((back / "config.json").read_text())["audio_config"] == {"n_mel_bins": 80}
    with pytest.raises(CheckpointError, match="is in Orbax's layout already"):
        convert(there, tmp_path / "more", "orbax", progress=False)
    with pytest.raises(CheckpointError, match="is in Orbax's layout: convert it to another first"):
        quantize(there, tmp_path / "more", "nvfp4", progress=False)


def test_the_model_itself(tmp_path: Path) -> None:
    model = inkling_jax.Inkling(CONFIG, {path: jax.numpy.asarray(x) for path, x in PARAMS.items()})
    inkling_jax.save_async(model, tmp_path / "one").result()
    inkling_jax.save(model, tmp_path / "two", layout="orbax")
    for directory in (tmp_path / "one", tmp_path / "two"):
        assert tiny.same(load(directory), PARAMS)


def test_a_loaded_mesh_runs(saved: Path) -> None:
    """The same logits on eight devices as on one; what is asked of the machine and the model must be there."""
    one, eight = (
        inkling_jax.load(saved, "float32", progress=False, mesh=sizes) for sizes in (None, {"tensor": 2, "expert": 4})
    )
    assert {len(array.devices()) for array in eight.params.values()} == {8}
    np.testing.assert_allclose(*(np.asarray(model.logits([1, 2, 3])) for model in (one, eight)), atol=1e-4)
    with pytest.raises(ValueError, match="mesh: tensor=16 takes 16 devices and this machine has 8"):
        inkling_jax.load(saved, mesh={"tensor": 16})
    with pytest.raises(ValueError, match="num_experts = 8 does not divide by 3"):
        inkling_jax.load(saved, mesh={"expert": 3})


def test_a_bar_follows_what_is_written(tmp_path: Path) -> None:
    """Half of it lies there for a while, more than announced at the end, and the bar says neither more nor less."""
    bar = tqdm(total=1000, file=io.StringIO())

    def write() -> None:
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep" / "part").write_bytes(bytes(500))
        while bar.n < 500:
            time.sleep(0.001)
        assert bar.n == 500
        (tmp_path / "rest").write_bytes(bytes(700))

    watch_files(tmp_path, bar, write, every=0.001)
    assert bar.n == 1000
    quiet = tqdm(total=1, disable=True)
    watch_files(tmp_path, quiet, lambda: None)
    assert quiet.n == 0


def test_what_would_be_overwritten(saved: Path) -> None:
    for save in (save_in_background, lambda *args: save_checkpoint(*args, layout="orbax")):
        with pytest.raises(CheckpointError, match="exists and is not an empty directory"):
            save(saved, CONFIG, load(saved))


def _lose_the_list(directory: Path) -> None:
    (directory / "orbax.json").unlink()


def _lose_a_file(directory: Path) -> None:
    max((path for path in (directory / "params").rglob("*") if path.is_file()), key=os.path.getsize).unlink()


def _cut_a_file(directory: Path) -> None:
    file = max((path for path in (directory / "params").rglob("*") if path.is_file()), key=os.path.getsize)
    file.write_bytes(file.read_bytes()[:-1])


def _still_be_written(directory: Path) -> None:
    (directory / "orbax.json").unlink()
    (directory / "params").rename(directory / "params.partial_save")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_lose_the_list, "half-written: orbax.json, which is written last, is missing"),
        (_still_be_written, "half-written: orbax.json, which is written last, is missing"),
        (_lose_a_file, r"half-written, or damaged since:\n  params/.*: missing"),
        (_cut_a_file, r"half-written, or damaged since:\n  params/.*: \d+ bytes of \d+"),
    ],
)
def test_half_of_it(saved: Path, tmp_path: Path, spoil: Any, words: str) -> None:
    directory = shutil.copytree(saved, tmp_path / "copy")
    spoil(directory)
    for use in (load, inspect, lambda path: find_quantization(path, CONFIG)):
        with pytest.raises(CheckpointError, match=words):
            use(directory)
    with pytest.raises(CheckpointError, match=words):
        convert(directory, tmp_path / "out", "original", progress=False)


def test_damaged_metadata(saved: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(saved, tmp_path / "copy")
    file = directory / "params" / "state" / "_METADATA"
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(CheckpointError, match="params: not readable as an Orbax checkpoint"):
        load(directory)


def test_another_model(saved: Path, tmp_path: Path) -> None:
    other = tiny.replace(CONFIG, num_layers=2, local_layers=(0,), hidden_size=64)
    with pytest.raises(CheckpointError) as caught:
        load_parameters(saved, other, abstract_parameters(other), progress=False)
    assert "unexpected:\n    layers.2." in str(caught.value)
    assert "norm.weight: [32], expected [64]" in str(caught.value)


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 2)
import orbax.checkpoint.experimental.v1  # before the forks, which must come before JAX starts its threads
from inkling_jax.checkpoint import save_checkpoint
from inkling_jax.nn import abstract_parameters
from tests.checkpoint import tiny

def save_for_ever(parent, begun):
    params = tiny.random_parameters(1)
    sharding = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.sharding.PartitionSpec())
    params = {path: jax.device_put(x, sharding) for path, x in params.items()}
    os.write(begun, b"x")
    for n in range(1000):
        save_checkpoint(parent / f"step-{n}", tiny.CONFIG, params, layout="orbax")

rng = random.Random(0)
for attempt in range(20):
    parent = Path(sys.argv[1]) / str(attempt)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        save_for_ever(parent, writer)
        os._exit(1)
    os.read(reader, 1)
    time.sleep(rng.uniform(0, 0.7))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, status
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_save_that_is_killed(tmp_path: Path) -> None:
    """Twenty times, at any moment of a save: what was there before stays, and what is new is whole or not there."""

    def read(directory: Path) -> dict[str, jax.Array]:
        return load_parameters(directory, tiny.CONFIG, tiny.ABSTRACT, progress=False)

    older, newer = tiny.random_parameters(0), tiny.random_parameters(1)
    save_checkpoint(
        tmp_path / "older", tiny.CONFIG, {p: jax.numpy.asarray(x) for p, x in older.items()}, layout="orbax"
    )
    for attempt in range(20):
        shutil.copytree(tmp_path / "older", tmp_path / str(attempt) / "older")
    root = Path(__file__).parents[2]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", KILLS, str(tmp_path)], check=True, env=env | {"JAX_PLATFORMS": "cpu"})
    interrupted = 0
    for attempt in range(20):
        assert tiny.same(read(tmp_path / str(attempt) / "older"), older)
        for directory in (tmp_path / str(attempt)).iterdir():
            if directory.name.startswith("step-"):
                assert tiny.same(read(directory), newer)
            elif directory.name.startswith("."):
                try:
                    assert tiny.same(read(directory), newer)  # all of it was there, but for its name
                except CheckpointError:
                    interrupted += 1
    assert interrupted > 5
