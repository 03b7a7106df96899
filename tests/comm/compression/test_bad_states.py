"""Arguments and saved states that make no sense: refused by value, alike on every rank where one
alone has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyops.comm import DisagreementError, ErrorFeedback, ddp_hook, fsdp_reduce_scatter
from pyops.comm.compression.eight_bit import FP8, Int8
from pyops.comm.compression.error_feedback import merge
from pyops.comm.compression.names import parse
from pyops.comm.compression.one_bit import OneBit
from pyops.comm.compression.power_sgd import PowerSGD
from pyops.comm.compression.topk import TopK
from pyops.data_parallel import DataParallel

pytestmark = pytest.mark.cpu_only
CODEC = OneBit(block=64)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: OneBit(block=64.0), TypeError, "block is 64.0; give a whole number"),
        (lambda: OneBit(block="64"), TypeError, "block is '64'"),
        (lambda: Int8(block=None), TypeError, "block is None"),
        (lambda: Int8(block=256.0), TypeError, "block is 256.0"),
        (
            lambda: Int8(stochastic_rounding="no"),
            TypeError,
            "stochastic_rounding is 'no'; give True or False",
        ),
        (lambda: FP8(format=2), ValueError, "format is 2"),
        (lambda: TopK(ratio="x"), TypeError, "ratio is 'x'; give a number"),
        (lambda: TopK(ratio=True), TypeError, "ratio is True"),
        (lambda: PowerSGD(rank=2.5), TypeError, "rank is 2.5; give a whole number"),
        (lambda: PowerSGD(seed="x"), TypeError, "seed is 'x'"),
        (lambda: parse([1]), ValueError, r"no codec \[1\]"),
        (
            lambda: ErrorFeedback(-1, codec=CODEC),
            ValueError,
            "tensors is -1; give the number of elements",
        ),
        (lambda: ErrorFeedback(2.5, codec=CODEC), TypeError, "tensors is 2.5"),
        (lambda: ErrorFeedback(3, codec=OneBit), TypeError, "expected a codec's object"),
        (lambda: ErrorFeedback(3, codec=CODEC, rank="x"), TypeError, "rank is 'x'"),
    ],
)
def test_arguments(make, error, says):
    with pytest.raises(error, match=says):
        make()


def states(size: int, numel: int = 100) -> list[dict[str, Any]]:
    found = []
    for rank in range(size):
        error = ErrorFeedback(numel, codec=CODEC, rank=rank, size=size)
        error.worker.normal_()
        error.server.normal_()
        found.append(error.state_dict())
    return found


def test_states_that_do_not_belong_together_are_not_merged():
    two, three = states(2), states(3)
    lacking = {key: value for key, value in two[1].items() if key != "server"}
    for given, error, says in (
        (two[0], TypeError, "pass a list of those of all ranks"),
        ([{}], ValueError, "no state of errors"),
        (
            [*two, *three],
            ValueError,
            r"parts of different tensors, of shapes \[\(2, 100\), \(3, 100\)\]",
        ),
        ([two[0], states(2, 90)[1]], ValueError, "parts of different tensors"),
        ([merge(two)], ValueError, "is a Tensor; expected a pyops.flat.Shard"),
        ([two[0], lacking], ValueError, "no 'server' errors"),
        ([two[0], {**two[1], "worker": {"tensor": "x"}}], ValueError, "of 'tensor' is a str"),
    ):
        with pytest.raises(error, match=says):
            merge(given)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"server": None}, "no 'server' errors"),
        ({"worker": [1]}, "no 'worker' errors"),
        ({"worker": {"tensor": None}}, "worker error of 'tensor' is a NoneType"),
        ({"worker": {"tensor": torch.zeros(0, 100)}}, r"have shape \(0, 100\)"),
        ({"worker": {"tensor": torch.zeros(())}}, r"have shape \(\)"),
        ({"worker": {"tensor": torch.full((2, 100), torch.nan)}}, "not finite"),
        ({"rounds": "x"}, "rounds are 'x'"),
        (None, "no state of errors but a list"),
    ],
)
def test_a_damaged_state_changes_nothing(change, says):
    error = ErrorFeedback(100, codec=CODEC, rank=1, size=3)
    error.load_state_dict(merge(states(3)))
    worker, server = error.worker.clone(), error.server.clone()
    with pytest.raises(ValueError, match=says):
        error.load_state_dict([1] if change is None else {**merge(states(2)), **change})
    assert torch.equal(error.worker, worker)
    assert torch.equal(error.server, server)


def backward(model: nn.Module, rank: int) -> None:
    model.zero_grad()
    model(torch.ones(2, 8) * (rank + 1)).square().sum().backward()


def damaged(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "worker": {name: torch.zeros(3, 1) for name in state["worker"]}}


def _data_parallel(rank: int, group: dist.ProcessGroup) -> None:
    model = DataParallel(nn.Linear(8, 8), group=group, codec=CODEC)
    backward(model, rank)
    state = model.communication_state()
    before = [
        error.clone() for error in (model.reducer.errors[0].worker, model.reducer.errors[0].server)
    ]
    with pytest.raises(ValueError, match="have shape"):
        model.load_communication_state(damaged(state) if rank == 2 else state)
    assert torch.equal(before[0], model.reducer.errors[0].worker)
    assert torch.equal(before[1], model.reducer.errors[0].server)
    backward(model, rank)


def _torch_ddp(rank: int, group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 8)
    state, hook = ddp_hook(CODEC, group=group, model=net)
    ddp = DistributedDataParallel(net, process_group=group)
    ddp.register_comm_hook(state, hook)
    backward(ddp, rank)
    saved = state.state_dict()
    state.load_state_dict(
        damaged(saved) if rank == 2 else {**saved, "worker": {}}
    )  # the others begin anew
    with pytest.raises(
        Exception, match="have shape" if rank == 2 else "rank 2 refused: ValueError: .*have shape"
    ):
        backward(ddp, rank)
    wide = nn.Linear(8, 8).double()
    ddp = DistributedDataParallel(wide, process_group=group)
    ddp.register_comm_hook(*ddp_hook(CODEC, group=group, model=wide))
    with pytest.raises(Exception, match="compresses float32"):
        wide_loss = ddp(torch.ones(2, 8, dtype=torch.float64)).sum()
        wide_loss.backward()


def _fsdp(rank: int, group: dist.ProcessGroup) -> None:
    x, out, reduce = torch.ones(6), torch.zeros(2), dist.ReduceOp
    scatter = fsdp_reduce_scatter(CODEC)
    calls = [
        (lambda: scatter(out, x, group, reduce.MAX), "knows SUM and AVG"),
        (
            lambda: scatter(out[:1], x, group, reduce.SUM),
            "the output has 1 elements; .* each gets 2",
        ),
    ]
    for wrong, says in calls:
        for one in (True, False):
            with pytest.raises(
                ValueError if rank == 2 or not one else DisagreementError, match=says
            ):
                scatter(out, x, group, reduce.SUM) if one and rank != 2 else wrong()
        assert not out.any()
    scatter(out, x, group, reduce.SUM)
    assert out.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    "body", [_data_parallel, _torch_ddp, _fsdp], ids=lambda b: b.__name__.strip("_")
)
def test_what_one_rank_of_three_can_not_use_is_raised_on_all(world, body):
    world(3).run(body)
