"""A model whose rows of tokens ranks are to share out is tried before it is changed: a small copy
on virtual ranks has the outputs and the gradients of the uncut copy.

    copy, whole rows                       y, gradients
    copies on ranks that share them out    y of own tokens; gradients, to be summed

So a model that mixes tokens by something else than attention that goes over ranks (a convolution, a
pooling, products of its own), or that numbers its tokens by itself, is refused and never trained.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyops.comm.collectives.transport import run_virtual
from pyops.context_parallel import ContextRanks, Order
from pyops.models.context import TokenContext
from pyops.parallel.rows.attention_calls import classes_that_attend, share_functions
from pyops.parallel.rows.registry import RegistryCalls, go_by_registry, tells_places
from pyops.parallel.rows.shared_tokens import MASK, SharedTokens, places_argument
from pyops.tensor_parallel.convert.check.example_inputs import examples
from pyops.tensor_parallel.convert.check.trial_copy import trial_copy

__all__ = ["RowsPlan", "find_rows_plan", "share_tokens"]

MOST_RANKS = 4
NEAR = 1e-3  # of float32, relative to the norm; what is wrong is of the size of the numbers
WAYS = "transformers' registry, scaled_dot_product_attention or nn.MultiheadAttention"


@dataclass(frozen=True)
class RowsPlan:
    """How a model's rows of tokens are shared out, found before it is changed."""

    registry: bool
    """Whether its attention goes by transformers' registry."""
    documents: bool
    """Whether positions that begin anew keep documents apart."""
    classes: frozenset[str]
    """Of modules that call torch's attention functions, where it does not."""


def share_tokens(
    model: nn.Module, plan: RowsPlan, context: TokenContext
) -> tuple[SharedTokens, Callable[[], None]]:
    """Let a model take own tokens and see those of all ranks, in place.

    Args:
        model: Whole, or cut by tensor parallelism.
        plan: Of the model.
        context: How tokens are shared out.

    Returns:
        What cuts its batches; and what puts back what is not the modules' own.
    """
    accepted = frozenset(inspect.signature(model.forward).parameters)
    tokens = SharedTokens(context, accepted, whole_mask=plan.registry, documents=plan.documents)
    if not plan.registry:
        share_functions(model, context, plan.classes)
        return tokens, lambda: None
    calls = RegistryCalls(context)
    undo = go_by_registry(model, calls)
    model.register_forward_pre_hook(calls.enter, with_kwargs=True)
    return tokens, undo


def find_rows_plan(
    model: nn.Module,
    lists: Sequence[str],
    *,
    ranks: int,
    method: str,
    order: str,
    example_inputs: Any = None,
) -> RowsPlan:
    """Try a small copy of a model.

    Args:
        model: The model; its parameters may be on the meta device, its buffers not.
        lists: The names of its lists of blocks.
        ranks: That are to share rows.
        method: Of attention over them.
        order: Of tokens.
        example_inputs: Arguments of its forward; None: made up from the model's config.

    Raises:
        ValueError: Its tokens can't be shared out, with the reason.
    """
    reasons = []
    trial = _Trial(min(ranks, MOST_RANKS), method, order)
    for args, kwargs in examples(model, example_inputs):
        try:
            small = trial_copy(model, torch.float32, list(lists))
            return trial.plan_for(small, _named(small, args, kwargs, trial.unit))
        except ValueError as error:
            reasons.append(str(error))
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
    raise ValueError(
        f"ParallelPlan: cp is {ranks}, but the tokens of {type(model).__name__} can't be shared "
        f"out: {reasons[0][:700]}; set cp to 1, or give example_inputs= (a mapping of arguments' "
        "names) if its forward takes others"
    )


