"""One suite per op runs for every implementation; real "triton" only on a GPU."""

import pytest


@pytest.fixture(params=["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def kernel(request: pytest.FixtureRequest) -> str:
    """The kernels alone, for what "xla" does not promise."""
    return request.param
