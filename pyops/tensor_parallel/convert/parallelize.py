"""parallelize: an existing transformer, its layers swapped in place for those that the ranks of a
group share.

    model = transformers.GPT2LMHeadModel(config)                        the same on every rank
    report = parallelize(model, group=tp_group)                         by the plan for its class
    report = parallelize(model, group=tp_group, plan={"attn": "attention", "attn.[qkv]": "columns", "attn.out": "rows",
                                                      "ffn.0": "columns", "ffn.2": "rows"})

    GPT2Attention                       rank 0          rank 1
      Enter      x           -->        x               x               backward: one sum of dx
      c_attn     q k v       -->        heads 0 1       heads 2 3
      c_proj     rows        -->        heads 0 1  sum  heads 2 3

The modules' own code runs on, with fewer heads. Plans are data, in plans.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from pyops.comm.agreement import gather, on_all_ranks, on_first_rank
from pyops.tensor_parallel.convert.blueprint import Blueprint
from pyops.tensor_parallel.convert.check.restore import Snapshot
from pyops.tensor_parallel.convert.check.trial import try_plan
from pyops.tensor_parallel.convert.perform import Report, perform
from pyops.tensor_parallel.convert.plans import plan_of

__all__ = ["Report", "parallelize"]

T = TypeVar("T")


def parallelize(
    model: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    plan: Mapping[str, str] | None = None,
    sequence_parallel: bool = False,
    gather_logits: bool = True,
    check: bool = True,
    example_inputs: Any = None,
) -> Report:
    """Cut `model` over the ranks of `group`, in place. Call it before the optimizer is made, with
    the same values everywhere.

    Args:
        plan: {pattern of module names: kind}, see pyops.tensor_parallel.convert.plans; None: by the classes of the model's
            blocks, see pyops.tensor_parallel.convert.architectures.
        sequence_parallel: between the blocks each rank holds its part of the tokens only; the gradients of what is whole there
            are parts, which `finish_gradients`, or ZeroOptimizer(tp_group=), sums.
        gather_logits: the head's logits are whole on every rank, so that any loss of them works; otherwise each rank has those
            of its part of the vocabulary, for `vocab_parallel_cross_entropy`, and the model must not be asked for its loss.
        check: before anything is changed, rank 0 cuts a copy over virtual ranks in its own process, with values drawn anew, and
            compares outputs and all gradients with those of the uncut copy. It takes a forward and a backward of a few tokens
            through two blocks of each sort in fp64 on the CPU, twice, and memory for five such copies. With buffers on the meta
            device nothing is checked, as the report says.
        example_inputs: for that check, a tensor, a tuple of arguments, or a mapping of names to them. None: tokens, pixels or
            sounds made up from the model's config, as those of transformers have one.

    Returns:
        A Report of what was cut, what stays whole, and what was checked.

    Parameters keep their names; a Conv1D's weight then lies as [out, in], packed q, k, v as [3,
    out, in]. What the plan does not name stays whole on every rank, and is listed in the report.
    Dropout stays torch's: seed it alike on the ranks of the group, or their tokens drift apart.
    Hooks are on the modules, so model.forward must not be called past them.

    Raises:
        ValueError: on every rank, with the model as it was: no plan for these classes, a plan that names no module, a module
            that can't be cut, heads that can't be split (with the sizes that can), parameters within attention of which the
            plan does not say whether their gradients are parts, a model that is parallel already, models that differ between
            the ranks, a plan under which outputs or gradients are not those of the uncut model (with the first that differs).
    """
    options: dict[str, Any] = {
        "sequence_parallel": sequence_parallel,
        "gather_logits": gather_logits,
    }
    blueprint = _alike(lambda: Blueprint(model, group, plan, **options), group)
    if blueprint.ranks.size > 1:
        _check_same(model, {"plan": blueprint.kinds, **options, "check": check}, group)
    checked = "nothing, with check=False"
    if check:
        checked = _checked(
            model,
            blueprint,
            plan_of(model) if plan is None else plan,
            sequence_parallel,
            example_inputs,
        )
    before = Snapshot(model)
    try:
        report = _alike(lambda: perform(model, blueprint), group)
    except BaseException:
        before.restore()
        raise
    report.checked = checked
    return report


def _alike(function: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Its result, or on all ranks the error of any. A group of None is one rank alone, in whatever
    world."""
    return function() if group is None else on_all_ranks(function, group=group)


def _checked(
    model: nn.Module,
    blueprint: Blueprint,
    plan: Mapping[str, str],
    sequence_parallel: bool,
    example_inputs: Any,
) -> str:
    """The plan is tried on the first rank, see trial.py; its finding, or its error, on all."""

    def cut(part: nn.Module, group: Any) -> None:
        perform(
            part,
            Blueprint(
                part,
                group,
                plan,
                sequence_parallel=sequence_parallel,
                gather_logits=True,
                complete=False,
            ),
        )

    def tried() -> str:
        blocks = [name for name, kind in blueprint.kinds.items() if kind == "blocks"]
        return try_plan(model, cut, blueprint.ranks.size, blocks=blocks, given=example_inputs)

    return tried() if blueprint.group is None else on_first_rank(tried, group=blueprint.group)


def _check_same(
    model: nn.Module, options: Mapping[str, Any], group: dist.ProcessGroup | None
) -> None:
    """ValueError, on every rank, unless options and parameters, their values too, are those of rank
    0."""
    mine = [(key, repr(value)) for key, value in options.items()]
    for name, p in model.named_parameters():
        values = (
            0
            if p.is_meta or not p.numel()
            else int(torch.hash_tensor(p.detach()).view(torch.int64))
        )
        dtype, trained = (
            str(p.dtype).removeprefix("torch."),
            "trained" if p.requires_grad else "frozen",
        )
        mine.append(
            (
                name,
                f"{list(p.shape)}, {dtype}, {trained}, values of hash {values & (1 << 64) - 1:x}",
            )
        )
    everyone = gather(mine, group=group)
    for rank, theirs in enumerate(everyone):
        for (name, a), (other, b) in zip(everyone[0], theirs, strict=False):
            if (name, a) != (other, b):
                raise ValueError(
                    f"parallelize: the ranks' models differ: {name} ({a}) on rank 0, "
                    f"{other} ({b}) on rank {rank}; start "
                    "every rank from the same seed, or from the same files, with the same plan"
                )
        if len(theirs) != len(everyone[0]):
            raise ValueError(
                f"parallelize: the ranks' models differ: {len(everyone[0])} parameters "
                f"on rank 0, {len(theirs)} on rank {rank}"
            )
