"""FlyDSL kernels on the simulator: right results, and no fault found in them in any wave order."""

import itertools

import pytest
from sim_kernels import NAMES, problem

ORDERS = [
    *itertools.product(("round_robin", "reversed"), ("barrier", "wait", 5)),
    *((seed, "wait") for seed in range(20)),
]
SEVERAL_WAVES = [name for name in NAMES if problem(name).block[0] > 64]


@pytest.mark.parametrize("name", NAMES)
def test_results(name):
    launch = problem(name)
    result = launch.run()
    assert [str(r) for r in result.reports] == []
    launch.check(launch.outputs)


@pytest.mark.parametrize("name", SEVERAL_WAVES)
def test_no_false_alarm_in_any_order(name):
    for order, switch in ORDERS:
        launch = problem(name)
        result = launch.run(order=order, switch=switch)
        assert [str(r) for r in result.reports] == [], (order, switch)
        launch.check(launch.outputs)
