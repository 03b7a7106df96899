"""parallelize: an existing transformer, its layers swapped in place for those that the ranks of a
group share.

    model = transformers.GPT2LMHeadModel(config)              the same on every rank
    report = parallelize(model, group=tp_group)               by the plan for its class
    report = parallelize(model, group=tp_group, plan={
        "attn": "attention", "attn.[qkv]": "columns", "attn.out": "rows",
        "ffn.0": "columns", "ffn.2": "rows"})

    GPT2Attention                       rank 0          rank 1
      Enter      x           -->        x               x               backward: one sum of dx
      c_attn     q k v       -->        heads 0 1       heads 2 3
      c_proj     rows        -->        heads 0 1  sum  heads 2 3

The modules' own code runs on, with fewer heads. Plans are data, in plans.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pyops.comm.agreement import gather, on_first_rank, ranks_agree
from pyops.tensor_parallel.convert.check.module_snapshot import Snapshot
from pyops.tensor_parallel.convert.check.plan_trial import try_plan
from pyops.tensor_parallel.convert.plans import plan_of
from pyops.tensor_parallel.convert.replace_layers import Report, replace_layers
from pyops.tensor_parallel.convert.replacement_plan import ReplacementPlan
from pyops.tensor_parallel.functional.ranks import Ranks, RanksLike

__all__ = ["Report", "parallelize"]


def parallelize(
    model: nn.Module,
    *,
    group: RanksLike = None,
    plan: Mapping[str, str] | None = None,
    sequence_parallel: bool = False,
    gather_logits: bool = True,
    check: bool = True,
    example_inputs: Any = None,
) -> Report:
    """Cuts `model` over the ranks of `group`, in place. Collective: every rank of the group must
    call it.

    Call it before the optimizer is made. Parameters keep their names; a Conv1D's weight then lies
    as [out, in], packed q, k, v as [3, out, in]. What the plan does not name stays whole on every
    rank, and is listed in the report. Dropout stays torch's: seed it alike on the ranks of the
    group, or their tokens drift apart. Hooks are on the modules, so model.forward must not be
    called past them.

    Args:
        model: with the same values on every rank of the group.
        group: the ranks, see `RanksLike`; None: the default process group.
        plan: {pattern of module names: kind}, see pyops.tensor_parallel.convert.plans; None: by the
            classes of the model's blocks, see pyops.tensor_parallel.convert.architectures.
        sequence_parallel: between the blocks each rank holds its part of the tokens only; the
            gradients of what is whole there are parts, which `sync_partial_grads`, or
            ZeroOptimizer(tp_group=), sums.
        gather_logits: the head's logits are whole on every rank, so that any loss of them works;
            otherwise each rank has those of its part of the vocabulary, for
            `vocab_parallel_cross_entropy`, and the model must not be asked for its loss.
        check: before anything is changed, rank 0 cuts a copy over virtual ranks in its own process,
            with values drawn anew, and compares outputs and all gradients with those of the uncut
            copy. It takes a forward and a backward of a few tokens through two blocks of each sort
            in fp64 on the CPU, twice, and memory for five such copies. With buffers on the meta
            device nothing is checked, as the report says.
        example_inputs: for that check, a tensor, a tuple of arguments, or a mapping of names to
            them. None: tokens, pixels or sounds made up from the model's config, as those of
            transformers have one.

    Returns:
        A Report of what was cut, what stays whole, and what was checked.

    Raises:
        ValueError: on every rank, with the model as it was: no plan for these classes, a plan that
            names no module, a module that can't be cut, heads that can't be split (with the sizes
            that can), parameters within attention of which the plan does not say whether their
            gradients are parts, a model that is parallel already, models that differ between the
            ranks, a plan under which outputs or gradients are not those of the uncut model (with
            the first that differs).
        TypeError: on every rank: the model is no module, or the plan no mapping; on this rank:
            `group` is no group that it is in.
    """
    ranks = Ranks.of(group)
    options = {"sequence_parallel": sequence_parallel, "gather_logits": gather_logits}
    with ranks_agree(ranks.group):
        replacements = ReplacementPlan(model, ranks, plan, **options)
    if ranks.size > 1:
        _check_same(model, {"plan": replacements.kinds, **options, "check": check}, ranks)
    checked = "nothing, with check=False"
    if check:
        checked = on_first_rank(
            lambda: _try(model, replacements, plan, example_inputs), group=ranks.group
        )
    before = Snapshot(model)
    try:
        with ranks_agree(ranks.group):
            report = replace_layers(model, replacements)
    except BaseException:
        before.restore()
        raise
    report.checked = checked
    return report


def _try(
    model: nn.Module,
    replacements: ReplacementPlan,
    plan: Mapping[str, str] | None,
    example_inputs: Any,
) -> str:
    """What the trial of the plan on virtual ranks found equal, see plan_trial.py."""
    whole_plan = plan_of(model) if plan is None else plan

    def cut(part: nn.Module, ranks: Ranks) -> None:
        replace_layers(
            part,
            ReplacementPlan(
                part,
                ranks,
                whole_plan,
                sequence_parallel=replacements.sequence_parallel,
                gather_logits=True,
                complete=False,
            ),
        )

    blocks = [name for name, kind in replacements.kinds.items() if kind == "blocks"]
    return try_plan(model, cut, replacements.ranks.size, blocks=blocks, given=example_inputs)


def _check_same(model: nn.Module, options: Mapping[str, Any], ranks: Ranks) -> None:
    """ValueError, on every rank, unless options and parameters, with their values, are those of
    rank 0."""
    own = [(key, repr(value)) for key, value in options.items()]
    own += [(name, _described(p)) for name, p in model.named_parameters()]
    first, *others = gather(own, group=ranks.group)
    for rank, other in enumerate(others, start=1):
        for (name, a), (other_name, b) in zip(first, other, strict=False):
            if (name, a) != (other_name, b):
                raise ValueError(
                    f"parallelize: the ranks' models differ: {name} ({a}) on rank 0, "
                    f"{other_name} ({b}) on rank {rank}; start every rank from the same seed, or "
                    "from the same files, with the same plan"
                )
        if len(other) != len(first):
            raise ValueError(
                f"parallelize: the ranks' models differ: {len(first) - len(options)} parameters "
                f"on rank 0, {len(other) - len(options)} on rank {rank}; make the same model on "
                "every rank"
            )


def _described(p: nn.Parameter) -> str:
    """Shape, dtype and a hash of the values of a parameter."""
    known = not p.is_meta and p.numel() > 0
    values = int(torch.hash_tensor(p.detach()).view(torch.int64)) if known else 0
    dtype = str(p.dtype).removeprefix("torch.")
    trained = "trained" if p.requires_grad else "frozen"
    return f"{list(p.shape)}, {dtype}, {trained}, values of hash {values & (1 << 64) - 1:x}"
