"""1-bit Adam over stage 1: after the warm-up a bit per parameter travels each way, and each rank
keeps the states it owns.

    warm-up      gradients --reduce-scatter--> AdamW on this rank's shard --all-gather--> parameters
    the switch   r = 1 / (sqrt(v) + eps), gathered and kept by all;  w = m r
                 v, w and float32 parameters p stay with the owner
    compressed   r g + e  --1 bit-->  owner: h, the ranks' mean
                 w = beta1 w + (1 - beta1) h;  p = p (1 - lr wd) - lr w
                 p - q    --1 bit-->  all ranks: q += what arrived

q: the parameters of the model. e: what the first message left out, on the rank that sent it; what
the second left out is in p - q by itself. When the warm-up ends, and what the switch does to the
moments, is in pyops/optim/one_bit.py, which OneBitAdam uses too.

Tang et al., arXiv:2102.02888, with the server's chunk being the owner's partition, and the momentum
beside it: beta1 w + (1 - beta1) r g has the mean over ranks that w has with the mean of r g, so
momenta need not travel, nor be whole anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.agreement import gather
from pyops.comm.buckets.bucket_errors import join_states, part_of_state
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_gather, all_reduce
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.compressed import compressed_all_gather, compressed_reduce_scatter
from pyops.comm.compression.error_feedback import ErrorFeedback
from pyops.flat import FlatLayout
from pyops.ops.optimizers.grad_norm import squared_norm
from pyops.optim.one_bit import (
    COMPRESSED,
    WARMUP,
    KeptVariance,
    Warmup,
    gradient_factor,
    inverse_root,
    mean_weight,
    variance_sum,
)
from pyops.zero.hooks.reduce_scatter_bucket import ReduceScatterBucket
from pyops.zero.hooks.sharded_gradients import ShardedGradients
from pyops.zero.update.sharded_optimizer_state import ParamShard, ShardedOptimizerState
from pyops.zero.update.step_stats import StatsAxes, reduce_step_stats

__all__ = ["OneBit", "check_phase", "phases_over_shards"]

LATEST = "latest"  # the owner's float32 value of a parameter that has no master


def phases_over_shards(
    optimizer_class: Any,
    arguments: Mapping[str, Any],
    *,
    model: Any,
    stage: Any,
    without: Mapping[str, Any],
) -> Any:
    """(the phases that a 1-bit optimizer has, the optimizer of the first, its arguments); (None,
    what was given) for any other.

    Raises:
        ValueError: Where it can't be shared out, or not so. without: options of ZeroOptimizer that
            must be None or False.
    """
    over_shards = getattr(optimizer_class, "over_shards", None)
    if over_shards is None:
        return None, optimizer_class, arguments
    who = f"ZeroOptimizer: {optimizer_class.__name__}"
    if stage != 1:
        raise ValueError(
            f"{who} is shared out at stage 1, for it needs whole gradients; give stage=1"
        )
    if wrong := [key for key, value in without.items() if value is not None and value is not False]:
        raise ValueError(f"{who} can't be combined with {wrong[0]}; leave it out")
    for name, parameter in model.named_parameters() if isinstance(model, nn.Module) else ():
        if parameter.requires_grad and parameter.dtype == torch.float64:
            raise ValueError(
                f"{who} sends float32, bfloat16 and float16; {name} is float64, so cast it"
            )
    phases = over_shards(arguments)
    return phases, phases.inner, phases.arguments


def check_phase(one_bit: OneBit | None, state: Mapping[str, Any]) -> None:
    """ValueError for the state of a compressed phase that this optimizer has not, or whose errors
    are of another codec."""
    saved = state.get("one_bit", {})
    if saved.get("phase") != COMPRESSED:
        return
    if one_bit is None:
        raise ValueError(
            "ZeroOptimizer: the state is of OneBitAdam after its warm-up, whose "
            "'exp_avg' is another quantity; build it with "
            "OneBitAdam, or begin anew without the state"
        )
    if saved["errors"]["codec"] != one_bit.codec.name:
        raise ValueError(
            "ZeroOptimizer: the state's errors were left by codec "
            f"{saved['errors']['codec']}, this optimizer has "
            f"{one_bit.codec.name}; build it with the same codec"
        )


class _Shared:
    """What the compressed phase keeps of one bucket. roots: r, whole. w, p: of this rank's chunk.
    errors: e."""

    def __init__(
        self, bucket: ReduceScatterBucket, codec: Codec, communicator: Communicator | None
    ) -> None:
        self.bucket, flat = bucket, bucket.flat
        self.where = flat.partition.buckets[bucket.number]
        layout, numel = flat.partition.layout, bucket.numel
        members = self.where.members
        inside = FlatLayout(
            tuple(layout.names[m] for m in members),
            tuple(layout.shapes[m] for m in members),
            tuple(layout.offsets[m] - self.where.start for m in members),
            numel,
        )
        self.errors = ErrorFeedback(
            inside, codec=codec, communicator=communicator, device=flat.device
        )
        self.p = flat.chunk(bucket.number).to(torch.float32, copy=True)
        self.w = torch.zeros_like(self.p)
        self.own_roots = torch.zeros_like(self.p)
        self.roots = torch.empty(0, device="cpu")
        self.pieces: list[tuple[int, ParamShard]] = []

    @property
    def parameters(self) -> Tensor:
        return self.bucket.flat.data[self.where.start : self.where.stop]


class OneBit:
    """The phases of one ZeroOptimizer. steps: taken so far, skipped ones apart. phase: in words."""

    def __init__(
        self,
        phases: Any,
        owned: ShardedOptimizerState,
        gradients: ShardedGradients,
        communicator: Communicator | None,
        group: dist.ProcessGroup | None,
        *,
        op: str,
    ) -> None:
        self.warmup: Warmup = phases.warmup
        self._kept_variance: KeptVariance = phases.kept_variance
        self.codec: Codec = phases.codec
        self.owned, self.gradients, self.communicator, self.group, self.op = (
            owned,
            gradients,
            communicator,
            group,
            op,
        )
        self.ranks = 1 if communicator is None else communicator.size
        self.phase, self.steps = WARMUP, 0
        self._shared: list[_Shared] = []
        owned.optimizer.register_step_post_hook(lambda *_: self._after_exact_step())

    @property
    def compressed(self) -> bool:
        return self.phase == COMPRESSED

    def _pieces(self) -> list[tuple[int, ParamShard, dict[str, Any]]]:
        """(number of the group, piece, its state) of what has been stepped."""
        states = self.owned.optimizer.state
        found = [(g, each) for g, pieces in enumerate(self.owned.pieces) for each in pieces]
        return [
            (g, each, states[each.parameter]) for g, each in found if states.get(each.parameter)
        ]

    # --------------------------------------------------------------------------------------------
    # warm-up

    def _after_exact_step(self) -> None:
        self.steps += 1
        groups = self.owned.optimizer.param_groups
        scale: Any = getattr(self.owned.optimizer, "grad_scale", None)
        factor = 1.0 if scale is None else 1.0 / float(scale)
        for g, each, state in self._pieces():
            if self._kept_variance.is_tracked(groups[g]) and each.parameter.grad is not None:
                square = (each.parameter.grad.float() * factor).square_()
                self._kept_variance.track(groups[g], state, square)
        found: float | None = None
        if self.warmup.needs_sum(self.steps):
            total = variance_sum((groups[g], state) for g, _, state in self._pieces())
            told = torch.tensor([total], dtype=torch.float64, device=self.owned.flats[0].device)
            if self.communicator is not None:
                all_reduce(
                    told, communicator=self.communicator, label="the sum of the second moment"
                )
            found = float(told)
        if self.warmup.is_last(self.steps, found):
            self._switch()

    def _switch(self) -> None:
        groups = self.owned.optimizer.param_groups
        self._kept_variance.freeze((groups[g], state) for g, _, state in self._pieces())
        self.phase = COMPRESSED
        self._enter()
        for shared in self._shared:
            shared.w.mul_(shared.own_roots)

    def _enter(self) -> None:
        """Lay the states out by buckets; `exp_avg`, and the master or LATEST, are views from then
        on."""
        self.gradients.synchronizes = False
        self._shared = [
            _Shared(bucket, self.codec, self.communicator) for bucket in self.gradients.buckets
        ]
        by_bucket = {
            (id(shared.bucket.flat), shared.bucket.number): shared for shared in self._shared
        }
        for g, each, state in self._pieces():
            shared = by_bucket[id(self.owned.flats[each.flat]), each.piece.bucket]
            shared.pieces.append((g, each))
            place = each.piece.of_chunk
            eps = float(self.owned.optimizer.param_groups[g]["eps"])
            shared.own_roots[place] = inverse_root(state["exp_avg_sq"], eps)
            name = "master" if "master" in state else LATEST
            if name in state:
                shared.p[place] = state[name]
            shared.w[place] = state["exp_avg"]
            state["exp_avg"], state[name] = shared.w[place], shared.p[place]
        for shared in self._shared:
            own = shared.own_roots.bfloat16()
            shared.own_roots = own.float()
            shared.roots = (
                own
                if self.communicator is None
                else all_gather(own, communicator=self.communicator, label="1 / v")
            )

    # --------------------------------------------------------------------------------------------
    # compressed

    def _squares(self, device: torch.device) -> Tensor:
        """float64 [2]: of this rank's whole gradients, so that the sum over ranks is the square of
        the norm as if each rank's were the whole; and how many are not finite."""
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for shared in self._shared:
            if shared.bucket.whole is not None:
                shared.bucket.fill()
                total += squared_norm([shared.bucket.whole]).to(device)
        total[0] *= self.ranks if self.op == "sum" else 1 / self.ranks
        return total

    @torch.no_grad()
    def step(self, zero: Any) -> None:
        """One step of a ZeroOptimizer, with all ranks' gradients; a number that is not finite on
        any of them skips it."""
        scale, limit = zero.numbers.scale_for(zero), zero.max_grad_norm
        device = self.owned.flats[0].device
        stats = reduce_step_stats(
            self.gradients,
            zero.param_groups,
            axes=StatsAxes(data=self.communicator),
            measured=self._squares(device),
            found_inf=getattr(zero, "found_inf", None),
        )
        if limit is not None:
            zero.grad_norm = torch.tensor(stats.norm(scale), dtype=torch.float32, device=device)
        skip = stats.factor(scale=scale, max_grad_norm=limit)[1]
        if not skip:
            self.owned.prepare(zero.param_groups)
            self._exchange(
                gradient_factor(
                    stats.norm(scale),
                    max_grad_norm=limit,
                    grad_scale=scale,
                    summed=self.ranks if self.op == "sum" else 1,
                )
            )
            self.steps += 1
        zero.numbers.stepped(zero, skipped=skip)
        self.gradients.clear()

    def _exchange(self, factor: float) -> None:
        common: dict[str, Any] = {
            "codec": self.codec,
            "communicator": self.communicator,
            "group": self.group,
        }
        for number, shared in enumerate(self._shared):
            what = f"bucket {number} of {len(self._shared)}"
            roots, dead = shared.roots, shared.roots == 0
            whole = shared.bucket.whole
            sent = (
                torch.zeros(roots.shape, device=roots.device)
                if whole is None
                else whole.float().mul_(roots).mul_(factor)
            )
            mean = compressed_reduce_scatter(
                sent, error=shared.errors, op="mean", label=f"gradients, {what}", **common
            )
            del sent
            shared.errors.worker.masked_fill_(dead, 0.0)
            self._move(shared, mean.masked_fill_(shared.own_roots == 0, 0.0))
            own = shared.p - shared.bucket.flat.chunk(shared.bucket.number)
            moves = compressed_all_gather(own, label=f"parameters, {what}", **common).masked_fill_(
                dead, 0.0
            )
            shared.parameters.copy_(moves.add_(shared.parameters))

    def _move(self, shared: _Shared, mean: Tensor) -> None:
        """This rank's own parameters by the mean of the ranks' gradients. What has no variance
        stays where it is."""
        for g, each in shared.pieces:
            optimizer, place = self.owned.optimizer, each.piece.of_chunk
            group, state = optimizer.param_groups[g], optimizer.state[each.parameter]
            state["step"] += 1
            beta1, step = float(group["betas"][0]), float(state["step"])
            w, p, lr = shared.w[place], shared.p[place], float(group["lr"])
            w.lerp_(mean[place], mean_weight(beta1, step))
            before = p.clone()
            p.mul_(1 - lr * float(group["weight_decay"])).sub_(w, alpha=lr)
            torch.where(shared.own_roots[place] == 0, before, p, out=p)

    # --------------------------------------------------------------------------------------------
    # saving

    def kept(self) -> list[Tensor]:
        """What there is besides the states of the pieces."""
        return [
            t
            for each in self._shared
            for t in (each.roots, each.own_roots, each.errors.worker, each.errors.server)
        ]

    def refresh_masters(self) -> None:
        """The owners' values are the model's: weights were loaded."""
        for shared in self._shared:
            shared.p.copy_(shared.bucket.flat.chunk(shared.bucket.number))

    def state_dict(self) -> dict[str, Any]:
        """{"one_bit": phase, steps, errors by parameter name}: besides the states of the pieces."""
        errors = join_states([shared.errors.state_dict() for shared in self._shared])
        return {
            "one_bit": {
                "phase": self.phase,
                "steps": self.steps,
                "errors": errors,
                **self.warmup.state_dict(),
            }
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`, on any number of ranks, or from AdamW's; the states of the
        pieces are loaded already."""
        own = max((int(s["step"]) for _, _, s in self._pieces()), default=0)
        steps = max(gather(own, group=self.group))  # a rank may have no piece
        saved = state.get("one_bit", {"phase": WARMUP, "steps": steps, "variance_sums": []})
        self.phase, self.steps, self._shared = saved["phase"], int(saved["steps"]), []
        self.warmup.load_state_dict(saved)
        self.gradients.synchronizes = True
        if self.compressed:
            self._enter()
            for shared in self._shared:
                shared.errors.load_state_dict(
                    part_of_state(saved["errors"], shared.errors.layout.names)
                )
