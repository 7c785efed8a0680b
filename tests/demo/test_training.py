"""The network, its gradient, its data and what a run writes down."""

from __future__ import annotations

import numpy as np
import pytest

from hoplite_mp._cli.demo import training
from hoplite_mp._cli.demo.training import Digits, Momentum, Record, TrainingPlan, TrainingRun

SMALL = TrainingPlan(hidden=7, batch=5, steps=4, workers=2, snapshots=2)


@pytest.fixture(name="digits", scope="module")
def fixture_digits() -> Digits:
    return training.load_digits(1)


def test_parameters_are_at_least_4_mb_in_one_array():
    params = training.start_parameters(TrainingPlan())
    assert params.dtype == np.float32
    assert params.ndim == 1
    assert params.nbytes >= 4 * 2**20


def test_layers_are_views_of_every_element_once():
    flat = np.zeros(training.parameter_count(7), np.float32)
    net = training.layers(flat)
    assert [part.shape for part in net] == [(64, 7), (7,), (7, 10), (10,)]
    for part in net:
        assert np.shares_memory(part, flat)
        part += 1
    assert (flat == 1).all()


def test_gradient_agrees_with_finite_differences():
    rng = np.random.default_rng(3)
    params = training.start_parameters(SMALL).astype(np.float64)
    params += 0.1 * rng.standard_normal(params.shape)
    x = rng.standard_normal((5, 64))
    y = rng.integers(0, 10, 5)
    gradient = np.full_like(params, np.nan)
    training.loss_and_gradient(params, x, y, gradient)

    step, unused = 1e-6, np.empty_like(params)
    for index in range(params.size):
        up, down = params.copy(), params.copy()
        up[index] += step
        down[index] -= step
        slope = (
            training.loss_and_gradient(up, x, y, unused)
            - training.loss_and_gradient(down, x, y, unused)
        ) / (2 * step)
        assert gradient[index] == pytest.approx(slope, rel=1e-4, abs=1e-7)


def test_inputs_of_the_gradient_are_left_alone(digits):
    params = training.start_parameters(SMALL)
    x, y = training.minibatch(SMALL, 0, digits.train_x, digits.train_y)
    for array in (params, x, y):
        array.flags.writeable = False
    training.loss_and_gradient(params, x, y, np.empty_like(params))


def test_a_minibatch_depends_on_its_number_alone(digits):
    first, again, other = (
        training.minibatch(SMALL, number, digits.train_x, digits.train_y) for number in (3, 3, 4)
    )
    assert first[0].shape == (5, 64)
    assert np.array_equal(first[0], again[0])
    assert np.array_equal(first[1], again[1])
    assert not np.array_equal(first[0], other[0])


def test_data_are_split_and_fixed_by_the_seed(digits):
    assert len(digits.train_x) + len(digits.test_x) == 1797
    assert len(digits.train_x) == len(digits.train_y) == 1437
    assert digits.train_x.dtype == np.float32
    assert np.array_equal(digits.test_x, training.load_digits(1).test_x)
    assert not np.array_equal(digits.test_x, training.load_digits(2).test_x)


def test_momentum():
    params = np.array([1.0, 2.0], np.float32)
    optimiser = Momentum(params, rate=0.5, momentum=0.5)
    optimiser.apply(np.array([1.0, 0.0], np.float32))
    assert params.tolist() == [0.5, 2.0]
    optimiser.apply(np.array([0.0, 2.0], np.float32))
    assert params.tolist() == [0.25, 1.0]


def test_one_process_learns(digits):
    plan = TrainingPlan(hidden=200, rate=5e-3)
    params = training.start_parameters(plan)
    optimiser = Momentum(params, plan.rate, plan.momentum)
    gradient = np.empty_like(params)
    for number in range(400):
        batch = training.minibatch(plan, number, digits.train_x, digits.train_y)
        training.loss_and_gradient(params, *batch, gradient)
        optimiser.apply(gradient)
    assert training.accuracy(params, digits.test_x, digits.test_y) > 0.93


def test_plan():
    assert TrainingPlan(workers=1).taken == 1
    assert TrainingPlan(workers=4).taken == 2
    assert TrainingPlan(steps=9).kill_step == 4
    assert TrainingPlan(steps=9, kill=False).kill_step is None
    kept = [
        done for done in range(1, 11) if TrainingPlan(steps=10, snapshots=3).wants_snapshot(done)
    ]
    assert kept == [3, 6, 9, 10]


def test_record_writes_down_every_step(digits):
    params = training.start_parameters(SMALL)
    record = Record(SMALL, digits)
    record.start(params)
    for ages in ([0, 1], [1, 1], [2, 0], [0, 0]):
        record.step(params, [0, 1], ages)
    run = record.finish("a run", 0.5, {"copied": 3})
    assert len(run.step_seconds) == 4
    assert run.seconds == pytest.approx(sum(run.step_seconds))
    assert len(run.times) == len(run.accuracies) == 3
    assert run.times[0] == 0.0
    assert run.times[-1] == run.seconds
    assert run.contributors == [4, 4]
    assert run.staleness == [0, 1, 1, 1, 2, 0, 0, 0]
    assert run.lost_seconds is None


def a_run(step_seconds: list[float], kill_step: int | None) -> TrainingRun:
    return TrainingRun(
        name="a run",
        seconds=sum(step_seconds),
        startup_seconds=0.0,
        step_seconds=step_seconds,
        times=[0.0],
        accuracies=[0.1],
        contributors=[1],
        staleness=[0],
        bytes_moved={},
        kill_step=kill_step,
    )


def test_time_lost_is_the_longest_step_around_the_kill_less_the_median():
    steps = [9.0] + [1.0] * 30
    steps[14] = 4.0
    assert a_run(steps, 12).lost_seconds == 3.0
    assert a_run(steps, 16).lost_seconds == 0.0


def test_roster_asks_until_all_have_reported():
    answers = iter([[5, 5], [5, 4], [3, 4]])
    asked = []

    def ask(pause: float, count: int) -> list[int]:
        asked.append(count)
        return next(answers)

    assert training.roster(ask, 3) == [3, 4, 5]
    assert asked == [6, 6, 6]


def test_roster_gives_up(monkeypatch):
    monkeypatch.setattr(training, "ROSTER_SECONDS", 0.01)
    assert training.roster(lambda pause, count: [7], 2) == [7]
