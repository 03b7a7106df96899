"""Dropout of a model of anybody's, by counters: the same masks, and so the same loss, on every
layout of ranks.

    key_dropout(model)                       once; after tensor parallelism, before recomputation
    set_keyed_dropout(model.named_modules(), seed=0, step=7, first_row=16)
                                             before the forward of rows 16, 17, ... of the batch

    torch.nn.Dropout                         becomes a KeyedDropout
    a module that calls torch's functions:   gets a child `keyed_dropout` (a KeyedStream), from
      functional.dropout                     which these calls draw; its own code runs on, with
      scaled_dot_product_attention(          whichever attention it has
        dropout_p=...)
    torch.nn.MultiheadAttention              the same
    DropPath of transformers, and the like   becomes a KeyedDropPath: whole rows fall

In eval mode all is torch's own. The first dimension of every tensor that is dropped from is that of
the rows, or of the rows' tokens. What draws in another way is refused: see unkeyed_layers.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from pyops.flat import Placement
from pyops.mesh import ALONE
from pyops.models.context import TokenContext
from pyops.parallel.dropout.keyed_forward import KeyedForward
from pyops.parallel.dropout.keyed_layers import KeyedDropout, KeyedDropPath
from pyops.parallel.dropout.keyed_stream import ColumnsOpen, KeyedStream
from pyops.parallel.dropout.unkeyed_layers import check_keyed, largest_probability
from pyops.random import key_of
from pyops.tensor_parallel import ColumnParallelLinear, Ranks, RanksLike, RowParallelLinear
from pyops.tensor_parallel.convert.multihead import MultiheadAttention
from pyops.tensor_parallel.convert.region_hooks import SplitTokens, Tokens

__all__ = ["KeyedDropout", "key_dropout", "set_keyed_dropout"]


def key_dropout(
    model: nn.Module, *, group: RanksLike = ALONE, context: TokenContext | None = None
) -> int:
    """Make the dropout of `model` a function of (seed, name of the module, step) and of the
    elements' places in the global batch, in place. Parameters, state_dict and names stay as they
    are; before each forward in train mode `set_keyed_dropout` must be called.

    Args:
        model: After pyops.tensor_parallel.parallelize, where its layers are to be cut.
        group: Over which they are cut, see `RanksLike`; by default they are whole.
        context: How ranks share out the tokens of rows; None: every rank has all.

    Returns:
        The number of modules that draw by counters now.

    Raises:
        ValueError: The layers are cut over another number of ranks, the model recomputes by
            transformers' gradient checkpointing, which would draw other masks the second time, or
            it has layers that draw in a way that can't be keyed. The model is as it was.
    """
    check_keyed(model, _calls_functions)
    cut = _layers_cut_by_rows(model, Ranks.of(group))
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ValueError(
                f"{name or type(module).__name__} recomputes by transformers' gradient "
                "checkpointing, which would draw other masks the second time; call "
                "model.gradient_checkpointing_disable() and name the modules in recompute"
            )
    columns_open, shared_out = ColumnsOpen(), _lists_shared_out(model)
    if cut:
        _watch_columns(model, columns_open)
    keyed: dict[int, KeyedDropout | KeyedDropPath] = {}
    streams: list[KeyedStream] = []
    for name, module in list(model.named_modules()):
        for child_name, child in list(module._modules.items()):
            p, drops_rows = _probability(child)
            if not p > 0.0:
                continue
            if id(child) not in keyed:
                rows, seen = _nearest(name, cut), columns_open
                if name.endswith(".lora_dropout"):
                    rows, seen = _of_adapter(name, cut)
                kind = KeyedDropPath if drops_rows else KeyedDropout
                new = kind(
                    p,
                    rows=rows,
                    columns_open=seen,
                    tokens=_tokens_of(name, shared_out),
                    context=context,
                )
                keyed[id(child)] = new.train(child.training)
            module._modules[child_name] = keyed[id(child)]
        if _calls_functions(module) and _may_drop(module):
            own_heads = isinstance(module, MultiheadAttention)
            seen = _always_open() if own_heads else columns_open
            stream = KeyedStream(_nearest(name, cut), seen, _tokens_of(name, shared_out), context)
            module.keyed_dropout = stream.train(module.training)
            module.forward = KeyedForward(module, stream)
            streams.append(stream)
    streams += keyed.values()
    if streams:
        model.register_forward_pre_hook(_Begin(streams, columns_open), with_kwargs=True)
    return len(streams)


def set_keyed_dropout(
    modules: Iterable[tuple[str, nn.Module]],
    *,
    seed: int,
    step: int,
    first_row: int,
    shape: tuple[int, int] | None = None,
    device: torch.device | None = None,
) -> None:
    """Set the state of every dropout among `modules` for one forward; the streams are those of
    `pyops.tensor_parallel.set_dropout`.

    Args:
        modules: (name, module), such as model.named_modules(); those without dropout by counters
            are passed over.
        seed: Of all streams.
        step: Of the training; another step drops other elements.
        first_row: The forward's first row within the step's global batch.
        shape: (B, T) of the forward's tokens, for pyops's own layers; a model of anybody else's
            needs none.
        device: Of the states; None: where the last forward was, or the CPU.

    Raises:
        ValueError: One of pyops's own layers, and no shape.
    """
    for name, module in modules:
        if not hasattr(module, "set_dropout_state"):
            continue
        if shape is None and not isinstance(module, KeyedStream):
            raise ValueError(
                f"{name} ({type(module).__name__}) is one of pyops's own layers, whose dropout "
                "goes by the tokens' shape; give shape=(B, T)"
            )
        dropout: Any = module
        dropout.set_dropout_state(
            key=key_of(seed, f"{name}@{step}"), first_row=first_row, shape=shape, device=device
        )


def _layers_cut_by_rows(model: nn.Module, ranks: Ranks) -> dict[str, Placement]:
    """{name: placement of the weight} of the layers of which a rank has a part.

    ValueError where they are cut over another number of ranks than the group has."""
    found: dict[str, Placement] = {}
    for name, module in model.named_modules():
        if isinstance(module, RowParallelLinear):
            if module.plan.ranks.size != ranks.size:
                raise ValueError(
                    f"{name} is cut over {module.plan.ranks.size} ranks, but the group has "
                    f"{ranks.size}; give key_dropout(model, group=) the group that the model was "
                    "made parallel over"
                )
            if ranks.size > 1:
                found[name] = module.placements["weight"]
    return found


def _lists_shared_out(model: nn.Module) -> dict[str, Tokens]:
    """{prefix of the names in a list of blocks: the tokens that its ranks share}, under sequence
    parallelism."""
    found = {}
    for name, module in model.named_modules():
        if (split := SplitTokens.of(module)) is not None:
            found[f"{name.rpartition('.')[0]}."] = split.tokens
    return found


def _tokens_of(name: str, shared_out: dict[str, Tokens]) -> Tokens | None:
    return next((each for prefix, each in shared_out.items() if name.startswith(prefix)), None)


class _Begin:
    """Before a forward of the whole model: its streams are told how many rows it has."""

    def __init__(self, streams: list[KeyedStream], columns_open: ColumnsOpen) -> None:
        self.streams, self.columns_open = streams, columns_open

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.columns_open.value = False  # a forward that ended in an error may have left it so
        first = next(
            (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 0), None
        )
        if first is not None and module.training:
            for stream in self.streams:
                stream.begin(first.shape[0])


class _Sets:
    """A hook that notes whether the activations are a rank's columns from here on."""

    def __init__(self, columns_open: ColumnsOpen, value: bool) -> None:
        self.columns_open, self.value = columns_open, value

    def __call__(self, *_: Any) -> None:
        self.columns_open.value = self.value


