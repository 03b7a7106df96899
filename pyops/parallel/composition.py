"""parallelize: a model and a plan in, a Trainer out.

The order, which this file states alone, for models of anybody's and for those that were written for
several ranks (`LayeredModel`), which begin with what is done in steps 2 and 3:

    1  checks            on every rank, before anything is changed
    2  tensor parallel   layers are cut over "tp"          pyops.tensor_parallel.parallelize
       rows of tokens    attention goes over "cp"          rows/
    3  keyed dropout     the same masks on every layout    dropout/
    4  recompute         modules that keep inputs alone    pyops.recompute.apply
    5  compile           block by block                    torch.compile
    6  pipeline          blocks of other ranks go          stages/
    7  ZeRO              parameters get their memory and   pyops.zero
                         values; states over "dp"
    8  fused loss        in the model's last layer         fused_head.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pyops import recompute, tensor_parallel
from pyops.comm.agreement import check_same, on_first_rank, ranks_agree
from pyops.context_parallel import ContextRanks
from pyops.host_heap import trim
from pyops.mesh import ALONE, Mesh, check_initialized
from pyops.models.context import TokenContext
from pyops.parallel.dropout.keyed_dropout import key_dropout
from pyops.parallel.fused_head import FusedHead, head_name
from pyops.parallel.losses import (
    IGNORED,
    CountedLoss,
    CountOfTerms,
    LabelLoss,
    PairLoss,
    SumOfRows,
    loss_of,
)
from pyops.parallel.model_checks import (
    check_loss,
    check_mesh,
    check_model,
    check_optimizer,
    described,
)
from pyops.parallel.optimizer_groups import OptimizerGroups
from pyops.parallel.plan import ParallelPlan
from pyops.parallel.rows.batches import accepted_names
from pyops.parallel.rows.rows_trial import RowsPlan, find_rows_plan, share_tokens
from pyops.parallel.rows.shared_tokens import SharedLoss, SharedTokens
from pyops.parallel.stages.block_lists import compile_blocks, find_block_lists
from pyops.parallel.stages.block_stages import BlockStagePlan, check_trained, stage_boundaries
from pyops.parallel.stages.layered_model import LayeredModel
from pyops.parallel.stages.layout_trial import find_layout
from pyops.parallel.stages.pipeline_layers import StagePlan
from pyops.parallel.stages.placeholder import meta_copy
from pyops.parallel.stages.staged_model import StagedModel
from pyops.parallel.trainer import Trainer, TrainerParts
from pyops.parallel.weights import ModelSource
from pyops.precision import PRECISIONS
from pyops.tensor_parallel.convert.check.module_snapshot import Snapshot
from pyops.tensor_parallel.convert.plans import plan_of
from pyops.zero import ZeroOptimizer

__all__ = ["parallelize"]

ONE_PROCESS = ParallelPlan()


def parallelize(
    model: nn.Module | LayeredModel | Path | str,
    plan: ParallelPlan = ONE_PROCESS,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] | None,
    mesh: Mesh | None = None,
    loss: CountedLoss | tuple[SumOfRows, CountOfTerms] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    example_inputs: Any = None,
) -> Trainer:
    """Share a model out over the ranks by a plan. A collective: every rank calls it alike.

    Args:
        model: A folder that save_pretrained of transformers wrote, of which each rank reads its
            part alone; or a module on the CPU with the same values on every rank, which is changed
            in place; or a `LayeredModel`, which was written for several ranks.
        plan: How it is shared out; by default every rank has all of it.
        optimizer: Makes the optimizer of a list of parameters, such as
            `lambda params: pyops.optim.AdamW(params, lr=1e-4)`, or its class; or `OptimizerGroups`
            where parameters differ in their options. None: the trainer evaluates and generates,
            and no parameter requires a gradient; there is no memory for gradients and states.
        mesh: The ranks; None: made by the plan.
        loss: Two functions, (what the model returns, batch) -> the sum over the rows, and batch ->
            by how many terms it is divided; or a `pyops.parallel.losses.CountedLoss`. None: the
            cross entropy of batch["labels"], of the next token for causal language models.
        seed: Of the dropout, whose masks are the same on every layout.
        device: Where the parameters are.
        example_inputs: Arguments of the model's forward for a few rows, which show how its blocks
            are called; None: made up from the config of a model of transformers.

    Returns:
        The Trainer.

    Raises:
        ValueError, TypeError: On every rank and with the model as it was, for a model, plan or
            optimizer that does not fit, with the fix.
    """
    with ranks_agree():
        check_initialized("parallelize")
        if not isinstance(plan, ParallelPlan):
            raise TypeError(f"plan is {plan!r}; give pyops.parallel.ParallelPlan(tp=2)")
        plan.validate()
        check_optimizer(optimizer)
        check_mesh(mesh, plan)
        axes = plan.axes(dist.get_world_size() if dist.is_initialized() else 1)
        source = ModelSource.of(model)
        trains = optimizer is not None
        check_model(source.model, plan, layered=source.layered, trains=trains)
        counted = loss_of(source.model, loss)
        check_loss(source.model, plan, counted)
        lists = []
        if plan.pp > 1 and source.layered is None:
            lists = find_block_lists(source.model, plan.pipeline.blocks)
    device = torch.device(device)
    check_same(
        {
            **{f"plan.{f.name}": _written(getattr(plan, f.name)) for f in fields(plan)},
            "seed": str(seed),
            "device": device.type,
            "loss": "None" if loss is None else _kind_of(counted),
            "optimizer": "given" if trains else "None",
            "the model": described(source.model),
        },
        who="parallelize",
    )
    mesh = mesh or Mesh(axes, device_type=device.type)
    found = _Found(
        rows=_plan_rows(source, plan, example_inputs),
        stages=_plan_stages(source, plan, lists, example_inputs, device, trains=trains),
        loss=counted,
        device=device,
        seed=seed,
        example_inputs=example_inputs,
    )
    before, undo = Snapshot(source.model), _Undo()
    try:
        parts = _compose(source, plan, mesh, optimizer, found, undo)
    except BaseException:
        undo.run()
        before.restore()
        raise
    trim()  # of what the checks of the cut have freed: several times the model, in small pieces
    return Trainer(parts)


@dataclass(frozen=True)
class _Found:
    """What is known before anything of the model is changed."""

    rows: RowsPlan | None
    """How ranks share out the tokens of rows; None: they do not, or the model does by itself."""
    stages: StagePlan | None
    """Of a pipeline."""
    loss: CountedLoss
    """Of whole rows."""
    device: torch.device
    """Of the parameters."""
    seed: int
    """Of the dropout."""
    example_inputs: Any
    """As given."""


def _compose(
    source: ModelSource,
    plan: ParallelPlan,
    mesh: Mesh,
    optimizer: Callable[..., torch.optim.Optimizer] | None,
    found: _Found,
    undo: _Undo,
) -> TrainerParts:
    """Steps 2 to 8."""
    loss, head, staged = found.loss, None, None
    trains = optimizer is not None
    tokens = _change_layers(source, plan, mesh, found, undo, trains=trains)
    if tokens is not None:
        loss = SharedLoss(loss, tokens)
    name = head_name(source.model)
    if found.stages is not None:
        staged = StagedModel(
            source.model,
            found.stages,
            mesh=mesh,
            loss=loss,
            named_arguments=accepted_names(source.model),
            gather_once=plan.pipeline.gather_once,
        )
    zero = _make_optimizer(source.model, plan, mesh, optimizer, source, found.device)
    source.finish()
    if staged is not None:
        staged.connect(zero)
    of_own = loss.of_own if isinstance(loss, SharedLoss) else loss
    if name is not None and plan.fused_loss and isinstance(of_own, LabelLoss):
        head = None if plan.sequence_parallel else _fuse(source.model, name, staged, of_own)
    return TrainerParts(
        model=source.model,
        optimizer=zero,
        mesh=mesh,
        plan=plan,
        loss=loss,
        staged=staged,
        head=head,
        save_folder=lambda folder: source.save(folder, mesh),
        seed=found.seed,
        layered=source.layered,
        tokens=tokens,
    )


class _Undo:
    """What puts back what is not the modules' own."""

    def __init__(self) -> None:
        self.run: Callable[[], None] = lambda: None


