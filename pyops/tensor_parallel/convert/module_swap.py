"""One module of a model, and the parallel one that takes its place, with this rank's part of its
values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pyops.flat import Placement
from pyops.mesh import ALONE
from pyops.tensor_parallel.convert.grouped_columns import GroupedColumns
from pyops.tensor_parallel.convert.head_counts import HeadCounts
from pyops.tensor_parallel.functional.products import ProductPlan
from pyops.tensor_parallel.functional.ranks import Ranks
from pyops.tensor_parallel.layers.embedding import VocabParallelEmbedding
from pyops.tensor_parallel.layers.layer_config import ColumnConfig, EmbeddingConfig, RowConfig
from pyops.tensor_parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from pyops.torch_private import has_hooks

__all__ = [
    "ModuleCut",
    "SharedParameters",
    "check_kind",
    "filled",
    "laid_back",
    "laid_out",
    "swapped",
]

SharedParameters = dict[int, nn.Parameter | None]  # by the id of the parameter as it was


@dataclass(frozen=True)
class ModuleCut:
    """How one module is cut.

    Attributes:
        heads: Of the attention module that it is of.
        inside: Its input comes through an `Enter`.
    """

    name: str
    kind: str
    ranks: Ranks
    heads: HeadCounts | None = None
    inside: bool = False
    sequence_parallel: bool = False
    gather_logits: bool = True


def check_kind(module: nn.Module, cut: ModuleCut) -> None:
    """ValueError unless the module is of a kind that can be cut so, and of a size that fits the
    heads."""
    what = f"{cut.name} ({type(module).__name__})"
    embedding = cut.kind in ("vocabulary", "bias by head")
    plain = type(module).forward is (nn.Embedding if embedding else nn.Linear).forward or (
        _is_scaled(module) and cut.kind == "vocabulary"
        if embedding
        else _is_conv1d(module) or _is_like_linear(module)
    )
    if not plain:
        wanted = (
            "a torch.nn.Embedding"
            if embedding
            else "a torch.nn.Linear, or a Conv1D of transformers"
        )
        raise ValueError(
            f"{what} can't be cut as {cut.kind!r}: that takes {wanted}; without a kind "
            "in the plan it stays whole"
        )
    if extra := sorted(set(dict(module.named_parameters())) - {"weight", "bias"}):
        raise ValueError(
            f"{what} can't be cut: it has parameters of other names, {', '.join(extra)}"
        )
    if has_hooks(module):
        raise ValueError(
            f"{what} can't be cut: it has hooks, which would get this rank's part; "
            "register them afterwards"
        )
    if embedding:
        assert isinstance(module, nn.Embedding)
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise ValueError(f"{what} can't be cut with max_norm, scale_grad_by_freq or sparse")
    if cut.kind == "bias by head" and (
        cut.heads is None or module.embedding_dim != cut.heads.num_heads
    ):
        heads = (
            "no attention module around it" if cut.heads is None else f"{cut.heads.num_heads} heads"
        )
        raise ValueError(
            f"{what} can't be cut by heads: it is {module.embedding_dim} wide, and there "
            f"are {heads}"
        )
    if cut.kind == "gate and up" and _sizes(module)[0] % 2:
        raise ValueError(
            f"{what} can't be cut as 'gate and up': its {_sizes(module)[0]} outputs are "
            "not two equal matrices"
        )
    if cut.kind in ("head rows", "packed columns", "head columns") and cut.heads is None:
        raise ValueError(
            f"{what} can't be cut as {cut.kind!r}: no attention module is near it; write "
            "'rows' or 'columns'"
        )
    if not embedding:
        _head_columns(module, cut)


def swapped(module: nn.Module, cut: ModuleCut, tied: SharedParameters) -> nn.Module:
    """The module to put in the place of this one; an embedding that is cut by heads is changed
    itself.

    Args:
        tied: Parameters that several modules share, and what has become of them; those that are cut
            here are added.
    """
    if cut.kind == "vocabulary":
        return _embedding(module, cut, tied)
    if cut.kind == "bias by head":
        return _bias_by_head(module, cut)
    out, size = _sizes(module)
    unit, matrices, copies = _head_columns(module, cut)
    where: dict[str, Any] = {
        "bias": module.bias is not None,
        "group": cut.ranks,
        "device": "meta",
        "dtype": module.weight.dtype,
    }
    if cut.kind in ("rows", "head rows"):
        row = RowParallelLinear(
            size,
            out,
            config=RowConfig(unit=unit, seed=None),
            sequence_parallel=cut.sequence_parallel,
            **where,
        )
        return filled(row, module, tied)
    # Within a region the sum over ranks is in the hook at its edge: the layer itself does none.
    if (
        cut.kind == "packed columns"
        and cut.heads is not None
        and cut.heads.num_kv_heads < cut.heads.num_heads
    ):
        layer: ColumnParallelLinear = GroupedColumns(size, cut.heads, **where)
        layer.plan = ProductPlan(Ranks.of(ALONE))
        return filled(layer, module, tied)
    config = ColumnConfig(
        unit=unit,
        copies=copies,
        stacked=matrices if cut.kind in ("packed columns", "gate and up") else 0,
        gather_output=cut.kind == "logits" and cut.gather_logits,
        seed=None,
    )
    layer = ColumnParallelLinear(
        size,
        out // matrices,
        config=config,
        sequence_parallel=cut.sequence_parallel,
        **where,
    )
    if cut.inside:
        layer.plan = ProductPlan(Ranks.of(ALONE))
    return filled(layer, module, tied)


def _is_like_linear(module: nn.Module) -> bool:
    """transformers' FalconLinear: a torch.nn.Linear that adds its bias in a step of its own."""
    return type(module).__name__ == "FalconLinear" and isinstance(module, nn.Linear)