def _named(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], unit: int
) -> dict[str, Any]:
    """The arguments by name, of rows that are long enough for the ranks."""
    given = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    given.update(given.pop("kwargs", {}))
    first = next((x for x in given.values() if isinstance(x, Tensor) and x.dim() > 1), None)
    if first is None:
        raise ValueError("its example inputs have no tokens [rows, T, ...]")
    T = first.shape[1]
    index = torch.arange(max(unit, -(-T // unit) * unit)) % T
    found = {
        name: x.index_select(1, index)
        if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == T
        else x
        for name, x in given.items()
    }
    if "use_cache" in inspect.signature(model.forward).parameters:
        found["use_cache"] = False
    return found


class _Trial:
    """On virtual ranks.

    Args:
        ranks: How many.
        method: Of attention.
        order: Of tokens.
    """

    def __init__(self, ranks: int, method: str, order: str) -> None:
        self.ranks, self.method, self.order = ranks, method, order
        self.unit = 4 * ranks

    def plan_for(self, small: nn.Module, given: dict[str, Any]) -> RowsPlan:
        """How the copy's tokens are shared out.

        Raises:
            ValueError: They can't be.
        """
        small.requires_grad_(True)
        if tells_places(small) and _goes_by_registry(small):
            plan = RowsPlan(registry=True, documents=False, classes=frozenset())
            self.compare(small, plan, _with_hidden_keys(given))
            return RowsPlan(True, self._keeps_documents(small, given), frozenset())
        with torch.no_grad():
            classes = classes_that_attend(small, lambda: small(**given))
        plan = RowsPlan(registry=False, documents=False, classes=classes)
        self.compare(small, plan, given)
        return plan

    def _keeps_documents(self, small: nn.Module, given: dict[str, Any]) -> bool:
        tokens = given["input_ids"]
        half = tokens.shape[1] // 2 - 1
        places = torch.arange(tokens.shape[1])
        places = torch.where(places < half, places, places - half).expand(len(tokens), -1)
        plan = RowsPlan(registry=True, documents=True, classes=frozenset())
        try:
            self.compare(small, plan, {**given, "position_ids": places})
        except ValueError:
            return False
        return True

    def compare(self, small: nn.Module, plan: RowsPlan, given: dict[str, Any]) -> None:
        """Whole rows, and rows that are shared out.

        Raises:
            ValueError: Something differs.
        """
        found = [
            copy.deepcopy(small, {id(p): nn.Parameter(p.detach()) for p in small.parameters()})
            for _ in range(self.ranks)
        ]
        small.zero_grad()
        expected = _outputs(small(**given))
        T = next(x for x in given.values() if isinstance(x, Tensor) and x.dim() > 1).shape[1]
        for y in expected:
            if y.dim() < 2 or y.shape[1] != T:
                raise ValueError(
                    f"it returns a tensor {list(y.shape)}, not one result for each of the {T} "
                    "tokens of a row"
                )
        weights = [_weights(y, given.get(MASK) if plan.registry else None) for y in expected]
        _weighted(expected, weights).backward()

        def body(transport: Any) -> list[Tensor]:
            model = found[transport.rank]
            ranks = ContextRanks.of(transport, method=self.method)
            tokens, _ = share_tokens(model, plan, TokenContext(ranks, self.order))
            with torch.enable_grad():
                outputs = _outputs(model(**tokens.own(given)))
                row = tokens.context.row(T)
                own = [row.shard(w) for w in weights]
                for y, w in zip(outputs, own, strict=True):
                    if y.shape != w.shape:
                        raise ValueError(
                            f"a rank that has {w.shape[1]} of {T} tokens gets a result "
                            f"{list(y.shape)} in the place of {list(w.shape)}"
                        )
                _weighted(outputs, own).backward()
            return [(y * (w != 0)).detach() for y, w in zip(outputs, own, strict=True)]

        parts = run_virtual(self.ranks, body)
        order = Order.of(self.order, length=T, ranks=self.ranks)
        for number, (y, w) in enumerate(zip(expected, weights, strict=True)):
            whole = order.unshard([each[number] for each in parts])
            self._near(whole, (y * (w != 0)).detach(), "its outputs are", small)
        # Some, of biases of keys for one, are nothing but rounding.
        floor = 1e-2 * max(float(p.grad.norm()) for p in small.parameters() if p.grad is not None)
        grads = [dict(each.named_parameters()) for each in found]
        for name, p in small.named_parameters():
            own = [g for each in grads if (g := each[name].grad) is not None]
            if p.grad is None and not own:
                continue
            total = torch.stack(own).sum(0) if own else torch.zeros_like(p)
            like = p.grad if p.grad is not None else torch.zeros_like(p)
            self._near(total, like, f"the gradient of {name} is", small, floor=floor)

    def _near(
        self,
        found: Tensor,
        expected: Tensor,
        what: str,
        small: nn.Module,
        *,
        floor: float = 1e-6,
    ) -> None:
        scale = max(float(expected.norm()), floor)
        apart = float((found - expected).norm())
        if apart <= NEAR * scale:
            return
        places = places_argument(inspect.signature(small.forward).parameters)
        told = (
            f"is told the places of tokens as {places}"
            if places
            else ("takes neither position_ids nor positions, and may number its tokens by itself")
        )
        raise ValueError(
            f"on {self.ranks} ranks {what} not that of whole rows ({apart / scale:.1%} "
            f"apart in the check): attention that sees the tokens of all ranks goes by {WAYS}, "
            f"nothing else may mix tokens, and the model {told}"
        )


def _goes_by_registry(small: nn.Module) -> bool:
    """Whether the class of a model of transformers lets its attention be set."""
    can = getattr(small, "_can_set_attn_implementation", None)
    return can is not None and bool(can())


def _with_hidden_keys(given: dict[str, Any]) -> dict[str, Any]:
    """With a mask that leaves the last tokens of a row out."""
    tokens = given["input_ids"]
    mask = torch.ones_like(tokens, dtype=torch.int64)
    mask[-1, -3:] = 0
    return {**given, MASK: mask}


def _outputs(output: Any) -> list[Tensor]:
    """The logits, or all results of a model that has none."""
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    found = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not found:
        raise ValueError("none of its outputs has a gradient")
    return found


def _weighted(results: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    sums = [(y * w).sum() for y, w in zip(results, weights, strict=True)]
    return torch.stack(sums).sum()


def _weights(y: Tensor, mask: Tensor | None) -> Tensor:
    """Of a sum of results, each another; 0 where a token is left out."""
    weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).cos().view(y.shape)
    if mask is None:
        return weights
    return weights * mask.view(*mask.shape, *[1] * (y.dim() - 2)).to(y.dtype)
