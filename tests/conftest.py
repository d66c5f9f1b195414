"""What every test runs under: shapes checked at call time, strict dtype promotion, the CPU unless told otherwise."""

import gc
import os
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

# Every array function of these checks its annotations when called. Must run before any of them is imported. The borders
# (config, checkpoint, model, command line) are not here: they judge bad input themselves, with errors that are tested.
CHECKED = [f"inkling_jax.{part}" for part in ("nn", "ops", "cache", "decode", "train")]
install_import_hook(CHECKED, "beartype.beartype")


def wants_gpu(config: pytest.Config) -> bool:
    return config.option.markexpr == "gpu"


def pytest_configure(config: pytest.Config) -> None:
    """Tests run on the CPU, whatever the machine has, unless `-m gpu` or JAX_PLATFORMS asks for something else."""
    if "JAX_PLATFORMS" not in os.environ and not wants_gpu(config):
        os.environ["JAX_PLATFORMS"] = "cpu"  # for the processes that tests start
        jax.config.update("jax_platforms", "cpu")
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_num_cpu_devices", 8)  # for meshes; what asks for none runs on the first
        # A third of the compile time, which is most of the time the tests take (jax 0.11.2 and 0.12.0, 2026-11-30).
        os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need an accelerator are left out, not skipped, unless asked for; asked for without one, they fail."""
    if wants_gpu(config):
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps():
    """A program for the CPU takes three memory maps or more, and Linux gives a process 65,530: JAX forgets in time.

    Without this the compiler crashes after some 1500 tests.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def strict_promotion(request: pytest.FixtureRequest):
    """A float32 array that meets a bfloat16 one is a mistake, not a float32 result. Optimisers need looser rules."""
    if request.node.get_closest_marker("standard_promotion"):
        yield
    else:
        with jax.numpy_dtype_promotion("strict"):
            yield
