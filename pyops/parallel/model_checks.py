"""What `parallelize` refuses before it changes anything."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pyops.flat import Placement
from pyops.mesh import Mesh
from pyops.parallel.fused_head import head_name
from pyops.parallel.losses import CountedLoss, LabelLoss
from pyops.parallel.plan import ParallelPlan
from pyops.parallel.stages.layered_model import LayeredModel
from pyops.tensor_parallel import RowParallelLinear

__all__ = ["check_loss", "check_mesh", "check_model", "check_optimizer", "described"]

WRAPPERS = (DataParallel, DistributedDataParallel)


def check_optimizer(optimizer: object) -> None:
    """Refuse what can't make the optimizer of some parameters; None stands for no training.

    Raises:
        TypeError: It is an optimizer that is made already, or can't be called.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise TypeError(
            f"optimizer is a {name} that is made already, of parameters that are about to be "
            f"shared out; give what makes it: lambda params: {name}(params, lr=1e-4)"
        )
    if optimizer is not None and not callable(optimizer):
        raise TypeError(
            f"optimizer is {optimizer!r}; give what makes it of a list of parameters: "
            "lambda params: pyops.optim.AdamW(params, lr=1e-4); or None to evaluate and generate"
        )


def check_loss(model: nn.Module, plan: ParallelPlan, loss: CountedLoss) -> None:
    """Refuse a loss that is computed in the last layer, where there is no such layer, or the plan
    leaves it alone.

    Args:
        model: Not changed yet.
        plan: As given.
        loss: Of the model.

    Raises:
        ValueError: It can't be computed there.
    """
    if not isinstance(loss, LabelLoss) or loss.in_head is None:
        return
    if head_name(model) is None:
        raise ValueError(
            f"loss.in_head is computed in the last layer, but {type(model).__name__} has no linear "
            "layer alone that gives the logits of a vocabulary; give a loss of whole logits"
        )
    for name, off in (("sequence_parallel", False), ("fused_loss", True), ("cp", 1)):
        if (value := getattr(plan, name)) != off:
            raise ValueError(
                f"ParallelPlan: {name} is {value}, with which no loss is computed in the last "
                f"layer, as loss.in_head is; set it to {off}"
            )


def check_mesh(mesh: object, plan: ParallelPlan) -> None:
    """Refuse what is no mesh, or one of other sizes than the plan's.

    Raises:
        TypeError: It is no pyops.mesh.Mesh.
        ValueError: It has another number of ranks along "tp", "pp" or "cp".
    """
    if mesh is None:
        return
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}; give pyops.mesh.Mesh(pyops.mesh.Axes(pp=..., "
            "dp=..., tp=...)), or leave it out"
        )
    for axis in ("tp", "pp", "cp"):
        if mesh.size(axis) != getattr(plan, axis):
            raise ValueError(
                f"the mesh has {mesh.size(axis)} ranks along {axis!r}, but the plan's {axis} is "
                f"{getattr(plan, axis)}; make the mesh with the plan's sizes, or leave it out"
            )


def described(model: nn.Module) -> str:
    """The model's class and its parameters, in a few words: the same of models that are alike.

    Args:
        model: On any device.
    """
    cut = Placement.of(model)  # of a model that was made tensor parallel
    shapes = [
        (name, cut[name].global_shape if name in cut else tuple(p.shape), p.requires_grad)
        for name, p in model.named_parameters()
    ]
    mark = hashlib.blake2b(repr(shapes).encode(), digest_size=4).hexdigest()
    number = sum(math.prod(shape) for _, shape, _ in shapes)
    return f"a {type(model).__name__} of {number:,} parameters (names and shapes: {mark})"


def check_model(
    model: nn.Module,
    plan: ParallelPlan,
    *,
    layered: LayeredModel | None = None,
    trains: bool = True,
) -> None:
    """Refuse a model that can't be shared out.

    Args:
        model: As given, or as made from a folder.
        plan: How it is to be shared out.
        layered: What it says of its layers, where it was written for several ranks.
        trains: Whether it is to be trained.

    Raises:
        ValueError: It is wrapped, shared out already, on a device, or has nothing to train.
    """
    name = type(model).__name__
    if isinstance(model, WRAPPERS) or hasattr(model, "_orig_mod") or _is_fsdp(model):
        raise ValueError(
            f"the model is wrapped in {name}; give the module within it, which parallelize shares "
            "out itself"
        )
    if layered is not None:
        _check_layered(layered, plan)
    elif any(getattr(module, "placements", None) for module in model.modules()):
        raise ValueError(
            "the model was cut by tensor parallelism already; give it as transformers makes it, "
            "and the cut by ParallelPlan(tp=...)"
        )
    if any(hasattr(p, "part_of") or hasattr(p, "flat_layout") for p in model.parameters()):
        raise ValueError(
            "the model belongs to another trainer or ZeroOptimizer; make a new one for this trainer"
        )
    devices = {p.device.type for p in model.parameters()} - {"cpu", "meta"}
    if devices:
        raise ValueError(
            f"the model is on {', '.join(sorted(devices))} already, whole; give it on the CPU or a "
            "folder, and parallelize(device=...)"
        )
    if trains and not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            f"no parameter of {name} requires a gradient: there is nothing to train; unfreeze some "
            "(requires_grad_(True)), or give optimizer=None to evaluate and generate"
        )
    if layered is not None:
        return
    if plan.cp > 1:
        _check_rows(model, plan)
    if plan.sequence_parallel and plan.tp == 1:
        raise ValueError(
            "sequence_parallel is True, but tp is 1: there are no ranks to share the tokens; set "
            "tp to 2 or more, or sequence_parallel to False"
        )