def _watch_columns(model: nn.Module, columns_open: ColumnsOpen) -> None:
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear) and not module.gather_output:
            module.register_forward_hook(_Sets(columns_open, True))
        elif isinstance(module, RowParallelLinear):
            module.register_forward_pre_hook(_Sets(columns_open, False))


def _nearest(name: str, cut: dict[str, Placement]) -> Placement | None:
    """The layer that the columns of module `name` go to: within it, or within the module around it,
    and so on, and there the least deep."""
    parts = name.split(".") if name else []
    for n in range(len(parts), -1, -1):
        prefix = ".".join([*parts[:n], ""])
        inside = [each for each in cut if each.startswith(prefix)]
        if inside:
            return cut[min(inside, key=lambda each: each.count("."))]
    return None


def _of_adapter(name: str, cut: dict[str, Placement]) -> tuple[Placement | None, ColumnsOpen]:
    """The same of the dropout within an adapter of PEFT, which comes after the layer that it is
    beside, and drops from what that layer was given: a rank's columns where it is cut by rows."""
    layer = name.removesuffix(".lora_dropout")
    return cut.get(f"{layer}.base_layer"), _always_open()


def _always_open() -> ColumnsOpen:
    always = ColumnsOpen()
    always.value = True
    return always


def _probability(child: Any) -> tuple[float, bool]:
    """(with which probability a module drops, whether whole rows); 0 where it is neither a
    torch.nn.Dropout nor a DropPath."""
    # A subclass with a forward of its own means something else.
    if isinstance(child, nn.Dropout) and type(child).forward is nn.Dropout.forward:
        return child.p, False
    if type(child).__name__.endswith("DropPath") and getattr(child, "scale_by_keep", True):
        return getattr(child, "drop_prob", None) or 0.0, True
    return 0.0, False


def _calls_functions(module: nn.Module) -> bool:
    """Whether the code of the module's class calls torch's functions of dropout, or the attention
    functions of transformers, which do."""
    if hasattr(module, "set_dropout_state") or isinstance(
        module.__dict__.get("forward"), KeyedForward
    ):
        return False
    if isinstance(module, nn.MultiheadAttention):
        return True
    for base in type(module).__mro__:
        # What transformers' base classes name is no forward's.
        if base is nn.Module or base.__name__ == "PreTrainedModel":
            return False
        if base.__module__.startswith("torch."):
            continue
        if any(_draws(getattr(each, "__func__", each), set()) for each in vars(base).values()):
            return True
    return False


def _draws(function: Any, seen: set[int]) -> bool:
    """Whether the code of a function names torch's functions of dropout, or calls one of its file
    that does, such as dropout_add of Bloom.

    Args:
        function: What is no function in Python draws nothing.
        seen: The ids of those that were looked at.
    """
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or id(function) in seen:
        return False
    seen.add(id(function))
    names = set(function.__code__.co_names)
    if names & {"ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention"} or (
        "dropout" in names and names & {"functional", "F"}
    ):
        return True
    others = (function.__globals__.get(name) for name in names)
    return any(
        _draws(other, seen)
        for other in others
        if getattr(other, "__module__", None) == function.__module__
    )


def _may_drop(module: nn.Module) -> bool:
    """Whether a probability of dropout is above 0, among the attributes of the module and of its
    config; also where none is found."""
    holders = [vars(module), vars(module).get("_modules", {})]
    if hasattr(module, "config") and hasattr(module.config, "__dict__"):
        holders.append(vars(module.config))
    found = largest_probability(
        value for holder in holders for name, value in holder.items() if "drop" in name
    )
    return found is None or found > 0.0
