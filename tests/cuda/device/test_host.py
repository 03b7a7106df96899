"""What moves between a GPU and the host: recomputed inputs, offloaded states, delayed updates, and
copies for a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyops.checkpoint import BackgroundSaver, load
from pyops.offload import Offloaded
from pyops.ops.library import native
from pyops.optim import SGD, AdamW
from pyops.recompute import Arena, Prefetch, checkpoint
from pyops.recompute.inputs import Keeping
from tests.conftest import DEVICE
from tests.zero.making import zero_optimizer
from tests.zero.models import Net, groups, mean_loss, rows

pytestmark = [
    pytest.mark.skipif(not DEVICE.startswith("cuda"), reason="needs a GPU: PYOPS_TEST_DEVICE=cuda"),
    pytest.mark.skipif(native() is None, reason="built without kernels"),
]

WIDTH, PARTS = 512, 4
SIZES = [100_000, 7, 333, 40_001, 1]


def _busy(device: torch.device) -> None:
    """Long work on the current stream: who does not wait for it reads what is not there yet."""
    if device.type == "cuda":
        torch.cuda._sleep(50_000_000)


# --------------------------------------------------------------------------------------------------
# recompute


class Flight:
    """A copy that is under way as long as nobody waits for it."""

    def __init__(self, log: list[Any]) -> None:
        self.log, self.over = log, False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.log.append(self)


def test_memory_of_an_arena_is_not_written_while_a_copy_of_it_is_under_way(device, monkeypatch):
    """An input that is dropped without a backward gives its memory away at once."""
    arena = Arena(1 << 20, pin_memory=True)
    keeping = Keeping(offload=True, arena=arena)
    x, waited = torch.arange(1000.0, device=device), list[Any]()
    down, up = Flight(waited), Flight(waited)
    wait = torch.cuda.Stream.wait_event
    monkeypatch.setattr(
        torch.cuda.Stream,
        "wait_event",
        lambda self, event: (
            waited.append(event) if isinstance(event, Flight) else wait(self, event)
        ),
    )
    kept = keeping.pack(x)
    assert keeping.unpack(kept).equal(x)
    assert len(arena._copies) >= 1
    torch.cuda.synchronize()
    assert arena.copies() == []
    arena.copying_until(down)
    arena.copying_until(up)
    place = kept.part.data_ptr()
    del kept
    again = keeping.pack(x + 1)
    assert again.part.data_ptr() == place
    assert waited == [down, up]
    keeping.pack(torch.ones(3))  # written by the host, which has to wait
    assert waited == [down, up] * 2
    down.over = up.over = True
    waited.clear()
    assert keeping.unpack(keeping.pack(x)).equal(x)
    assert waited == []


def _gradients(device: torch.device, **options: Any) -> list[Tensor]:
    """Of a stack of parts, each recomputed; inputs are changed in place once a part has kept them,
    where that is allowed."""
    generator = torch.Generator().manual_seed(3)
    parts = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        for _ in range(PARTS)
    ]
    for p in (p for part in parts for p in part.parameters()):
        p.data.normal_(0.0, 0.05, generator=generator)
    parts = [part.to(device) for part in parts]
    x = torch.randn(256, WIDTH, generator=generator).to(device).requires_grad_()
    y = x * 1.0
    for part in parts:
        _busy(device)
        z = checkpoint(part, y, **options)
        if "arena" in options or (
            options and device.type == "cuda"
        ):  # it was copied, so nobody minds
            y.detach().fill_(float("nan"))
        y = z
    y.square().mean().backward()
    return [x.grad, *(p.grad for part in parts for p in part.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("prefetch", [False, True], ids=["", "prefetched"])
@pytest.mark.parametrize("place", ["pinned memory", "arena", "pinned arena"])
def test_inputs_kept_on_the_host_give_the_same_bits(device, place, prefetch):
    expected = _gradients(device)
    nbytes = 8 * 256 * WIDTH * 4
    options: dict[str, Any] = {"offload": "cpu"} if place == "pinned memory" else {}
    if place != "pinned memory":
        options["arena"] = Arena(
            nbytes, pin_memory=place == "pinned arena" and device.type == "cuda"
        )
    if prefetch:
        options["prefetch"] = Prefetch()
    for _ in range(2):  # memory is used again
        found = _gradients(device, **options)
        for a, b in zip(found, expected, strict=True):
            assert bool((b != 0).any())
            assert torch.equal(a, b)
    if place != "pinned memory":
        assert options["arena"].peak > 0
        assert options["arena"].used == 0


# --------------------------------------------------------------------------------------------------
# offload


def _parameters(device: torch.device | str, dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(n, generator=generator).to(device, dtype)) for n in SIZES]


def _give(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for i, p in enumerate(params):
        drawn = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        _busy(p.device)
        p.grad = None if (i, step) in ((1, 0), (2, 1)) else drawn * 1.0


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "cls",
    [AdamW, SGD, torch.optim.AdamW],
    ids=lambda c: f"{c.__module__.split('.')[0]} {c.__name__}",
)
def test_offloaded_states_step_as_on_the_cpu(device, tmp_path: Path, cls, dtype, place):
    """The step is taken on the host, so its bits are those of parameters that are there."""
    options = {"lr": 0.03} | ({"momentum": 0.9} if cls is SGD else {})
    ours, theirs = _parameters(device, dtype), _parameters("cpu", dtype)
    start = [p.detach().clone() for p in theirs]
    offloaded = Offloaded(
        cls(ours, **options), "cpu" if place == "cpu" else str(tmp_path), tile_bytes=1 << 16
    )
    plain = cls(theirs, **options)
    for step in range(4):
        _give(ours, step)
        _give(theirs, step)
        offloaded.step()
        plain.step()
        for p, q in zip(ours, theirs, strict=True):
            assert torch.equal(p.detach().cpu(), q), f"step {step}, parameter of {p.numel()}"
    assert not any(torch.equal(p, q) for p, q in zip(theirs, start, strict=True))
    offloaded.close()


@pytest.mark.parametrize(
    "options",
    [{}, {"offload": "cpu"}, {"offload": "disk"}, {"offload": "cpu", "delayed_update": 2}],
    ids=str,
)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero_on_one_rank(device, tmp_path: Path, stage, options, dtype):
    """With states, and at stage 3 parameters, beside the model or not: as the same on the CPU, but
    for rounding."""
    given = {**options, "offload": str(tmp_path)} if options.get("offload") == "disk" else options

    def trained(where: torch.device | str) -> dict[str, Tensor]:
        model = Net(mixed=False).to(where, dtype)
        zero = zero_optimizer(
            model,
            AdamW,
            stage=stage,
            bucket_bytes=2000,
            max_grad_norm=0.2,
            params=groups(model),
            lr=1e-2,
            **given,
        )
        for step in range(6):
            zero.zero_grad()
            x, y = (t.to(where, dtype) for t in rows(step))
            mean_loss(model, x, y, sometimes=step % 2 == 1).backward()
            zero.step()
        with zero.whole_parameters():
            return {name: p.detach().cpu().float().clone() for name, p in model.named_parameters()}

    found, expected = trained(device), trained("cpu")
    start = Net(mixed=False).to(dtype).state_dict()
    moved, apart = (
        torch.cat([(p - other[name].float()).flatten() for name, p in expected.items()])
        for other in (start, found)
    )
    assert int((moved.abs() > 5e-3).sum()) > 0.5 * moved.numel()
    # In 16 bits some of the smallest gradients have another sign, and so have Adam's steps by them.
    assert float(apart.norm() / moved.norm()) < (1e-3 if dtype == torch.float32 else 0.4)


# --------------------------------------------------------------------------------------------------
# checkpoints


def test_a_copy_for_the_background_is_of_the_moment_of_save(device, tmp_path: Path):
    saver = BackgroundSaver()
    state = {
        "w": torch.zeros(1 << 20, device=device),
        "strided": torch.arange(6.0, device=device).view(2, 3).t(),
        "half": torch.ones(3, device=device).bfloat16(),
        "host": torch.ones(4),
        "flag": torch.tensor(True, device=device),
    }
    for turn in range(2):  # the second time into the same memory
        _busy(device)
        state["w"].fill_(turn + 1.0)
        wanted = {name: tensor.clone() for name, tensor in state.items()}
        saver.save(tmp_path / f"c{turn}", state)
        for tensor in state.values():
            tensor.zero_()
        saver.wait()
        found, _ = load(tmp_path / f"c{turn}")
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor.cpu()), name
            state[name].copy_(tensor)
    assert saver._copies._buffer.is_pinned() == (device.type == "cuda")
