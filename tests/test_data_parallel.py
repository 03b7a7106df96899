"""DataParallel: n ranks with a part of the batch each take the step that one rank takes with the
whole batch."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pyops.comm.buckets import reducer
from pyops.data_parallel import DataParallel
from pyops.mesh import ALONE, Axes, Mesh
from tests.grids import cut

pytestmark = pytest.mark.on_device

ROWS, WIDTH = 12, 10  # ROWS divides by 1, 2, 3, 4


class Net(nn.Module):
    """Tied, frozen, unused and late-used parameters, and a buffer: what DataParallel must get
    right."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("shift", torch.zeros(WIDTH))
        for tensor in [*self.parameters(), *self.buffers()]:
            tensor.data.normal_(generator=generator)
        self.frozen.requires_grad_(False)
        self.double()  # so that another order of summation is no excuse

    def forward(self, x: Tensor, *, sometimes: bool = True) -> Tensor:
        x = torch.tanh(self.frozen(self.first(x)) + self.shift)
        x = x + self.sometimes(x) if sometimes else x
        return self.tied(self.last(x))


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(ROWS, WIDTH, generator=generator).double(), torch.randn(
        ROWS, WIDTH, generator=generator
    ).double()


def part(rank: int, size: int) -> tuple[Tensor, Tensor]:
    return tuple(t.chunk(size)[rank] for t in rows())  # type: ignore[return-value]


def grads(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()
    }


def _one_backward(
    rank: int, group: Any, bucket_bytes: int, algorithm: str
) -> dict[str, Tensor | None]:
    model = DataParallel(
        Net(seed=rank), group=group, bucket_bytes=bucket_bytes, algorithm=algorithm
    )
    x, y = part(rank, dist.get_world_size(group))
    for _ in range(2):  # the second time the views are stale and .grad is None again
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
    for buffer in model.flat:
        for p, view in zip(buffer.parameters, buffer.grad_views, strict=True):
            assert p.grad is view or p.grad is None
    return grads(model.module)


# Every size of buckets on three ranks, which divide no bucket; of two and four, one each.
BUCKETS = (1, 600, 1 << 20)
KEPT = [*((3, nbytes) for nbytes in BUCKETS), (2, 1 << 20), (4, 600)]


@pytest.mark.parametrize(
    ("size", "bucket_bytes"), cut(itertools.product((2, 3, 4), BUCKETS), keep=KEPT)
)
def test_mean_of_the_parts_is_the_gradient_of_the_whole(world, size: int, bucket_bytes: int):
    net = Net(seed=0)
    x, y = rows()
    nn.functional.mse_loss(net(x), y).backward()
    found = world(size).run(_one_backward, bucket_bytes, "native")
    for name, expected in grads(net).items():
        if expected is None:
            assert all(rank[name] is None for rank in found), name
            continue
        assert expected.abs().max() > 1e-3, "a zero gradient would prove nothing"
        for rank in found:
            torch.testing.assert_close(rank[name], expected, rtol=1e-11, atol=1e-12)
            assert torch.equal(rank[name], found[0][name]), f"{name} differs between ranks"


@pytest.mark.parametrize(
    "algorithm",
    ["ring", "two_shot", pytest.param("shared_memory", marks=pytest.mark.cpu_only), "auto"],
)
def test_bucket_size_does_not_change_a_bit(world, algorithm: str):
    small, large = (world(3).run(_one_backward, size, algorithm)[0] for size in (1, 1 << 20))
    for name, gradient in small.items():
        assert (gradient is None) == (large[name] is None)
        assert gradient is None or torch.equal(gradient, large[name]), name


def _wide(rank: int, group: Any, bucket_bytes: int) -> Tensor:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Linear(600, 600) for _ in range(4))
    )  # 1.4 MB each: more than a segment of the ring
    model = DataParallel(net, group=group, bucket_bytes=bucket_bytes, algorithm="ring")
    torch.manual_seed(rank)
    model(torch.randn(8, 600)).square().mean().backward()
    return model.flat[0].grad


def test_bucket_size_does_not_change_the_ring_where_it_is_cut_into_segments(world):
    # Three ranks: the ring's order of summation differs from segment to segment, and must follow
    # the place in the buffer.
    small, large = (world(3).run(_wide, size)[0] for size in (1, 1 << 30))
    assert small.abs().max() > 0
    assert torch.equal(small, large)


def _accumulate(rank: int, group: Any, to_none: bool) -> tuple[dict[str, Tensor | None], int]:
    model = DataParallel(Net(), group=group)
    x, y = part(rank, 2)
    with mock.patch.object(reducer, "all_reduce", wraps=reducer.all_reduce) as reduce:
        for _ in range(2):
            model.zero_grad(set_to_none=to_none)
            for i in range(3):
                last, rows = i == 2, slice(2 * i, 2 * i + 2)
                with contextlib.nullcontext() if last else model.no_sync():
                    # `sometimes` takes part in the local backwards only: its gradient must be
                    # communicated all the same.
                    nn.functional.mse_loss(model(x[rows], sometimes=not last), y[rows]).backward()
    labels = [call.kwargs["label"] for call in reduce.call_args_list]
    return grads(model.module), sum("bucket" in label for label in labels) // len(
        model.reducer.buckets
    )


