"""Which modules of a model are its blocks: those that a pipeline can be cut between.

LlamaForCausalLM   model.layers.0 ... model.layers.31
T5                 encoder.block.0 ... encoder.block.5, decoder.block.0 ... decoder.block.5
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from pyops.tensor_parallel.convert.plans import assign, plan_of

__all__ = ["Blocks", "compile_blocks", "find_block_lists"]

Blocks = list[tuple[str, nn.Module]]


def find_block_lists(model: nn.Module, given: Sequence[str] | None = None) -> list[str]:
    """The names of the ModuleLists whose items are the model's blocks.

    Args:
        model: The model.
        given: The names, where the caller says them. None: what the tensor-parallel plan of the
            model's class calls its blocks; where there is none, the list with the most parameters
            whose items are all of one class.

    Raises:
        ValueError: A given name is no list of modules, or none is found.
    """
    modules = dict(model.named_modules())
    if given is not None:
        for name in given:
            if not isinstance(modules.get(name), nn.ModuleList | nn.Sequential):
                lists = [key for key, each in modules.items() if isinstance(each, nn.ModuleList)]
                raise ValueError(
                    f"pipeline.blocks names {name!r}, which is no ModuleList of "
                    f"{type(model).__name__}; it has {', '.join(lists) or 'none'}"
                )
        return list(given)
    try:
        kinds = assign(model, plan_of(model), complete=False)
    except ValueError:
        kinds = {}
    found = [
        name
        for name, kind in kinds.items()
        if kind == "blocks" and any(p is not None for p in modules[name].parameters())
    ]
    return found or [_largest_list(model)]


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each of these by torch.compile, when it is called: one program serves all that are
    alike, and a pipeline can be cut between them.

    Args:
        blocks: Of a model; compiled in place.
    """
    for block in blocks:
        block.compile()


def _largest_list(model: nn.Module) -> str:
    sizes = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module) > 1
        and len({type(each) for each in module}) == 1
    }
    if not sizes or not max(sizes.values()):
        raise ValueError(
            f"{type(model).__name__} has no ModuleList of several blocks of one class, between "
            "which a pipeline could be cut; name it in PipelineOptions(blocks=...), or set pp to 1"
        )
    largest: str = max(sizes, key=lambda name: sizes[name])
    return largest
