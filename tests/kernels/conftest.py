"""One suite per op runs for every implementation; real "triton" only on a GPU."""

import pytest

from pallas_kernels._dispatch import DEPRECATION


def pytest_configure(config: pytest.Config) -> None:
    # Raised when jax lowers a kernel, so outside of the call that the package could guard.
    config.addinivalue_line("filterwarnings", f"ignore:{DEPRECATION}:DeprecationWarning")


@pytest.fixture(params=["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param
