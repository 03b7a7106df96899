"""What goes wrong in a pipeline: ranks that die, stall, are interrupted or disagree; what no layer
may return; leaks."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyops.mesh import ALONE
from pyops.pipeline import Pipeline, PipelineConfig, Transfer, custom, schedule
from tests.grids import full
from tests.pipeline.reference import batch, mlp, sequential_step
from tests.workers import spawn_ranks

pytestmark = pytest.mark.cpu_only

mse = nn.functional.mse_loss


class Does(nn.Module):
    """Passes x on, and calls `what` at the `at`-th forward."""

    def __init__(self, what: Any, at: int) -> None:
        super().__init__()
        self.what, self.at, self.calls = what, at, 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        found = self.what() if self.calls == self.at else None
        return x if found is None else found


def made(
    group: Any, *, k: int = 2, m: int = 4, name: str = "1f1b", layers: list[nn.Module] | None = None
) -> Pipeline:
    plan = schedule(name, num_stages=k, num_microbatches=m)
    return Pipeline(mlp() if layers is None else layers, schedule=plan, group=group, loss=mse)


def does(pipeline: Pipeline, what: Any, at: int) -> Does:
    """Another layer at the end of this rank's first stage."""
    stage, layer = next(iter(pipeline.stages.values())), Does(what, at)
    stage.layers.append(layer)
    stage.accepted.append(frozenset())
    return layer


def said(call: Any) -> str:
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def right(pipeline: Pipeline, rows: int = 10) -> bool:
    """Whether a step of the pipeline gives the gradients of a sequential run."""
    x, target = batch(rows)
    pipeline.zero_grad()
    pipeline.step(x, target)
    theirs = mlp()
    sequential_step(theirs, pipeline.schedule, pipeline.boundaries, x, target, mse)
    named = dict(nn.Sequential(*theirs).named_parameters())
    return all(
        torch.equal(p.grad, named[n].grad) and bool((p.grad != 0).any())
        for n, p in pipeline.named_parameters()
    )


def stall(rank: int, ranks: int) -> None:
    """Until all others have been told."""
    others = [f"told {other}" for other in range(ranks) if other != rank]
    dist.distributed_c10d._get_default_store().wait(others, timedelta(seconds=40))
    os._exit(7)


def dies(rank: int, group: Any, victim: int, stalls: bool, rows: int) -> tuple[str, str, float]:
    assert right(made(ALONE))  # what a first step imports must not count as a stall
    pipeline = made(group, k=group.size())
    data = torch.randn(rows, 8), torch.randn(rows, 8)
    pipeline.step(*data)
    if rank == victim:
        killed = partial(os.kill, os.getpid(), signal.SIGKILL)
        does(pipeline, partial(stall, rank, group.size()) if stalls else killed, 3)
    begin = time.monotonic()
    first = said(lambda: pipeline.step(*data))
    second = said(lambda: pipeline.step(*data))
    dist.distributed_c10d._get_default_store().set(f"told {rank}", "")
    return first, second, time.monotonic() - begin


@pytest.mark.parametrize(
    ("ranks", "victim", "stalls", "rows"),
    [full(3, 0, False, 10), (2, 1, False, 12000), (2, 0, True, 10)],
)
def test_a_rank_that_dies_or_stalls_within_a_step_is_named(
    ranks: int, victim: int, stalls: bool, rows: int
):
    """Through mailboxes, and with the messages of 12000 rows by the group."""
    outcomes = spawn_ranks(ranks, dies, victim, stalls, rows, timeout=45.0, group_timeout=5.0)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.exitcode == (7 if stalls else -signal.SIGKILL)
            continue
        assert outcome.result is not None, outcome
        first, second, seconds = outcome.result
        assert first.startswith("CommunicationError")
        assert f"because rank {victim} died or stalled" in first, first
        assert "start the ranks anew" in second
        assert seconds < 30


def interrupted(rank: int, group: Any) -> list[str]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pipeline = made(group)
    assert right(pipeline)
    messages = []
    for at in (1, 3, 4):  # in the last forward too, and while others wait
        stage = pipeline.stages[rank]
        layers, accepted = list(stage.layers), list(stage.accepted)
        layer = does(pipeline, lambda: os.kill(os.getpid(), signal.SIGINT), at if rank == 1 else 0)
        messages.append(said(lambda: pipeline.step(*batch(10))))
        assert rank == 0 or layer.calls == at  # nothing is computed after it
        stage.layers, stage.accepted = layers, accepted
        assert stage.num_in_flight == 0
        assert right(pipeline)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return messages


def test_an_interrupt_ends_the_step_on_all_ranks_and_the_next_one_works(world):
    first, second = world(2).run(interrupted)
    assert all(
        message == "RuntimeError: rank 1 of the pipeline was interrupted" for message in first
    ), first
    assert all(message.startswith("KeyboardInterrupt") for message in second), second


