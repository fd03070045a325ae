"""Checkpoint interval against failures: the simulation meets Daly's expectation, and its optimum Young's and Daly's."""

from __future__ import annotations

import pytest

from card_megatron.planning.goodput import Failures, best_interval, expected_goodput, simulated_goodput

CASES = [
    Failures(mtbf=6 * 3600, restart=600, save=10),
    Failures(mtbf=3600, restart=300, save=60),
    Failures(mtbf=100 * 3600, restart=900, save=30),
]


@pytest.mark.parametrize("failures", CASES)
@pytest.mark.parametrize("minutes", [5, 30, 120])
def test_the_simulation_meets_the_exact_expectation(failures, minutes):
    simulated = simulated_goodput(60.0 * minutes, failures, saves=40_000)
    assert simulated == pytest.approx(expected_goodput(60.0 * minutes, failures), rel=0.02)


@pytest.mark.parametrize("failures", CASES)
def test_no_other_interval_is_much_better_than_young_and_dalys(failures):
    best = best_interval(failures)
    tried = [best * factor / 20 for factor in range(2, 100)]
    assert expected_goodput(best, failures) > max(expected_goodput(it, failures) for it in tried) - 2e-3
    assert expected_goodput(best, failures) > expected_goodput(best / 4, failures)
    assert expected_goodput(best, failures) > expected_goodput(best * 4, failures)


def test_a_machine_that_never_fails_pays_for_saves_alone():
    assert simulated_goodput(90.0, Failures(mtbf=1e15, restart=1, save=10)) == pytest.approx(0.9)


def test_a_seed_gives_one_run():
    case = CASES[0]
    assert simulated_goodput(600, case, seed=1) == simulated_goodput(600, case, seed=1)
    assert simulated_goodput(600, case, seed=1) != simulated_goodput(600, case, seed=2)


def test_twice_the_gpus_fail_twice_as_often():
    assert Failures.of(1024, restart=1, save=1).mtbf * 2 == Failures.of(512, restart=1, save=1).mtbf