@pytest.mark.parametrize("to_none", [True, False])
def test_no_sync_adds_up_and_communicates_once(world, to_none: bool):
    net = Net()
    for rank in range(2):
        x, y = part(rank, 2)
        for i in range(3):
            s = slice(2 * i, 2 * i + 2)
            (nn.functional.mse_loss(net(x[s], sometimes=i < 2), y[s]) / 2).backward()
    (first, rounds), (second, _) = world(2).run(_accumulate, to_none)
    assert rounds == 2, "one communication for each of the two steps"
    for name, expected in grads(net).items():
        if expected is not None:
            torch.testing.assert_close(first[name], expected, rtol=1e-11, atol=1e-12)
            assert torch.equal(first[name], second[name])


def _switch_off(rank: int, group: Any) -> list[Any]:
    model = DataParallel(Net(), group=group)
    x, y = part(rank, 2)
    found: list[Any] = [model.require_backward_grad_sync]
    for wanted in (False, True):
        model.require_backward_grad_sync = wanted
        with model.no_sync():
            found.append(model.require_backward_grad_sync)
        assert model.require_backward_grad_sync is wanted, (
            "no_sync puts back what was set before it"
        )
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        found.append(model.module.last.weight.grad.clone())
    with pytest.raises(TypeError, match="require_backward_grad_sync is 'no'"):
        model.require_backward_grad_sync = "no"  # type: ignore[assignment]
    return found


def test_require_backward_grad_sync_is_that_of_torch(world):
    alone = []
    for rank in range(2):
        net = Net()
        x, y = part(rank, 2)
        nn.functional.mse_loss(net(x), y).backward()
        alone.append(net.last.weight.grad)
    assert not torch.allclose(alone[0], alone[1])
    for rank, (at_first, within, local, within_again, reduced) in enumerate(
        world(2).run(_switch_off)
    ):
        assert (at_first, within, within_again) == (True, False, False)
        torch.testing.assert_close(local, alone[rank], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(reduced, (alone[0] + alone[1]) / 2, rtol=1e-11, atol=1e-12)


def _used_on_rank_1(rank: int, group: Any) -> tuple[dict[str, Tensor | None], list[bool]]:
    model = DataParallel(Net(), group=group)
    x, y = part(rank, 2)
    missing = []
    for used_by in (1, None):
        model.zero_grad()
        nn.functional.mse_loss(model(x, sometimes=rank == used_by), y).backward()
        missing.append(model.module.sometimes.weight.grad is None)
        if used_by == 1:
            first = grads(model.module)
    return first, missing


def test_a_parameter_used_on_one_rank_has_its_gradient_on_all(world):
    net = Net()
    for rank in range(2):
        x, y = part(rank, 2)
        (nn.functional.mse_loss(net(x, sometimes=rank == 1), y) / 2).backward()
    for found, missing in world(2).run(_used_on_rank_1):
        torch.testing.assert_close(
            found["sometimes.weight"].double(), net.sometimes.weight.grad, rtol=1e-11, atol=1e-12
        )
        assert found["never.weight"] is None
        assert missing == [False, True], "used on no rank: .grad stays None"


def _unused_after_it_was_used(rank: int, group: Any, op: str) -> tuple[Tensor, Tensor]:
    model = DataParallel(Net(), group=group, reduction=op)
    x, y = part(rank, 3)
    nn.functional.mse_loss(model(x), y).backward()
    before = model.module.sometimes.weight.grad.clone()
    nn.functional.mse_loss(model(x, sometimes=False), y).backward()
    return before, model.module.sometimes.weight.grad.clone()


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_a_parameter_used_on_no_rank_keeps_the_gradient_it_had(world, op: str):
    for before, after in world(3).run(_unused_after_it_was_used, op):
        assert before.abs().max() > 1e-3
        assert torch.equal(before, after)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_within_the_backward_that_ends_first_is_refused(reentrant: bool):
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.last, self.first(x), use_reentrant=reentrant)

    model = DataParallel(Recomputed())
    with (
        pytest.raises(RuntimeError, match="pass use_reentrant=False")
        if reentrant
        else contextlib.nullcontext()
    ):
        model(torch.ones(2, 3)).sum().backward()
        assert all(p.grad.abs().sum() > 0 for p in model.module.parameters())


def _values(rank: int, group: Any) -> dict[str, Tensor]:
    return {
        k: v.clone()
        for k, v in DataParallel(Net(seed=rank), group=group).module.state_dict().items()
    }