def interrupted_at_any_time(rank: int, group: Any) -> int:
    """An interrupt from outside at some time in each step; ranks stay in step with each other."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pipeline = made(group)
    seen = 0
    for i in range(12):
        timer = threading.Timer(0.0007 * i, lambda: os.kill(os.getpid(), signal.SIGINT))

        def start(timer: threading.Timer = timer) -> None:
            timer.start()

        stage = pipeline.stages[rank]
        layers, accepted = list(stage.layers), list(stage.accepted)
        if rank == i % 2:
            does(pipeline, start, 1)
        message = ""
        try:
            message = said(lambda: pipeline.step(*batch(10)))
            if rank == i % 2:  # it may come after the step
                timer.join()
                time.sleep(0.01)
        except KeyboardInterrupt:
            seen += 1
        seen += message.startswith("KeyboardInterrupt")
        assert message == "" or "Interrupt" in message or "was interrupted" in message
        stage.layers, stage.accepted = layers, accepted
    assert right(pipeline)
    return seen


def test_interrupts_at_any_time_leave_the_ranks_in_step(world):
    assert sum(world(2).run(interrupted_at_any_time)) == 12


def test_an_interrupt_in_one_process():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        pipeline = made(None)
        for at in (1, 4):
            last = pipeline.stages[1]
            layers, accepted = list(last.layers), list(last.accepted)
            last.layers.append(Does(lambda: os.kill(os.getpid(), signal.SIGINT), at))
            last.accepted.append(frozenset())
            with pytest.raises(KeyboardInterrupt):
                pipeline.step(*batch(10))
            last.layers, last.accepted = layers, accepted
            assert right(pipeline)
        signal.signal(signal.SIGINT, lambda *_: None)  # a handler of somebody's own stays
        ours = signal.getsignal(signal.SIGINT)
        assert right(pipeline)
        assert signal.getsignal(signal.SIGINT) is ours
    finally:
        signal.signal(signal.SIGINT, before)


def different(rank: int, group: Any) -> list[str]:
    def plan(name: str = "1f1b", m: int = 2, k: int = 2) -> Any:
        return schedule(name, num_stages=k, num_microbatches=m)

    both = [
        {"schedule": plan(m=2 + rank)},
        {"schedule": plan("gpipe" if rank else "1f1b")},
        {"schedule": plan(), "config": PipelineConfig(boundaries=[0, 3 + rank, 8])},
        {"schedule": plan(), "config": PipelineConfig(reduction="sum" if rank else "mean")},
        {"schedule": plan(k=3)},
        {"schedule": plan(), "config": PipelineConfig(boundaries=[0, 8] if rank else None)},
        {
            "schedule": plan(),
            "config": PipelineConfig(tied=[("0.0.weight", "9.x")] if rank else []),
        },
    ]
    messages = [
        said(lambda given=given: Pipeline(mlp(), group=group, loss=mse, **given)) for given in both
    ]
    assert right(made(group))
    return messages


def test_ranks_that_make_different_pipelines_are_told_so(world):
    for messages in world(2).run(different):
        assert all(message.startswith("ValueError") for message in messages), messages
        assert all("rank 1 made a pipeline of another" in message for message in messages[:4]), (
            messages
        )
        assert "the group has 2" in messages[4]
        assert "boundaries is [0, 8]" in messages[5]
        assert "9.x" in messages[6]


def odd_values(rank: int, group: Any) -> list[str]:
    pipeline = made(group)
    values = [
        object(),
        torch.eye(8).to_sparse(),
        {1: torch.ones(2)},
        lambda: None,
        torch.ones(3, 5),
    ]
    messages = []
    for value in values:
        stage = pipeline.stages[rank]
        layers, accepted = list(stage.layers), list(stage.accepted)
        if rank == 0:
            does(pipeline, lambda value=value: value, 2)
        messages.append(said(lambda: pipeline.step(*batch(10))))
        stage.layers, stage.accepted = layers, accepted
    few = said(lambda: pipeline.step(*batch(3)))
    rows = said(lambda: pipeline.step(batch(10 - rank)[0], batch(10 - rank)[1]))
    assert right(pipeline)
    return [*messages, few, rows]


def test_what_cannot_be_sent_and_shapes_that_do_not_fit_are_named_on_all_ranks(world):
    first, second = world(2).run(odd_values)
    for i, kind in enumerate(("object", "sparse", "dict", "function")):
        for messages in (first, second):
            assert messages[i].startswith("TypeError"), messages[i]
            assert "can't be sent" in messages[i]
            assert kind in messages[i]
    assert "1F1" in first[4]
    assert "mat1 and mat2 shapes" in second[4]
    assert "3 rows can't be cut into 4 micro-batches" in first[5]
    assert "3 rows can't be cut into 4 micro-batches" in second[5]
    for messages in (first, second):  # 10 rows on the first rank, 9 targets on the last one
        assert messages[6].startswith("RuntimeError"), messages[6]
        assert "size" in messages[6]


def test_orders_that_deadlock_are_refused_with_the_cycle():
    with pytest.raises(
        ValueError,
        match=r"deadlocks.*0B0 <- gradient 1->0 of 0 <- 1B0 <- 1F1 <- activation 0->1 of 1 <- 0F1",
    ):
        custom(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])


def disturbed(rank: int, group: Any, seeds: int) -> None:
    """Random delays in every layer: actions and transfers of each step are in an order that the
    schedule allows."""
    for name, m in (("1f1b", 4), ("zbv", 3)):
        generator = torch.Generator()

        def wait(generator: torch.Generator = generator) -> None:
            time.sleep(float(torch.rand((), generator=generator)) * 0.002)

        pipeline = made(group, name=name, m=m)
        for stage in pipeline.stages.values():
            stage.layers.append(layer := Does(None, 0))
            stage.accepted.append(frozenset())
            layer.forward = lambda x, wait=wait: (wait(), x)[1]  # type: ignore[method-assign]
        for seed in range(seeds):
            generator.manual_seed(100 * seed + rank)
            with pipeline.recording() as timelines:
                assert right(pipeline)
            times = {**timelines[0].actions, **timelines[0].transfers}
            assert len(times) == len(pipeline.schedule.order)
            for node, needs in pipeline.schedule.order:
                for need in needs:
                    # Of two transfers on a channel the second may begin before the first has
                    # arrived.
                    both = isinstance(node, Transfer) and isinstance(need, Transfer)
                    assert times[need][0 if both else 1] <= times[node][0] + 1e-6, (node, need)


def test_random_delays_leave_every_step_a_linear_extension(world):
    world(2).run(disturbed, 15)


def counted_graphs() -> int:
    gc.collect()
    return sum(
        1
        for each in gc.get_objects()
        if isinstance(each, torch.Tensor) and each.grad_fn is not None
    )


def keeps_nothing(rank: int, group: Any) -> None:
    before = counted_graphs()  # of earlier tests in this process
    pipeline = made(group, m=3)
    for _ in range(3):
        pipeline.step(*batch(10))
    tensors = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
    assert counted_graphs() <= before
    for i in range(50):
        stage = pipeline.stages[rank]
        layers, accepted = list(stage.layers), list(stage.accepted)
        if i % 5 == 0 and rank == (i // 5) % 2:
            does(pipeline, lambda: 1 / 0, 2)
        assert bool(said(lambda: pipeline.step(*batch(10)))) == (i % 5 == 0)
        stage.layers, stage.accepted = layers, accepted
        assert stage.num_in_flight == 0
    assert counted_graphs() <= before
    assert sum(isinstance(each, torch.Tensor) for each in gc.get_objects()) <= tensors + 2
    assert right(pipeline)


def test_steps_that_end_well_or_not_leave_nothing_behind(world):
    world(2).run(keeps_nothing)


def made_and_dropped(rank: int, group: Any) -> None:
    """Pipelines that were made, used or not, and dropped; with steps that failed, and one that was
    never started."""
    dropped = []
    for i in range(20):
        pipeline = made(group, name=("1f1b", "zbv", "gpipe")[i % 3], m=1 + i % 4)
        if i % 4:
            assert right(pipeline)
        if i % 4 == 2:
            said(lambda pipeline=pipeline: pipeline.step(batch(1)[0][:0], batch(1)[1]))
        dropped.append(weakref.ref(pipeline))
        del pipeline
    gc.collect()
    assert not any(each() for each in dropped)
    torch.manual_seed(0)
    pipeline = made(group, m=4)
    big = 300
    assert right(pipeline, rows=big)
    assert right(pipeline, rows=big)


def test_pipelines_come_and_go(world):
    world(2).run(made_and_dropped)


class Number(nn.Module):
    def forward(self, x: Any) -> Any:
        return 1


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, factor: Any) -> Any:
        return self.weight * factor


def number(rank: int, group: Any) -> None:
    plan = schedule("1f1b", num_stages=2, num_microbatches=2)
    pipeline = Pipeline(
        [Number(), Scale()],
        schedule=plan,
        group=group,
        loss=lambda y, t: (y * 2).sum() + 0 * t.sum(),
    )
    assert float(pipeline.step(torch.ones(2, 1), torch.ones(2, 1))) == 6.0


def test_any_number_may_go_from_stage_to_stage(world):
    """None is taken for the mark of a rank that failed."""
    world(2).run(number)
    number(0, None)
