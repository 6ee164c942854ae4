"""Orders of the schedules, and the division of batches: pure functions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.nn.pipeline.micro_batches import as_values, batch_size, divide, join, join_gradients, split
from telegrad.nn.pipeline.schedule import (
    SCHEDULES,
    Order,
    Pass,
    PassKind,
    bubble,
    eager_one_forward_one_backward,
    forward_only,
    gpipe,
    makespan,
    one_forward_one_backward,
)

FORWARD, BACKWARD = PassKind.FORWARD, PassKind.BACKWARD
sizes = st.integers(1, 12)
repeatable = settings(deadline=None, derandomize=True)


def texts(orders: list[Order]) -> list[str]:
    return [" ".join(map(str, order)) for order in orders]


def kept(order: Order) -> int:
    """Return the largest number of micro-batches between forward and backward pass."""
    now, most = 0, 0
    for one in order:
        now += 1 if one.kind == FORWARD else -1
        most = max(most, now)
    assert now == 0
    return most


def test_gpipe() -> None:
    assert texts(gpipe(2, 3)) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_one_forward_one_backward() -> None:
    assert texts(one_forward_one_backward(3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_eager_one_forward_one_backward() -> None:
    assert texts(eager_one_forward_one_backward(2, 4)) == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


def test_forward_only() -> None:
    assert texts(forward_only(2, 3)) == ["F0 F1 F2"] * 2


@repeatable
@given(stages=sizes, micro_batches=sizes, name=st.sampled_from(sorted(SCHEDULES)))
def test_every_pass_runs_once_and_none_waits_forever(stages: int, micro_batches: int, name: str) -> None:
    orders = SCHEDULES[name](stages, micro_batches)
    every = {Pass(kind, i) for kind in PassKind for i in range(micro_batches)}
    assert len(orders) == stages
    for order in orders:
        assert len(order) == len(every)
        assert set(order) == every
        assert [one.micro_batch for one in order if one.kind == BACKWARD] == list(range(micro_batches))
    makespan(orders, lambda stage, one: 1.0)  # raises if a pass is never ready


@repeatable
@given(stages=sizes, micro_batches=sizes)
def test_kept_activations(stages: int, micro_batches: int) -> None:
    assert [kept(order) for order in one_forward_one_backward(stages, micro_batches)] == [
        min(stages - stage, micro_batches) for stage in range(stages)
    ]
    assert [kept(order) for order in eager_one_forward_one_backward(stages, micro_batches)] == [
        min(2 * (stages - stage) - 1, micro_batches) for stage in range(stages)
    ]
    assert {kept(order) for order in gpipe(stages, micro_batches)} == {micro_batches}


@repeatable
@given(stages=sizes, micro_batches=sizes, name=st.sampled_from(sorted(SCHEDULES)))
def test_the_bubble_is_that_of_the_theory(stages: int, micro_batches: int, name: str) -> None:
    durations = {FORWARD: 1.0, BACKWARD: 2.0}
    span = makespan(SCHEDULES[name](stages, micro_batches), lambda stage, one: durations[one.kind])
    assert 1 - 3 * micro_batches / span == pytest.approx(bubble(stages, micro_batches))


def test_an_order_that_never_ends() -> None:
    with pytest.raises(ValueError, match="no stage can run its next pass: B0"):
        makespan([[Pass(BACKWARD, 0), Pass(FORWARD, 0)]], lambda stage, one: 1.0)


# ---- micro-batches


@repeatable
@given(batch=st.integers(1, 200), data=st.data())
def test_division(batch: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, batch))
    found = divide(batch, count)
    assert len(found) == count
    assert sum(found) == batch
    assert max(found) - min(found) <= 1


def test_split_and_join() -> None:
    x, scale = torch.arange(10.0).reshape(5, 2), torch.tensor(3.0)
    parts = split((x, "text", scale), [2, 2, 1])
    assert [part[0].tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]  # type: ignore[attr-defined]
    assert all(part[1:] == ("text", scale) for part in parts)
    joined = join(parts)
    assert isinstance(joined, tuple)
    assert torch.equal(joined[0], x)
    assert joined[1] == ["text"] * 3
    assert torch.equal(joined[2], torch.tensor([3.0, 3.0, 3.0]))
    assert split((), [1, 1]) == [(), ()]


def test_gradients_of_micro_batches() -> None:
    one, two = torch.ones(2, 3), torch.full((1, 3), 2.0)
    whole, missing = join_gradients([(one, None), (two, None)], [2, 1])
    assert whole is not None
    assert torch.equal(whole, torch.cat([one, two]))
    assert missing is None
    (partly,) = join_gradients([(None,), (two,)], [2, 1])
    assert partly is not None
    assert torch.equal(partly, torch.cat([torch.zeros(2, 3), two]))
    (shared,) = join_gradients([(torch.tensor(1.0),), (torch.tensor(2.0),)], [2, 1])
    assert shared is not None
    assert shared == torch.tensor(3.0)


def test_values_that_cannot_be_divided_or_sent() -> None:
    with pytest.raises(ValueError, match="differ in their first dimension: 2, 3"):
        batch_size((torch.ones(2), torch.ones(3)))
    with pytest.raises(ValueError, match="pass at least one with a dimension"):
        batch_size((torch.tensor(1.0), "text"))
    with pytest.raises(TypeError, match="its result has a dict inside"):
        as_values((torch.ones(2), {"x": torch.ones(2)}))
    with pytest.raises(TypeError, match="its result has a dict inside"):
        as_values({"x": torch.ones(2)})