def test_rank_0_is_broadcast_frozen_parameters_and_buffers_too(world):
    expected = Net(seed=0).state_dict()
    for found in world(3).run(_values):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def _disagree(rank: int, group: Any, how: str) -> str:
    net: nn.Module = Net()
    if rank == 1:
        net = {
            "shape": lambda: nn.ModuleDict(
                {**dict(net.named_children()), "last": nn.Linear(WIDTH, 3)}
            ),
            "dtype": lambda: Net().float(),
            "frozen": lambda: Net().requires_grad_(False),
            "more": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        }[how]()
    if how == "more" and rank == 0:
        net = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError) as caught:
        DataParallel(net, group=group)
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("shape", "rank 1"),
        ("dtype", "float32"),
        ("frozen", "no parameter with requires_grad=True"),
        ("more", "rank 0 has 2 parameters and buffers, rank 1 has 4"),
    ],
)
def test_ranks_that_disagree_all_raise(world, how: str, message: str):
    first, second = world(2).run(_disagree, how, timeout=20.0)
    assert message in first
    assert first == second


def _disagree_on_options(rank: int, group: Any) -> list[str]:
    found = []
    for options in (
        [{}, {"group_by": lambda name, p: name}],
        [{"bucket_bytes": 64}, {}],
        [{"algorithm": "ring"}, {"algorithm": "two_shot"}],
        [{"reduction": "sum"}, {"reduction": "mean"}],
    ):
        with pytest.raises(ValueError) as caught:
            DataParallel(Net(), group=group, **options[rank])
        found.append(str(caught.value))
    return found


def test_ranks_that_disagree_on_options_all_raise(world):
    first, second = world(2).run(_disagree_on_options, timeout=20.0)
    assert all(
        "rank 0 and rank 1 reduce gradients in different ways" in message for message in first
    )
    assert first == second


def test_one_process_without_torch_distributed(device):
    model = DataParallel(Net().to(device))
    x, y = (t.to(device) for t in rows())
    for view in model.flat[0].grad_views:
        view.fill_(float("nan"))  # what an earlier step left there must not be seen
    model.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    assert model.module.never.weight.grad is None
    for buffer in model.flat:
        assert buffer.grad.isfinite().all()
        for p, view in zip(buffer.parameters, buffer.grad_views, strict=True):
            assert p.grad is None or torch.equal(view, p.grad)
    assert model.module.first.weight.grad.abs().sum() > 0


def test_group_by_gives_each_key_its_own_buffer():
    model = DataParallel(Net(), group_by=lambda name, p: p.dim() >= 2)
    assert dict(zip(model.keys, (len(b) for b in model.flat), strict=True)) == {True: 4, False: 4}
    assert all(p.dim() == 1 for p in model.flat[model.keys.index(False)].parameters)


def test_a_backward_that_broke_off_is_forgotten():
    model = DataParallel(Net())
    x, y = rows()
    broken = model(x)
    broken.register_hook(lambda g: (_ for _ in ()).throw(RuntimeError("no")))
    with pytest.raises(RuntimeError, match="no"):
        broken.sum().backward()
    model.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    assert model.module.last.weight.grad is not None


@pytest.mark.real_device
def test_compiled_module_trains():
    model = DataParallel(
        torch.compile(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), backend="aot_eager"
        )
    )
    model(torch.ones(2, 4)).sum().backward()
    assert all(buffer.grad.abs().sum() > 0 for buffer in model.flat)


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (nn.ReLU(), ValueError, "no parameter with requires_grad=True"),
        ("net", TypeError, "module is a str"),
        (nn.Linear(2, 2, device="meta"), ValueError, "weight is on the meta device"),
    ],
)
def test_refuses(module: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        DataParallel(module)


def _over_a_mesh(rank: int, group: Any) -> list[float]:
    model = DataParallel(nn.Linear(1, 1, bias=False), mesh=Mesh(Axes(dp=2)))
    model(torch.full((1, 1), float(rank))).sum().backward()
    return [float(model.module.weight.grad)]


def test_over_the_axis_dp_of_a_mesh(world):
    assert world(2).run(_over_a_mesh) == [[0.5], [0.5]]


def _alone_among_others(rank: int, group: Any) -> float:
    model = DataParallel(nn.Linear(1, 1, bias=False), group=ALONE)
    model(torch.full((1, 1), float(rank))).sum().backward()
    return float(model.module.weight.grad)


def test_a_rank_alone_reduces_nothing(world):
    assert world(2).run(_alone_among_others) == [0.0, 1.0]


def test_arguments_that_contradict_or_are_of_old():
    with pytest.raises(ValueError, match="mesh and group"):
        DataParallel(nn.Linear(1, 1), group=ALONE, mesh=Mesh(Axes()))
    with pytest.raises(TypeError, match=r"op has a new name: reduction"):
        DataParallel(nn.Linear(1, 1), op="sum")
