"""One suite per op runs for every implementation; real "triton" only on a GPU."""

import pytest


@pytest.fixture(params=["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param
