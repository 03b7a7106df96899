"""What `parallelize` is going to do to a model, settled and checked before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from pyops.tensor_parallel.convert.architectures.adapters import with_adapters
from pyops.tensor_parallel.convert.head_counts import HeadCounts, heads_of
from pyops.tensor_parallel.convert.module_swap import ModuleCut, SharedParameters, check_kind
from pyops.tensor_parallel.convert.multihead import check_multihead
from pyops.tensor_parallel.convert.plans import ATTENTION, CUT, REGIONS, assign, plan_of
from pyops.tensor_parallel.convert.region_hooks import Tokens
from pyops.tensor_parallel.functional.ranks import Ranks

__all__ = ["ReplacementPlan", "above"]


class ReplacementPlan:
    """modules: all of the model's, by every name they have. kinds: {name: kind}, see plans.py.

    cuts: how linears and embeddings are cut; heads: of attention modules; multihead: those that are
    torch.nn's. blocks: {name of a list: its tokens}, under sequence parallelism. tied: parameters
    of several modules, one of which is cut.

    Args:
        complete: Whether each of the plan's patterns must name a module; by default where a plan is
            given.

    Raises:
        ValueError: As in `parallelize`.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        plan: Mapping[str, str] | None,
        *,
        sequence_parallel: bool,
        gather_logits: bool,
        complete: bool | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is {type(model).__name__}; expected a torch.nn.Module")
        if plan is not None and not isinstance(plan, Mapping):
            raise TypeError(
                f"plan is a {type(plan).__name__}; expected a mapping of patterns to "
                f"kinds, {{'mlp.up': 'columns'}} say"
            )
        self.ranks, self.sequence_parallel = ranks, sequence_parallel
        self.modules = dict(model.named_modules(remove_duplicate=False))
        if taken := [
            name for name, module in self.modules.items() if getattr(module, "placements", None)
        ]:
            raise ValueError(
                f"the model is parallel already: {taken[0] or type(model).__name__} has placements"
            )
        assigned = assign(
            model,
            plan_of(model) if plan is None else plan,
            complete=plan is not None if complete is None else complete,
        )
        self.kinds = with_adapters(self.modules, assigned)
        self.regions = [name for name, kind in self.kinds.items() if kind in REGIONS]
        self.blocks = self._blocks(sequence_parallel)
        self.heads = {
            n: heads_of(self.modules[n], n, self.ranks)
            for n, kind in self.kinds.items()
            if kind in ATTENTION
        }
        self.cuts = {
            n: self._cut(n, kind, gather_logits) for n, kind in self.kinds.items() if kind in CUT
        }
        for name, cut in self.cuts.items():
            check_kind(self.modules[name], cut)
        self.multihead = set()
        for name in self.heads:
            module = self.modules[name]
            if isinstance(module, nn.MultiheadAttention):
                check_multihead(module, name)
                self.multihead.add(name)
        self.tied = self._tied()
        self._check_regions()

    def shared_out(self, name: str) -> Tokens | None:
        """The tokens of the blocks in which a module is, under sequence parallelism."""
        return self.blocks.get(above(name, self.blocks) or "")

    def _blocks(self, wanted: bool) -> dict[str, Tokens]:
        names = [name for name, kind in self.kinds.items() if kind == "blocks"]
        for name in names:
            if not isinstance(self.modules[name], nn.ModuleList | nn.Sequential) or not any(
                self.modules[name].children()
            ):
                raise ValueError(
                    "plan: 'blocks' is for a ModuleList or Sequential of modules, and "
                    f"{name} is none"
                )
            if outer := above(name, names):
                raise ValueError(
                    f"plan: the 'blocks' {name} lie within other 'blocks', {outer}; name "
                    "one of them"
                )
        if wanted and not names:
            raise ValueError(
                "sequence_parallel=True needs a plan that says where tokens are shared "
                "out, {'layers': 'blocks'}"
            )
        return (
            {name: Tokens(self.ranks) for name in names} if wanted and self.ranks.size > 1 else {}
        )

    def _cut(self, name: str, kind: str, gather_logits: bool) -> ModuleCut:
        region = above(name, self.regions)
        heads = self._nearest_heads(name) if kind == "head rows" else self.heads.get(region or "")
        rows = kind in ("rows", "head rows")
        alone = kind in ("columns", "gate and up") and region is None
        return ModuleCut(
            name,
            kind,
            self.ranks,
            heads,
            inside=region is not None and not rows,
            gather_logits=gather_logits,
            sequence_parallel=self.shared_out(name) is not None and (rows or alone),
        )

    def _nearest_heads(self, name: str) -> HeadCounts | None:
        """Those of the attention module with which it has most of its name in common."""
        parts = name.split(".")
        for n in range(len(parts) - 1, -1, -1):
            prefix = ".".join([*parts[:n], ""])
            for other, heads in self.heads.items():
                if other.startswith(prefix):
                    return heads
        return None

    def whole(self, name: str) -> list[str]:
        """The names of the module's own parameters that are not cut."""
        if name in self.cuts or (name in self.multihead or above(name, self.multihead)):
            return []
        return [
            key
            for key, p in self.modules[name]._parameters.items()
            if p is not None and id(p) not in self.tied
        ]

    def _check_regions(self) -> None:
        for name in self.modules:
            region = name if name in self.regions else above(name, self.regions)
            said = self.kinds.get(name) in ("partial", "whole")
            if region is not None and not said and self.whole(name):
                raise ValueError(
                    f"{name} has parameters within {region}, and the plan does not say "
                    "what becomes of them: cut it, or make "
                    "it 'partial' if it works on the heads, or columns, that a rank has; "
                    "the ranks' gradients are then summed"
                )

    def _tied(self) -> SharedParameters:
        owners: dict[int, dict[int, str]] = {}
        for name, module in self.modules.items():
            for p in module._parameters.values():
                if p is not None:
                    owners.setdefault(id(p), {}).setdefault(id(module), name)
        found: SharedParameters = {}
        for each, modules in owners.items():
            names = list(modules.values())
            kinds = {self.cuts[name].kind for name in names if name in self.cuts}
            if len(names) == 1 or not kinds:
                continue
            left = [
                name
                for name in names
                if name not in self.cuts and not any(self.modules[name].children())
            ]
            if left or (len(kinds) > 1 and kinds != {"vocabulary", "logits"}):
                ways = ", ".join(f"{name}: {self.kinds.get(name, 'whole')}" for name in names)
                raise ValueError(
                    f"modules that share a parameter must be cut alike, and the plan has {ways}"
                )
            found[each] = None
        return found


def above(name: str, others: Iterable[str]) -> str | None:
    """The innermost of the others that the module is within."""
    found = [other for other in others if name.startswith(other + ".")]
    return max(found, key=len) if found else None