def _is_scaled(module: nn.Module) -> bool:
    """An embedding of transformers that multiplies what it looks up by its `embed_scale`, as of
    Gemma and BART."""
    scaled = type(module).__name__.endswith(("ScaledWordEmbedding", "ScaledEmbedding"))
    return scaled and isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")


class _Scale:
    """After an embedding."""

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        scale: Any = module.embed_scale
        return output * (scale.to(output.dtype) if isinstance(scale, Tensor) else scale)


def _is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D: a linear whose weight lies as [in, out]."""
    sizes = (getattr(module, "nx", None), getattr(module, "nf", None))
    return (
        type(module).__name__ == "Conv1D" and tuple(module.get_parameter("weight").shape) == sizes
    )


def _sizes(module: nn.Module) -> tuple[int, int]:
    shape = tuple(module.get_parameter("weight").shape)
    return (shape[1], shape[0]) if _is_conv1d(module) else (shape[0], shape[1])


def _head_columns(module: nn.Module, cut: ModuleCut) -> tuple[int, int, int]:
    """(columns or rows that stay together, matrices in one, ranks that hold the same). ValueError
    where sizes don't fit."""
    heads, (out, size) = cut.heads, _sizes(module)
    if cut.kind == "gate and up":
        return 1, 2, 1
    if heads is None:
        return 1, 1, 1
    what = f"{cut.name} ({type(module).__name__}, {size} -> {out})"
    says = f"{heads.num_heads} heads of width {heads.head_dim}" + (
        f" in {heads.num_kv_heads} groups" if heads.num_kv_heads < heads.num_heads else ""
    )
    width = heads.num_heads * heads.head_dim
    if cut.kind in ("rows", "head rows"):
        if size != width:
            raise ValueError(
                f"{what} can't be cut by heads: the attention module has {says}, {width} inputs"
            )
        return heads.unit, 1, 1
    if cut.kind == "head columns" or (
        cut.kind == "packed columns" and heads.num_kv_heads < heads.num_heads
    ):
        all_ = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        if out != all_ or heads.copies > 1:
            why = (
                f"that takes {all_} columns"
                if out != all_
                else f"{heads.num_ranks} ranks are more than its groups"
            )
            raise ValueError(f"{what} can't be cut as {cut.kind!r}: {why}, for {says}")
        return (heads.num_heads // heads.num_kv_heads + 2) * heads.head_dim, 1, 1
    if cut.kind == "packed columns":
        if out % width:
            raise ValueError(
                f"{what} can't be cut as 'packed columns': that takes a multiple of "
                f"{width} columns, for {says}"
            )
        return heads.unit, out // width, 1
    if out == width:
        return heads.unit, 1, 1
    if out == heads.num_kv_heads * heads.head_dim:
        return heads.head_dim, 1, heads.copies
    raise ValueError(
        f"{what} can't be cut by heads: the attention module has {says}, {width} or "
        f"{heads.num_kv_heads * heads.head_dim} columns"
    )


def _embedding(module: nn.Module, cut: ModuleCut, tied: SharedParameters) -> nn.Module:
    assert isinstance(module, nn.Embedding)
    layer = VocabParallelEmbedding(
        module.num_embeddings,
        module.embedding_dim,
        EmbeddingConfig(padding_idx=module.padding_idx, seed=None),
        group=cut.ranks,
        device="meta",
        dtype=module.weight.dtype,
    )
    if _is_scaled(module):
        if isinstance(module.embed_scale, Tensor):
            layer.register_buffer(
                "embed_scale", module.embed_scale, persistent="embed_scale" in module.state_dict()
            )
        else:
            layer.embed_scale = module.embed_scale
        layer.register_forward_hook(_Scale())
    return filled(layer, module, tied)


def _bias_by_head(module: nn.Module, cut: ModuleCut) -> nn.Module:
    assert isinstance(module, nn.Embedding)
    assert cut.heads is not None
    ranks = cut.ranks
    unit = cut.heads.unit // cut.heads.head_dim
    place = Placement.cut(module.weight.shape, dim=1, rank=ranks.rank, ranks=ranks.size, unit=unit)
    module.placements = {"weight": place}  # type: ignore[assignment]
    module.weight = nn.Parameter(
        place.take(module.weight), requires_grad=module.weight.requires_grad
    )
    module.embedding_dim = place.length
    return module


def laid_out(layer: nn.Module | None, whole: Tensor, place: Placement) -> Tensor:
    """A tensor of the module that was swapped, laid out as the layer's whole one: a Conv1D's
    transposed, and so on."""
    if getattr(layer, "transposed", None) and whole.dim() == 2:
        whole = whole.t()
    if isinstance(layer, GroupedColumns):
        whole = layer.by_group(whole)
    return whole.reshape(place.global_shape)


def laid_back(module: nn.Module, whole: Tensor) -> Tensor:
    """The way back of `laid_out`: a whole tensor of the layer as that of the module that was
    swapped."""
    if getattr(module, "stacked", None):
        whole = whole.flatten(0, 1)
    if isinstance(module, GroupedColumns):
        whole = module.as_packed(whole)
    return whole.t() if getattr(module, "transposed", None) and whole.dim() == 2 else whole


def filled(layer: nn.Module, module: nn.Module, tied: SharedParameters) -> nn.Module:
    """The layer, made without values, with this rank's part of the module's."""
    placements: dict[str, Placement] = layer.placements  # type: ignore[assignment]
    layer.transposed = _is_conv1d(module)  # type: ignore[assignment]
    for name, place in placements.items():
        old = module.get_parameter(name)
        new = tied.get(id(old))
        if new is None:
            new = nn.Parameter(
                place.take(laid_out(layer, old, place)), requires_grad=old.requires_grad
            )
        if id(old) in tied:
            tied[id(old)] = new
        layer.register_parameter(name, new)
    return layer.train(module.training)
