"""FlatLayout by literals; FlatBuffer: values kept, views kept, gradients land in it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pyops.flat import ALIGNMENT, FlatBuffer, FlatLayout, Shard, Shards


def test_layout_by_hand():
    layout = FlatLayout.plan(
        [("a", (3, 5)), ("b", ()), ("c", (0,)), ("d", (9,))], alignment=8, multiple_of=7
    )
    assert layout.offsets == (0, 16, 24, 24)
    assert layout.numel == 35
    assert layout.slice("a") == slice(0, 15)
    assert layout.slice("b") == slice(16, 17)
    assert layout.shards(10, 26) == [
        ("a", slice(10, 15), slice(10, 15)),
        ("b", slice(0, 1), slice(16, 17)),
        ("d", slice(0, 2), slice(24, 26)),
    ]


def test_empty_layout():
    assert FlatLayout.plan([]).numel == 0
    assert FlatLayout.plan([]).shards(0, 10) == []


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=8),
    st.integers(1, 5),
    st.integers(1, 70),
)
def test_cuts_cover_every_element_once(shapes, ranks, alignment):
    layout = FlatLayout.plan(
        [(str(i), s) for i, s in enumerate(shapes)], alignment=alignment, multiple_of=ranks
    )
    assert layout.numel % ranks == 0
    assert all(offset % alignment == 0 for offset in layout.offsets)
    part = layout.numel // ranks
    found = {name: [] for name in layout.names}
    for rank in range(ranks):
        for name, of_tensor, of_buffer in layout.shards(rank * part, (rank + 1) * part):
            start = layout.slice(name).start
            assert (of_buffer.start - start, of_buffer.stop - start) == (
                of_tensor.start,
                of_tensor.stop,
            )
            found[name] += range(of_tensor.start, of_tensor.stop)
    for name in layout.names:
        whole = layout.slice(name)
        assert found[name] == list(range(whole.stop - whole.start))


def test_layout_refuses():
    with pytest.raises(ValueError, match=r"these repeat: \['a'\]"):
        FlatLayout.plan([("a", (1,)), ("a", (2,))])
    with pytest.raises(ValueError, match="at least 1, got 64 and 0"):
        FlatLayout.plan([("a", (1,))], multiple_of=0)
    with pytest.raises(KeyError, match="no tensor 'x'"):
        FlatLayout.plan([("a", (1,))]).slice("x")


def _net(device) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(device)


def test_values_and_outputs_are_kept(device):
    plain, flat = _net(device), _net(device)
    buffer = FlatBuffer(flat.named_parameters(), multiple_of=10)
    assert buffer.names == ("2.bias", "2.weight", "0.bias", "0.weight")  # the way of backward
    x = torch.randn(4, 5, device=device)
    assert torch.equal(plain(x), flat(x))
    for a, b in zip(plain.parameters(), flat.parameters(), strict=True):
        assert torch.equal(a, b)
    assert buffer.data.numel() % 10 == 0
    assert buffer.parameter.data_ptr() == buffer.data.data_ptr()
    assert buffer.parameter.grad is buffer.grad
    # The buffer is the parameters: a step on one is a step on the other.
    with torch.no_grad():
        buffer.parameter.mul_(0)
    assert not any(p.any() for p in flat.parameters())


def test_gradients_land_in_the_buffer_and_accumulate(device):
    plain, flat = _net(device), _net(device)
    buffer = FlatBuffer(flat.named_parameters())
    x = torch.randn(4, 5, device=device)
    for _ in range(2):
        plain(x).square().sum().backward()
        flat(x).square().sum().backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad.any()
        assert torch.equal(
            buffer.grad[buffer.layout.slice(name)].view_as(parameter), parameter.grad
        )
    buffer.zero_grad()
    assert not buffer.grad.any()
    assert all(p.grad is v for p, v in zip(buffer.parameters, buffer.grad_views, strict=True))


def test_gradients_set_to_none_come_back(device):
    flat = _net(device)
    buffer = FlatBuffer(flat.named_parameters())
    buffer.grad.fill_(9)
    flat.zero_grad()  # torch's default: None
    flat[2](torch.ones(1, 7, device=device)).sum().backward()
    assert [buffer.restore_gradient(i) for i in range(4)] == [True, True, False, False]
    expected = torch.zeros_like(buffer.grad)
    expected[buffer.layout.slice("2.bias")] = 1
    expected[buffer.layout.slice("2.weight")] = 1
    inside = torch.cat(
        [torch.arange(s.start, s.stop) for s in map(buffer.layout.slice, buffer.names)]
    ).to(device)
    assert torch.equal(buffer.grad[inside], expected[inside])
    assert all(p.grad is v for p, v in zip(buffer.parameters, buffer.grad_views, strict=True))


def test_the_gradient_moves_to_other_memory_and_back(device):
    model = nn.Linear(3, 2).to(device)
    buffer = FlatBuffer(model.named_parameters())
    first, second = buffer.grad, torch.zeros_like(buffer.grad)
    model(torch.ones(4, 3, device=device)).sum().backward()
    kept = first.clone()
    buffer.move_gradient(second)
    assert buffer.grad is buffer.parameter.grad is second
    model(torch.ones(4, 3, device=device)).sum().backward()
    assert torch.equal(first, kept)
    assert torch.equal(second, kept)
    buffer.zero_grad()
    assert not second.any()
    assert torch.equal(first, kept)
    buffer.move_gradient(first)
    assert torch.equal(model.bias.grad, torch.full((2,), 4.0, device=device))
    with pytest.raises(ValueError, match="give a contiguous tensor"):
        buffer.move_gradient(first[1:])
    assert buffer.grad is first


def test_odd_parameters(device):
    strided = nn.Parameter(torch.arange(12.0, device=device).view(3, 4).t())
    strided.grad = torch.ones(3, 4, device=device).t()
    scalar, empty = (
        nn.Parameter(torch.tensor(5.0, device=device)),
        nn.Parameter(torch.empty(0, 3, device=device)),
    )
    expected = strided.detach().clone()
    buffer = FlatBuffer([("strided", strided), ("scalar", scalar), ("empty", empty)])
    assert torch.equal(strided, expected)
    assert strided.is_contiguous()
    assert strided.grad.is_contiguous()
    assert strided.grad.sum() == 12
    assert buffer.layout.offsets == (0, 0, ALIGNMENT)
    assert buffer.index(strided) == 2


def test_refuses_what_can_not_share_a_buffer():
    a = nn.Parameter(torch.ones(2))
    before = a.data_ptr()
    with pytest.raises(ValueError, match="at least one parameter"):
        FlatBuffer([])
    with pytest.raises(ValueError, match="b is the same parameter as a"):
        FlatBuffer([("a", a), ("b", a)])
    with pytest.raises(ValueError, match=r"b is torch\.bfloat16 on cpu, a is torch\.float32"):
        FlatBuffer([("a", a), ("b", nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))])
    with pytest.raises(TypeError, match="a is a Tensor"):
        FlatBuffer([("a", torch.ones(2))])
    with pytest.raises(ValueError, match="expected a dense floating-point"):
        FlatBuffer([("a", nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False))])
    with pytest.raises(ValueError, match="not in this buffer"):
        FlatBuffer([("a", a)]).index(nn.Parameter(torch.ones(3)))
    assert a.data_ptr() != before  # only the last call, which was fine, touched it


def test_shard_must_lie_within():
    Shard((4, 6), (2, 0), torch.ones(2, 6))
    for offset in [(3, 0), (2,), (-1, 0)]:
        with pytest.raises(ValueError, match="does not lie within"):
            Shard((4, 6), offset, torch.ones(2, 6))


def test_a_range_of_the_flattened_tensor_must_too():
    assert Shard((4, 6), (9,), torch.ones(15)).is_range
    assert Shard((), (0,), torch.ones(1)).is_range
    assert not Shard((4, 6), (0, 0), torch.ones(4, 6)).is_range
    for shape, offset, size in [((4, 6), 10, 15), ((4, 6), -1, 2), ((), 1, 1), ((7,), 3, 5)]:
        with pytest.raises(ValueError, match="does not lie within"):
            Shard(shape, (offset,), torch.ones(size))
    with pytest.raises(ValueError, match=r"Shards are parts of one tensor.*\(2, 2\).*\(4,\)"):
        Shards((Shard((2, 2), (0,), torch.ones(2)), Shard((4,), (2,), torch.ones(2))))


def test_cut_by_hand():
    """Two buckets of 32, two ranks; rank 1 holds the second half of each, one after the other."""
    layout = FlatLayout.plan([("a", (3, 5)), ("e", (0, 2)), ("b", (4, 10)), ("c", ())], alignment=4)
    assert (layout.offsets, layout.numel) == ((0, 16, 16, 56), 57)
    local = torch.arange(16.0, 32.0).tolist() + torch.arange(48.0, 57.0).tolist()
    parts = layout.cut(torch.tensor(local), [(16, 32), (48, 57)])
    assert list(parts) == ["e", "b", "c"]
    assert [(p.offset, p.tensor.tolist()) for p in parts["b"]] == [
        ((0,), list(range(16, 32))),
        ((32,), list(range(48, 56))),
    ]
    assert [(p.global_shape, p.offset, p.tensor.tolist()) for p in parts["c"]] == [
        ((), (0,), [56.0])
    ]
    assert [p.tensor.numel() for p in parts["e"]] == [0]
    joined = layout.cut(torch.arange(57.0), [(0, 20), (20, 57)])
    assert len(joined["b"]) == 1, "ranges that meet are one"
    assert joined["b"].parts[0].tensor.tolist() == list(range(16, 56))


@pytest.mark.parametrize(
    ("ranges", "size"), [([(0, 5)], 4), ([(5, 3)], -2), ([(0, 5), (4, 6)], 7), ([(60, 65)], 5)]
)
def test_cut_refuses(ranges, size):
    with pytest.raises(ValueError, match="can't hold the ranges"):
        FlatLayout.plan([("a", (64,))]).cut(torch.ones(max(size, 0)), ranges)
