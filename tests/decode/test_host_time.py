"""That the measurement runs and counts what it should; its times are for people to read."""

from dataclasses import replace

import jax
import pytest

from inkling_jax.decode import host_time
from tests import reference


def test_measurement_times_the_calls_and_counts_the_arrays(monkeypatch, capsys):
    toy = replace(host_time.TOY, num_layers=1, local_layers=(), dense_layers=(0,), mtp_depths=1, mtp_local=())
    monkeypatch.setattr(host_time, "TOY", toy)
    passed, busy, parameters, state = host_time.measure(0, 4)
    assert len(passed) == len(busy) == 4
    assert all(0 < seconds < 10 for seconds in passed)
    assert parameters == len(reference.parameter_shapes(toy))
    assert state == 6 + 2 + 10  # a layer's pools and rings, the page tables, the other fields
    monkeypatch.setattr(host_time, "measure", lambda drafts, calls: ([0.002] * calls, [0.001] * calls, 9, 8))
    monkeypatch.setattr("sys.argv", ["host_time", "--draft-tokens", "1"])
    host_time.main()
    out = capsys.readouterr().out
    assert out.startswith("2.00 ms a call, 1.00 ms of them busy (medians of 50); 9 parameter arrays, 8 state arrays")
    assert jax.__version__ in out


def test_the_toy_is_as_deep_as_the_release():
    assert host_time.TOY.num_layers == 66 and host_time.TOY.mtp_depths == 8
    everywhere = [i for i in range(66) if not host_time.TOY.is_local(i)]
    assert len(everywhere) == 11


def test_more_drafts_than_depths_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["host_time", "--draft-tokens", "9"])
    with pytest.raises(SystemExit):
        host_time.main()
    assert "--draft-tokens" in capsys.readouterr().err
