"""The short version of `make soak`: runs that are killed and started again end as if nothing had happened."""

from __future__ import annotations

import pytest

from tests.faults import kill_and_restart


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("mode", "ranks", "kills"), [("async", 1, 3), ("sync", 2, 2)])
def test_killed_and_restarted_runs_end_as_if_nothing_had_happened(tmp_path, mode, ranks, kills):
    outcome = kill_and_restart(tmp_path, ranks, mode, kills, seed=1)
    assert outcome.problems == [] and outcome.identical
    assert outcome.kills == outcome.restarts == kills and outcome.ends >= 1
    assert outcome.verified > kills, "there was something to verify"
