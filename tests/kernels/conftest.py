"""One suite per op runs for every implementation; real "triton" only with `pytest -m gpu`, on a GPU."""

import pytest

from pallas_kernels._dispatch import DEPRECATION


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA or ROCm GPU; runs only with -m gpu")
    # Raised when jax lowers a kernel, so outside of the call that the package could guard.
    config.addinivalue_line("filterwarnings", f"ignore:{DEPRECATION}:DeprecationWarning")


def pytest_collection_modifyitems(config, items):
    if "gpu" in config.getoption("-m"):
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=gpu)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(params=["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def implementation(request) -> str:
    return request.param
