"""What is left to do for gradients after backward: parts summed over ranks, and a norm that counts
each element once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pyops.comm.buckets.grad_norm import clip_factor
from pyops.comm.buckets.grad_norm import grad_norm as norm_over_groups
from pyops.comm.buckets.reduce_axes import DATA_AXES, OwnRanks, own_ranks
from pyops.flat import Placement
from pyops.mesh import Mesh
from pyops.ops.memory import require_memory
from pyops.tensor_parallel.functional.ranks import Ranks, RanksLike

__all__ = ["clip_grad_norm_", "grad_norm", "sync_partial_grads"]


@torch.no_grad()
def sync_partial_grads(model: nn.Module, *, group: RanksLike = None) -> None:
    """Sums over the ranks the gradients that are parts: of norms and row biases under sequence
    parallelism, of copied heads. Collective: every rank of the group must call it.

    Call it once after backward, before the norm, clipping or the step; a sum or a mean over
    data-parallel ranks may come before or after. One all-reduce for all of them, in fp32 (fp64 if
    one is), so each is rounded once. A gradient that a rank does not have counts as zero there. A
    parameter with a tensor `main_grad` has that one summed.

    Args:
        model: the placements of its modules say which gradients are parts.
        group: see `RanksLike`; the group that the layers were made with.
    """
    ranks = Ranks.of(group)
    if ranks.size == 1:
        return
    parameters = dict(model.named_parameters())
    partial = [
        (parameters[name], place) for name, place in Placement.of(model).items() if place.partial
    ]
    partial = [(p, place) for p, place in partial if p.requires_grad]
    if not partial:
        return
    wide = torch.float64 if any(p.dtype == torch.float64 for p, _ in partial) else torch.float32
    # Of a parameter with copies the distinct parts lie one after the other, and each rank fills in
    # its own.
    slots = [ranks.size // place.copies for _, place in partial]
    sizes = [p.numel() * n for (p, _), n in zip(partial, slots, strict=True)]
    flat = torch.zeros(sum(sizes), dtype=wide, device=partial[0][0].device)
    own = []
    for (p, place), n, slice_ in zip(partial, slots, flat.split(sizes), strict=True):
        view = slice_.view(n, *p.shape)[place.index]
        own.append(view)
        if (gradient := _gradient(p)) is not None:
            view.copy_(gradient)
    ranks.sum_(flat)
    for (p, _), view in zip(partial, own, strict=True):
        gradient = _gradient(p)
        if gradient is None:
            p.grad = view.to(p.dtype)
        else:
            gradient.copy_(view)


@torch.no_grad()
def grad_norm(model: nn.Module, *, group: RanksLike = None) -> Tensor:
    """The 2-norm of all gradients of the whole model, of which each element counts once.
    Collective: every rank of the group must call it.

    Call `sync_partial_grads` before. A parameter that several ranks hold alike counts on the first
    of them.

    Args:
        model: with the gradients, in `grad` or `main_grad`.
        group: see `RanksLike`; the group that the layers were made with. A mesh, where placements
            say that gradients are summed over some of the data and context parallel ranks: the
            others hold other elements, which count too.

    Returns:
        An fp64 scalar, the same on every rank.

    Raises:
        ValueError: there are such placements, and group is no mesh.
    """
    ranks, placements = Ranks.of(group), Placement.of(model)
    mesh = group if isinstance(group, Mesh) else None
    own = own_ranks(model, mesh, who="grad_norm")
    counted: dict[tuple[str, ...], list[Tensor]] = {axes: [] for axes in _other_axes(own.values())}
    for name, p in model.named_parameters():
        place = placements.get(name)
        first = place.first if place is not None else ranks.rank == 0
        if first and (gradient := _gradient(p)) is not None:
            counted[_other_axes([own[id(p)]])[-1] if id(p) in own else ()].append(gradient)
    device = next((p.device for p in model.parameters()), None)
    norms = [
        norm_over_groups(
            gradients,
            groups=[ranks] if mesh is None or not axes else [ranks, Ranks.of(mesh.group(axes))],
            device=device,
        )
        for axes, gradients in counted.items()
    ]
    return norms[0] if len(norms) == 1 else torch.stack(norms).square().sum().sqrt()


def _other_axes(own: Iterable[OwnRanks]) -> list[tuple[str, ...]]:
    """The axes of data parallelism along which parameters of these ranks differ, sorted; those of
    others, (), in front."""
    found = {tuple(axis for axis in DATA_AXES if axis not in each.axes) for each in own}
    return [(), *sorted(found)]


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, *, group: RanksLike = None) -> Tensor:
    """Scales all gradients by max_norm / (norm + 1e-6), at most 1, as
    torch.nn.utils.clip_grad_norm_ does. Collective: every rank of the group must call it.

    Args:
        model: see `grad_norm`.
        max_norm: the 2-norm that the gradients have at most afterwards.
        group: see `grad_norm`.

    Returns:
        The norm before, see `grad_norm`.
    """
    norm = grad_norm(model, group=group)
    factor = clip_factor(norm, max_norm)
    for p in model.parameters():
        if (gradient := _gradient(p)) is not None:
            gradient.mul_(factor.to(gradient.device))
    return norm


def _gradient(parameter: Tensor) -> Tensor | None:
    main = getattr(parameter, "main_grad", None)
    found: Tensor | None = main if main is not None else parameter.grad
    if found is not None and found.layout == torch.strided:
        require_memory(found, f"the gradient of a parameter of shape {tuple(parameter.shape)}")
    return found
