"""KeyedForward: a module's forward within which the dropout of torch's functions draws from a
KeyedStream."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pyops.parallel.dropout.keyed_attention import AttentionCall, keyed_attention
from pyops.parallel.dropout.keyed_stream import KeyedStream
from pyops.torch_private import with_functions

__all__ = ["KeyedForward", "KeyedFunctions"]


class DropoutCall(NamedTuple):
    """The arguments of torch.nn.functional.dropout, in their order."""

    input: Tensor
    p: float = 0.5
    training: bool = True
    inplace: bool = False


class KeyedFunctions(TorchFunctionMode):
    """Within, torch.nn.functional.dropout and the dropout of scaled_dot_product_attention draw from
    a stream, also where multi_head_attention_forward calls them. All other calls, and these two
    with a probability of 0, are torch's own.

    Args:
        stream: Where they draw from.
    """

    def __init__(self, stream: KeyedStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is functional.multi_head_attention_forward:  # which calls the two within
            func = with_functions(
                func, dropout=self._dropout, scaled_dot_product_attention=self._attention
            )
        return func(*args, **kwargs)

    def _dropout(self, *args: Any, **kwargs: Any) -> Tensor:
        call = DropoutCall(*args, **kwargs)
        if call.training and call.p > 0.0:
            return self.stream.drop(call.input, call.p)
        return functional.dropout(*args, **kwargs)

    def _attention(self, *args: Any, **kwargs: Any) -> Tensor:
        call = AttentionCall(*args, **kwargs)
        if call.dropout_p > 0.0:
            return keyed_attention(call, self.stream.of_weights)
        return functional.scaled_dot_product_attention(*args, **kwargs)


class KeyedForward:
    """Stands in for a module's forward: in train mode it runs within `KeyedFunctions`.

    Args:
        module: Whose forward it is.
        stream: Where it draws from.
    """

    def __init__(self, module: nn.Module, stream: KeyedStream) -> None:
        # As of a method: recomputation finds the module, and inspect.signature the arguments.
        self.__self__ = module
        self.__wrapped__ = module.forward
        self.stream = stream

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.__self__.training:
            return self.__wrapped__(*args, **kwargs)
        with KeyedFunctions(self.stream):
            return self.__wrapped__(*args, **kwargs)