def _written(value: Any) -> str:
    """As repr, without the addresses of objects, which differ between ranks."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _kind_of(loss: CountedLoss) -> str:
    return "a pair of functions" if isinstance(loss, PairLoss) else type(loss).__name__


def _change_layers(
    source: ModelSource,
    plan: ParallelPlan,
    mesh: Mesh,
    found: _Found,
    undo: _Undo,
    *,
    trains: bool,
) -> SharedTokens | None:
    """Steps 2 to 5."""
    model, tokens = source.model, None
    if not trains:
        model.requires_grad_(False)
    if source.layered is None:
        _cut_layers(model, plan, mesh, found.example_inputs)
    with ranks_agree():
        if found.rows is not None:
            ranks = ContextRanks.of(mesh, method=plan.cp_method)
            tokens, undo.run = share_tokens(model, found.rows, TokenContext(ranks, plan.cp_order))
        if source.layered is None and trains:  # nothing drops in an evaluation
            context = None if tokens is None else tokens.context
            key_dropout(model, group=mesh.group("tp") or ALONE, context=context)
        if plan.recompute:
            _recompute(model, plan)
        if plan.compile:
            for blocks in _lists_of_blocks(source, plan):
                compile_blocks(blocks)
    return tokens


def _recompute(model: nn.Module, plan: ParallelPlan) -> None:
    offload = None if plan.recompute_offload == "none" else plan.recompute_offload
    try:
        recompute.apply(model, plan.recompute, offload=offload)
    except ValueError as error:
        raise ValueError(f"ParallelPlan: recompute: {error}") from None


def _fuse(model: nn.Module, name: str, staged: StagedModel | None, loss: LabelLoss) -> FusedHead:
    """Step 8."""
    head = FusedHead(
        model, model.get_submodule(name), shifts=loss.shifts, ignored=IGNORED, loss=loss.in_head
    )
    if staged is not None:
        staged.set_head(head)
    return head


def _plan_rows(source: ModelSource, plan: ParallelPlan, example_inputs: Any) -> RowsPlan | None:
    """How ranks share out the tokens of rows, found on the first rank."""
    if plan.cp == 1 or source.layered is not None:
        return None
    model = source.model
    try:
        lists = find_block_lists(model, plan.pipeline.blocks)
    except ValueError:
        lists = []  # a model without a list of blocks is tried whole
    return on_first_rank(
        lambda: find_rows_plan(
            model,
            lists,
            ranks=plan.cp,
            method=plan.cp_method,
            order=plan.cp_order,
            example_inputs=example_inputs,
        )
    )


def _plan_stages(
    source: ModelSource,
    plan: ParallelPlan,
    lists: list[str],
    example_inputs: Any,
    device: torch.device,
    *,
    trains: bool,
) -> StagePlan | None:
    """Where the stages begin. How a model of anybody's calls its blocks is found on the first
    rank."""
    model, options = source.model, plan.pipeline
    if plan.pp == 1:
        return None
    if (layered := source.layered) is not None:
        with ranks_agree():
            return layered.stage_plan(plan.schedule(), options.boundaries)
    layout = on_first_rank(lambda: find_layout(model, lists, example_inputs))
    with ranks_agree():
        boundaries = stage_boundaries(model, layout, plan.num_stages, options.boundaries)
        if trains:
            check_trained(model, layout, boundaries)
    shapes = meta_copy(model)
    if (precision := _precision_of(model, plan)) is not None:  # as ZeroOptimizer casts the model
        shapes.to(PRECISIONS[precision].dtype)
    return BlockStagePlan(layout, plan.schedule(), boundaries, shapes, device)


def _cut_layers(model: nn.Module, plan: ParallelPlan, mesh: Mesh, example_inputs: Any) -> None:
    """Tensor parallelism. With one rank too where the plan of the class is known: its parameters
    then lie as with several, and each layout reads the checkpoints of the others."""
    given = plan.tensor_parallel
    if plan.tp == 1 and given is None:
        try:
            plan_of(model)
        except ValueError:
            return
    tensor_parallel.parallelize(
        model,
        group=mesh.group("tp") or ALONE,
        plan=given,
        sequence_parallel=plan.sequence_parallel,
        check=plan.tp > 1,
        example_inputs=example_inputs,
    )


def _lists_of_blocks(source: ModelSource, plan: ParallelPlan) -> list[Iterable[nn.Module]]:
    if source.layered is not None:
        return [source.layered.blocks()]
    lists = find_block_lists(source.model, plan.pipeline.blocks)
    return [source.model.get_submodule(name).children() for name in lists]


def _make_optimizer(
    model: nn.Module,
    plan: ParallelPlan,
    mesh: Mesh,
    optimizer: Callable[..., torch.optim.Optimizer] | None,
    source: ModelSource,
    device: torch.device,
) -> ZeroOptimizer:
    config = replace(
        plan.zero,
        reduction="sum",
        max_grad_norm=plan.max_grad_norm,
        precision=_precision_of(model, plan),
        initialize=source.fill,
        device=device,
    )
    if isinstance(optimizer, OptimizerGroups):
        groups = optimizer.of(model)
        return ZeroOptimizer(model, optimizer.make, config, mesh=mesh, params=groups)
    return ZeroOptimizer(model, optimizer, config, mesh=mesh)


def _precision_of(model: nn.Module, plan: ParallelPlan) -> str | None:
    """To what the model is cast; None: it is what it should be. A folder may be of 16 bits, and a
    model of 64 stays one."""
    of_16_bits = any(p.is_floating_point() and p.itemsize == 2 for p in model.parameters())
    return None if plan.precision == "fp32" and not of_16_bits else plan.precision
