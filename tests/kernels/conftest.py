"""One suite per op runs for every implementation; real "triton" only on a GPU."""

from collections.abc import Callable, Iterator

import pytest

from pallas_kernels import _dispatch


@pytest.fixture(params=["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def kernel(request: pytest.FixtureRequest) -> str:
    """The kernels alone, for what "xla" does not promise."""
    return request.param


@pytest.fixture
def trace_anew() -> Iterator[Callable[[], None]]:
    """Forgets all traced kernels: for a test to call when it has changed what they call, and done again behind it."""
    yield _dispatch.shared.cache_clear
    _dispatch.shared.cache_clear()
