"""The thread of the collectives: order, errors, and a stop after which it can be asked again."""

from __future__ import annotations

import time
import weakref

import pytest
import torch

from pyops.comm.collectives.work import Worker

pytestmark = pytest.mark.cpu_only


def test_works_run_in_order_and_an_error_belongs_to_its_work_alone():
    worker, order = Worker("test"), []

    def note(number: int) -> torch.Tensor:
        order.append(number)
        if number == 1:
            raise ValueError("the second")
        return torch.tensor(number)

    works = [worker.submit(lambda n=n: note(n)) for n in range(4)]
    assert [int(works[n].wait()) for n in (0, 2, 3)] == [0, 2, 3]
    with pytest.raises(ValueError, match="the second"):
        works[1].wait()
    assert order == [0, 1, 2, 3]
    assert not worker.busy
    worker.stop()


def test_a_result_goes_with_its_caller():
    """Though no later work comes: the thread that waits for one holds nothing."""
    worker = Worker("test")
    result = worker.submit(lambda: torch.ones(3)).wait()
    alive = weakref.ref(result)
    del result
    deadline = time.monotonic() + 10
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.01)  # the thread is about to wait
    assert alive() is None
    assert not worker.busy
    worker.stop()


@pytest.mark.parametrize("used_before", [False, True])
def test_a_stopped_worker_takes_works_again(used_before: bool):
    worker = Worker("test")
    if used_before:
        worker.submit(lambda: torch.zeros(1)).wait()
    worker.stop()
    work = worker.submit(lambda: torch.ones(1))
    assert work.done.wait(20), "the work was never run"
    assert work.wait() == 1
    worker.stop()
