"""What every test runs under: shapes checked at call time, strict dtype promotion, the CPU unless told otherwise."""

import os

import jax
import pytest
from jaxtyping import install_import_hook

# Every array function of these packages checks its annotations when called. Must run before either is imported.
install_import_hook(["inkling_jax", "pallas_kernels"], "beartype.beartype")


def wants_gpu(config: pytest.Config) -> bool:
    return config.option.markexpr == "gpu"


def pytest_configure(config: pytest.Config) -> None:
    """Tests run on the CPU, whatever the machine has, unless `-m gpu` or JAX_PLATFORMS asks for something else."""
    if "JAX_PLATFORMS" not in os.environ and not wants_gpu(config):
        os.environ["JAX_PLATFORMS"] = "cpu"  # for the processes that tests start
        jax.config.update("jax_platforms", "cpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need an accelerator are left out, not skipped, unless asked for; asked for without one, they fail."""
    if wants_gpu(config):
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True)
def strict_promotion(request: pytest.FixtureRequest):
    """A float32 array that meets a bfloat16 one is a mistake, not a float32 result. Optimisers need the standard rules."""
    if request.node.get_closest_marker("standard_promotion"):
        yield
    else:
        with jax.numpy_dtype_promotion("strict"):
            yield
