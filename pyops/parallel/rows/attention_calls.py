"""Attention over ranks in the place of torch's functions, within the modules that call them.

    scaled_dot_product_attention(q, k, v, is_causal=)      q of own tokens -> the keys of all ranks
    torch.nn.MultiheadAttention, TransformerEncoderLayer   the same, without the weights

What attention over ranks can't do, such as a mask of pairs of own tokens, is refused with the name
of the module's class. Other functions are torch's own: that a model mixes tokens by these alone is
tried on a small copy (rows_trial.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pyops.models.context import TokenContext
from pyops.ops.attention import AttentionMask
from pyops.parallel.dropout.keyed_attention import AttentionCall
from pyops.tensor_parallel.convert.multihead import MultiheadAttention
from pyops.torch_private import disable_dynamo, with_functions

__all__ = ["class_name", "classes_that_attend", "share_functions"]

OF_TORCH = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def class_name(module: nn.Module) -> str:
    """The name of a module's class, with that of its file."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


class SharedFunctions(TorchFunctionMode):
    """Within, torch's attention functions see the tokens of all ranks.

    Args:
        module: That calls them; it may have a KeyedStream `keyed_dropout`.
        context: How tokens are shared out.
    """

    def __init__(self, module: nn.Module, context: TokenContext) -> None:
        super().__init__()
        self.module, self.context = module, context

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            given = inspect.signature(func).bind(*args, **kwargs).arguments
            if given.get("need_weights", True):
                raise self._refused("the weights of attention: call it with need_weights=False")
            func = with_functions(func, scaled_dot_product_attention=self._attention)
        return func(*args, **kwargs)

    def _refused(self, what: str) -> ValueError:
        return ValueError(
            f"{class_name(self.module)} asks for {what}; attention over ranks of context "
            "parallelism does not take it"
        )

    @disable_dynamo
    def _attention(self, *args: Any, **kwargs: Any) -> Tensor:
        call = AttentionCall(*args, **kwargs)
        q, k, v = call.query, call.key, call.value
        if call.attn_mask is not None:
            raise self._refused(
                f"a mask {list(call.attn_mask.shape)} of this rank's own tokens: give is_causal, "
                "or no mask"
            )
        if q.dim() not in (3, 4) or not q.dim() == k.dim() == v.dim():
            raise self._refused(f"queries of shape {list(q.shape)}: give [rows, heads, tokens, K]")
        if self.context.unpadded is not None and not call.is_causal:
            raise self._refused(
                f"attention to all tokens of rows of {self.context.unpadded}, which had to be "
                f"padded to {self.context.row_of(q.shape[-2]).order.length}: give rows of a length "
                "that the ranks divide"
            )
        q, k, v = ((x if x.dim() == 4 else x.unsqueeze(1)).transpose(1, 2) for x in (q, k, v))
        drops = None
        if call.dropout_p > 0.0:
            stream: Any = getattr(self.module, "keyed_dropout", None)
            if stream is None:
                raise self._refused(f"dropout {call.dropout_p} that is not drawn by counters")
            drops = stream.of_own_weights(q, call.dropout_p)
        documents = self.context.added(q.shape[1], len(q), q.device)
        seen = AttentionMask(causal=call.is_causal, documents=documents)
        y = self.context.row_of(q.shape[1]).attention(
            q, k, v, scale=call.scale, mask=seen, dropout=drops
        )
        y = y.transpose(1, 2)
        return y if call.query.dim() == 4 else y.squeeze(1)


class SharedForward:
    """Stands in for a module's forward, which then runs within `SharedFunctions`.

    Args:
        module: Whose forward it is.
        context: How tokens are shared out.
    """

    def __init__(self, module: nn.Module, context: TokenContext) -> None:
        # As of a method: recomputation finds the module, and inspect.signature the arguments.
        self.__self__ = module
        self.__wrapped__ = module.forward
        self.context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.context.paused:
            return self.__wrapped__(*args, **kwargs)
        with SharedFunctions(self.__self__, self.context):
            return self.__wrapped__(*args, **kwargs)


def share_functions(model: nn.Module, context: TokenContext, classes: Collection[str]) -> None:
    """Let modules see the tokens of all ranks in torch's attention functions, in place.

    Args:
        model: Whose modules.
        context: How tokens are shared out.
        classes: The names of their classes, see `classes_that_attend`. torch's own are always
            among them.
    """
    for module in model.modules():
        if isinstance(module, MultiheadAttention):  # torch's own, cut by tensor parallelism
            module.calls_torch = True
        if class_name(module) in classes or isinstance(module, (*OF_TORCH, MultiheadAttention)):
            module.forward = SharedForward(module, context)


def classes_that_attend(model: nn.Module, run: Callable[[], Any]) -> frozenset[str]:
    """The names of the classes of modules that call torch's attention functions.

    Args:
        model: A small copy.
        run: Calls it.
    """
    entered: list[nn.Module] = []
    found: set[str] = set()

    class Watching(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func is functional.scaled_dot_product_attention and entered:
                found.add(class_name(entered[-1]))
            return func(*args, **(kwargs or {}))

    def leave(*_: Any) -> None:
        entered.pop()

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda m, _: entered.append(m)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        with Watching():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return frozenset(found)
