"""Members that are stopped at any step of a join or leave, and go on later."""

import signal

import pytest
import test_membership_processes as processes
from process_helpers import TIMEOUT, Actor, call_many
from test_membership_processes import JOINING, LEASE, STEPS, die_at, is_settled, join, leave, process_of

from telegrad.testing import eventually

pytestmark = pytest.mark.openssl  # its groups have secrets

four, where = processes.four, processes.where  # fixtures


@pytest.mark.slow
@pytest.mark.parametrize("step", JOINING)
def test_newcomer_is_stopped(four: list[Actor], where: str, step: str) -> None:
    """Others join meanwhile, one of them under its name; it must not stay."""
    first, stopped, second, third = four
    first.do(join, first.name, where)
    stopped.do(die_at, step, signal.SIGSTOP)
    joining = stopped.begin(join, stopped.name, where)
    eventually(stopped.is_stopped)
    assert second.do(join, second.name, where) < LEASE
    third.do(join, stopped.name, where)
    for actor in (first, second, third):
        eventually(is_settled(actor, ["w0", "w1", "w2"]))
    stopped.resume()
    eventually(lambda: joining.is_over and ("out of its group" in stopped.stderr() or not joining.succeeded))
    for actor in (first, second, third):
        for name in ("w0", "w1", "w2"):
            assert actor.do(call_many, name, 2) == 2
        assert actor.do(process_of, "w1") == third.process.pid
    for actor in (second, third, first):
        actor.do(leave)


@pytest.mark.slow
@pytest.mark.parametrize("step", [step for step in STEPS if step not in JOINING])
def test_leaver_is_stopped(four: list[Actor], where: str, step: str) -> None:
    """The group goes on without it, and it ends once it goes on."""
    first, stopped, second, third = four
    for actor in (first, stopped, second):
        actor.do(join, actor.name, where)
    assert stopped.do(call_many, "w0", 2) == 2
    stopped.do(die_at, step, signal.SIGSTOP)
    leaving = stopped.begin(leave)
    eventually(stopped.is_stopped)
    assert third.do(join, third.name, where) < LEASE
    for actor in (first, second, third):
        eventually(is_settled(actor, ["w0", "w2", "w3"]), timeout=TIMEOUT)
        assert actor.do(call_many, "w3", 2) == 2
    stopped.resume()
    eventually(lambda: leaving.is_over, timeout=TIMEOUT)
    assert stopped.leave() == 0
    for actor in (second, third, first):
        actor.do(leave)
