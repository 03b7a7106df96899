"""The groups of a layout: who is in which, and that nothing is left of them when they are
closed."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyops.checkpoint import load, save
from pyops.comm import all_reduce
from pyops.comm.collectives import probe
from pyops.elastic import Bound, CacheOptions, Layout
from pyops.elastic.layout.process_groups import LayoutGroups, make_control_group
from pyops.mesh import ALONE
from pyops.optim import AdamW
from pyops.pipeline import Pipeline, PipelineConfig, schedule
from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.elastic import networks
from tests.elastic.flat import make_elastic
from tests.grids import full

pytestmark = pytest.mark.cpu_only


def members_body(rank, group, layouts):
    """Of each layout what the groups say and sum; and that closing twice is no harm."""
    message = make_control_group()
    found = []
    for layout in layouts:
        active = LayoutGroups(layout, control_group=message)
        for each in (active.pp_group, active.dp_group):
            found.append(None if each is None else dist.get_process_group_ranks(each))
            if each is not None:
                found.append(int(all_reduce(torch.tensor([10**rank]), group=each)))
        active.close()
        active.close()
        found.append((active.pp_group, active.dp_group))
    dist.destroy_process_group(message)
    return found


def neighbors_body(rank, group, layout):
    message = make_control_group()
    active = LayoutGroups(layout, control_group=message)
    found = dist.get_process_group_ranks(active.cp_group)
    active.close()
    dist.destroy_process_group(message)
    return found, active.cp_group


def test_neighbors_that_share_tokens_have_a_group(world):
    layout = Layout(4, 2, 1, (0, 1, 3), context=2)
    found = world(4).run(neighbors_body, layout)
    assert found == [([0, 1], None)] * 2 + [([2, 3], None)] * 2


def test_members(world):
    layouts = [
        Layout(4, 2, 2, (0, 1, 3)),
        Layout(4, 1, 3, (0, 3)),
        Layout(4, 3, 1, (0, 1, 2, 3)),
        Layout(4, 1, 1, (0, 3)),
    ]
    found = world(4).run(members_body, layouts)
    none = (None, None)
    assert found[0] == [
        [0, 1],
        11,
        [0, 2],
        101,
        none,
        None,
        [0, 1, 2],
        111,
        none,
        [0, 1, 2],
        111,
        None,
        none,
        None,
        None,
        none,
    ]
    assert found[1] == [
        [0, 1],
        11,
        [1, 3],
        1010,
        none,
        None,
        [0, 1, 2],
        111,
        none,
        [0, 1, 2],
        111,
        None,
        none,
        None,
        None,
        none,
    ]
    assert found[3] == [
        [2, 3],
        1100,
        [1, 3],
        1010,
        none,
        None,
        None,
        none,
        None,
        None,
        none,
        None,
        None,
        none,
    ]


def refused_body(rank, group, layouts):
    with pytest.raises(ValueError, match="rank") as caught:
        LayoutGroups(layouts[rank], control_group=group)
    return str(caught.value)


def test_ranks_that_differ_and_layouts_of_other_ranks(world):
    other = Layout(2, 2, 1, (0, 1, 4))
    first, second = world(2).run(refused_body, [Layout(2, 2, 1, (0, 2, 4)), other])
    assert first == second
    assert f"rank 0 has {Layout(2, 2, 1, (0, 2, 4))}, but rank 1 {other}" in first
    (message, _) = world(2).run(refused_body, [Layout(3, 2, 1, (0, 2, 4))] * 2)
    assert "the layout is of 3 ranks, but the control group has 2" in message


def test_one_process_alone():
    active = LayoutGroups(Layout(1, 1, 1, (0, 2)), control_group=make_control_group())
    assert (active.pp_group, active.dp_group) == (None, None)
    active.close()


# --------------------------------------------------------------------------------------------------
# nothing is left


def elastic_body(rank, group):
    """The message group of a run that was closed, while the run itself is still known; None: it is
    gone."""
    elastic = make_elastic(
        networks.layers(4),
        optimizer=networks.optimizer,
        loss=networks.loss,
        samples=networks.SAMPLES,
        batch=8,
        seed=5,
        stages=2,
        policy=Bound(1 / 2),
    )
    for share in elastic.shares():
        elastic.step(*networks.rows(share.samples), share=share, lr=0.1)
    assert elastic.decide() is not None
    groups = [
        weakref.ref(each) for each in (elastic._groups.waiting_group, elastic._groups.control_group)
    ]
    elastic.close()
    elastic.close()
    return all(group() is None for group in groups)


def test_a_closed_run_keeps_no_group(world):
    assert world(2).run(elastic_body) == [True, True]


LAYOUTS = [
    Layout(4, 4, 1, (0, 2, 3, 4, 6), 0, 4),
    Layout(4, 2, 2, (0, 3, 6), 1, 4),
    Layout(4, 1, 4, (0, 6), 2, 2),
]
WARM = 9  # transitions, after which nothing grows


def held() -> tuple[int, int, int, int]:
    """Of this process: open files, threads, pieces of shared memory, MiB of memory."""
    with open("/proc/self/maps") as file:
        shared = sum("/dev/shm/" in line for line in file)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), shared, resident


def train(layout: Layout, layers: list[nn.Module], message, alone) -> list[weakref.ref]:
    """A step in a layout, from its groups to their end; what must be gone afterwards. alone: a
    group of this rank."""
    active = LayoutGroups(layout, control_group=message)
    pipeline = Pipeline(
        layers,
        schedule=schedule("1f1b", num_stages=layout.stages, num_microbatches=layout.micro_batches),
        group=ALONE if active.pp_group is None else active.pp_group,
        loss=nn.functional.mse_loss,
        config=PipelineConfig(boundaries=layout.boundaries, tied=None),
    )
    zero = ZeroOptimizer(
        pipeline,
        AdamW,
        ZeroConfig(stage=0, reduction="sum"),
        group=active.dp_group or alone,
        pp_group=active.pp_group,
        lr=1e-3,
    )
    x = torch.randn(8, 256)
    with zero.no_sync():
        pipeline.step(x, x)
    before = next(pipeline.parameters()).clone()
    zero.step()
    assert not torch.equal(before, next(pipeline.parameters()))
    groups = [weakref.ref(each) for each in (active.pp_group, active.dp_group) if each is not None]
    pipeline.close()
    zero.close()
    active.close()
    assert groups
    assert not [each() for each in groups if each() is not None], "somebody keeps a group"
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in pipeline.parameters()), (
        "a layer keeps others' memory"
    )
    return [weakref.ref(pipeline), weakref.ref(zero)]


def transitions_body(rank, group, count):
    message = make_control_group()
    alone = [dist.new_group([each]) for each in range(4)][rank]
    layers = [nn.Linear(256, 256) for _ in range(6)]
    AdamW(
        layers[0].parameters()
    )  # what torch imports for its first optimizer keeps tracebacks of whoever made it
    repeats, probe._REPEATS = probe._REPEATS, 1  # the choice of an algorithm is not what is tested
    gc.disable()
    found = []
    try:
        for number in range(count):
            gone = train(LAYOUTS[number % 3], layers, message, alone)
            assert [each() for each in gone] == [None] * len(gone), number
            if number % 10 == 9:
                gc.collect()
            found.append(held())
    finally:
        gc.enable()
        probe._REPEATS = repeats
        dist.destroy_process_group(message)
        dist.destroy_process_group(alone)
    return found


def check_nothing_grows(found: list[tuple[int, int, int, int]], rank: int) -> None:
    files, threads, shared, memory = zip(*found, strict=True)
    assert max(files) == files[0], rank
    assert max(threads) == threads[0], rank
    assert max(shared) == shared[0], rank
    assert max(memory[-10:]) < memory[0] + 48, (rank, memory)


@pytest.mark.parametrize("count", [14, full(50)])
def test_nothing_is_left_after_many_transitions(world, count):
    for rank, found in enumerate(world(4).run(transitions_body, count, timeout=300)):
        check_nothing_grows(found[WARM:], rank)


CYCLE = 4  # decisions, each of which changes the layout; then the run goes back to where it began


def elastic_transitions_body(rank, group, count, folder):
    """What this rank holds where an elastic run begins again, each time after CYCLE changes of
    layout."""
    named = {
        "embedding": nn.Linear(7, 512),
        **{f"blocks.{i}": nn.Linear(512, 512) for i in range(8)},
        "head": nn.Linear(512, 5),
    }
    repeats, probe._REPEATS = probe._REPEATS, 1
    elastic = make_elastic(
        named,
        optimizer=networks.optimizer,
        loss=networks.loss,
        samples=networks.SAMPLES,
        batch=8,
        seed=5,
        stages=4,
        policy=Bound(1 / 2),
        cache=CacheOptions("on", example=lambda samples: (networks.rows(samples)[0], {})),
    )
    found = []
    save(folder, elastic.state_dict())
    gc.disable()
    try:
        for _ in range(-(-count // CYCLE)):
            layouts = [elastic.layout]
            for _ in range(CYCLE):
                for share in elastic.shares():
                    elastic.step(*networks.rows(share.samples), share=share, lr=0.01)
                assert elastic.decide() is not None
                layouts.append(elastic.layout)
            assert [each.stages for each in layouts] == [4, 4, 2, 2, 1]
            elastic.load_state_dict(load(folder)[0])
            gc.collect()
            found.append(held())
    finally:
        gc.enable()
        probe._REPEATS = repeats
        elastic.close()
    return found


@pytest.mark.parametrize("count", [full(20), full(52)])
def test_an_elastic_run_keeps_nothing_of_its_changes(world, tmp_path, count):
    for rank, found in enumerate(
        world(4).run(elastic_transitions_body, count, str(tmp_path / "begin"), timeout=300)
    ):
        assert len(found) == count // CYCLE
        check_nothing_grows(found[3:], rank)
