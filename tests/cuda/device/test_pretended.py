"""The device of tests/pretend_cuda refuses what a GPU refuses: a rehearsal that let it pass would
prove nothing."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.conftest import DEVICE, PRETENDED

pytestmark = pytest.mark.skipif(
    not (PRETENDED and DEVICE.startswith("cuda")), reason="needs tests/pretend_cuda: make rehearse"
)


def test_operands_on_two_devices_are_refused(device):
    here, there = torch.ones(3), torch.ones(3, device=device)
    for call in (
        lambda: there + here,
        lambda: there.add_(here),
        lambda: torch.cat([there, here]),
        lambda: here @ there,
    ):
        with pytest.raises(RuntimeError, match=r"same device|two devices"):
            call()
    assert torch.equal((there + torch.tensor(2.0)).cpu(), torch.full((3,), 3.0)), (
        "a number on the host is none of them"
    )


def test_new_memory_is_not_zero(device):
    assert torch.empty(5, device=device).isnan().all()


@pytest.mark.parametrize(
    "wait",
    [
        lambda t: t.sum().item(),
        lambda t: t.cpu(),
        lambda t: t.nonzero(),
        lambda t: bool(t.any()),
        lambda t: t.tolist(),
    ],
)
def test_waiting_is_noticed(device, wait):
    t = torch.ones(3, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            wait(t)
        t.mul_(2)
        torch.empty(3, pin_memory=True).copy_(t, non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert wait(t) is not None


def test_a_capture_computes_nothing_and_a_replay_does(device):
    t, factor = torch.ones(3, device=device), torch.tensor(2.0, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = (t * factor).sum()
        t.add_(1)
        with pytest.raises(RuntimeError, match="not permitted"):
            out.item()
    assert t.tolist() == [1, 1, 1]
    factor.fill_(3.0)
    for _ in range(2):
        graph.replay()
    assert (t.tolist(), out.item()) == ([3, 3, 3], 18.0)


def test_backward_runs_in_the_device_s_thread(device):
    t = torch.ones(3, device=device, requires_grad=True)
    threads = []
    t.register_hook(lambda _: threads.append(threading.get_ident()))
    (t * 2).sum().backward()
    assert threads
    assert threads[0] != threading.get_ident()


def test_views_share_and_memory_is_counted(device):
    before = torch.cuda.memory_allocated()
    t = torch.zeros(1024, device=device)
    assert torch.cuda.memory_allocated() - before == 4096
    t.view(32, 32)[1].fill_(5)
    assert t.sum().item() == 160
    del t
    assert torch.cuda.memory_allocated() == before
