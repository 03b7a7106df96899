"""Adam's bits depend on an element's numbers alone: not on where a tensor is cut, nor on how wide
the registers are."""

from __future__ import annotations

import pytest
import torch

from pyops.ops import library
from pyops.ops.optimizers.optim import adam_

NUMEL = 4133  # a whole chunk, a part of one, and a few elements beyond the widest register
SCALARS = dict(
    lr=3e-3,
    beta1=0.87,
    beta2=0.983,
    eps=2e-7,
    weight_decay=0.13,
    maximize=False,
    zero_grads=False,
    stochastic_rounding=False,
    seed=0,
)


def stepped(
    cuts: list[int], *, decoupled: bool, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """Parameter and moments after three steps, the tensors cut into rows at `cuts`."""
    generator = torch.Generator().manual_seed(3)
    p, *grads = (torch.randn(NUMEL, generator=generator).to(device) for _ in range(4))
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, NUMEL], strict=True)]
    steps = [torch.zeros((), device=device) for _ in sizes]
    for g in grads:
        rows = [list(t.split(sizes)) for t in (p, g, m, v)]
        adam_(*rows, [], [], [], steps, decoupled=decoupled, offsets=[0, *cuts], **SCALARS)
    return [p, m, v]


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_cut_changes_no_bit(device, decoupled: bool):
    names = library.isas() if device.type == "cpu" else [None]
    for name in names:
        with library.use_isa(name) if name else torch.no_grad():
            whole = stepped([], decoupled=decoupled, device=device)
            assert (whole[0] != 0).all()
            for cuts in ([1], [17, 18, 2055], [4096], list(range(5, NUMEL, 7))):
                cut = stepped(cuts, decoupled=decoupled, device=device)
                assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True)), (
                    name,
                    cuts[:3],
                )


@pytest.mark.cpu_only
@pytest.mark.parametrize("decoupled", [True, False])
def test_instruction_sets_with_fused_multiply_add_agree_in_every_bit(decoupled: bool):
    found = {}
    for name in [n for n in library.isas() if n in ("avx2", "avx512")]:
        with library.use_isa(name):
            found[name] = stepped([], decoupled=decoupled)
    if len(found) < 2:
        pytest.skip("this machine has fewer than two instruction sets with fused multiply-add")
    assert all(torch.equal(a, b) for a, b in zip(found["avx2"], found["avx512"], strict=True))


@pytest.mark.cpu_only
@pytest.mark.parametrize("shift", [0, 3])
def test_a_large_step_writes_the_16_bit_parameter_past_the_caches_and_loses_nothing(shift: int):
    numel = (4 << 20) + 77
    for name in library.isas():
        with library.use_isa(name):
            master, gradient = torch.randn(numel), torch.randn(numel)
            base = torch.full((numel + 40,), 7.0, dtype=torch.bfloat16)
            p = base[
                shift : shift + numel
            ]  # shifted: streamed stores need alignment, and must do without here
            moments = torch.zeros(numel), torch.zeros(numel)
            before = master.clone()
            adam_(
                [p],
                [gradient],
                [moments[0]],
                [moments[1]],
                [],
                [master],
                [],
                [torch.zeros(())],
                decoupled=True,
                offsets=[],
                **SCALARS,
            )
            assert torch.equal(p, master.bfloat16()), name
            assert (master != before).all(), name
            assert (base[:shift] == 7).all(), name
            assert (base[shift + numel :] == 7).all(), name