def _check_rows(model: nn.Module, plan: ParallelPlan) -> None:
    """Refuse a model whose tokens can't be shared out, by what its config says."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"ParallelPlan: cp is {plan.cp}, but {name} has an encoder and a decoder, whose rows "
            "are of two lengths; set cp to 1"
        )
    heads = getattr(config, "num_attention_heads", None)
    if plan.cp_method == "ulysses" and isinstance(heads, int) and heads // plan.tp < plan.cp:
        raise ValueError(
            f"ParallelPlan: cp is {plan.cp} with cp_method 'ulysses', whose ranks exchange heads, "
            f"but {name} has {heads} heads over tp {plan.tp}: set cp to {max(heads // plan.tp, 1)} "
            "or less, or cp_method to 'gather' or 'ring'"
        )


def _check_layered(layered: LayeredModel, plan: ParallelPlan) -> None:
    """Refuse what does not fit a model that was written for several ranks."""
    name = type(layered.module).__name__
    if plan.tensor_parallel is not None:
        raise ValueError(
            f"ParallelPlan: tensor_parallel is {dict(plan.tensor_parallel)!r}, but the layers of "
            f"{name} are cut when it is made; leave it out"
        )
    for module in layered.module.modules():
        if isinstance(module, RowParallelLinear) and module.plan.ranks.size != plan.tp:
            raise ValueError(
                f"ParallelPlan: tp is {plan.tp}, but {name} was made for {module.plan.ranks.size} "
                "ranks; make it with the group of the plan's mesh"
            )
    for key in ("cp_method", "cp_order"):
        if (given := getattr(plan, key)) != getattr(ParallelPlan, key):
            raise ValueError(
                f"ParallelPlan: {key} is {given!r}, but {name} was made with its own; leave it "
                "out, and make the model with ContextRanks.of(mesh, method=...) and order="
            )
    if (found := getattr(layered.module, "num_context_ranks", 1)) != plan.cp:
        raise ValueError(
            f"ParallelPlan: cp is {plan.cp}, but {name} shares out the tokens of its rows over "
            f"{found} ranks; make it with context=ContextRanks.of(mesh) of the plan's mesh"
        )
    counts = {len(layered.names), len(layered.costs), len(layered.module.layers())}
    if len(counts) > 1:
        raise ValueError(
            f"LayeredModel: {len(layered.names)} names and {len(layered.costs)} costs, but {name} "
            f"has {len(layered.module.layers())} layers; give one of each for every layer"
        )


def _is_fsdp(model: nn.Module) -> bool:
    return any("FSDP" in kind.__name__ for kind in type(model).__mro__)
