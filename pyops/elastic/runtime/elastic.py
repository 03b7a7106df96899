"""Elastic: training on all ranks, in a layout that follows what is frozen.

    for share in elastic.shares():          this rank's part of each batch; nothing on idle ranks
        inputs, targets = rows_of(*indices_of(share.samples))
        elastic.step(inputs, targets, share=share, lr=...)
    change = elastic.decide()               freezes, packs, moves; None where nothing changed

Rows of padding, of which indices_of says which they are, must be left out of the loss.

    blocks frozen    0               5                     9
    4 ranks          | 0 | 1 | 2 | 3 |  0 1 | 0 1 |        0 | 0 | 0 | 0    stage of each rank

After PipeTransformer (He et al., 2021). Nothing is lost in a change: weights, the optimizer's
states of active layers, the place in the data and all counters are those of a run whose layout does
not change.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.agreement import gather, ranks_agree
from pyops.comm.failure import CommunicationError
from pyops.elastic.config import RENAMED, ElasticCallbacks, ElasticConfig, ElasticData, ElasticRun
from pyops.elastic.frozen.host_cache import CacheOptions
from pyops.elastic.layout.layer_memory import drop_memory
from pyops.elastic.layout.layer_moves import LayerState, carry
from pyops.elastic.layout.padded_batch import PaddedBatch, Step, padded_batch
from pyops.elastic.layout.process_groups import RunGroups, abort_on_failure
from pyops.elastic.layout.rank_layout import Layout
from pyops.elastic.layout.sampler import Sampler
from pyops.elastic.layout.shared_weights import placements_of
from pyops.elastic.planning.packing import Packing, pack
from pyops.elastic.planning.packing_config import Machine, PackingConfig
from pyops.elastic.planning.trial import RowsOf
from pyops.elastic.policy.freeze_policies import Policy, decide_together
from pyops.elastic.runtime.layout_change import LayoutChange
from pyops.elastic.runtime.rank_runtime import RankRuntime, RuntimeOptions
from pyops.elastic.runtime.replica_worker import MakeOptimizer
from pyops.elastic.runtime.run_checks import (
    check_agreed,
    check_run,
    layer_costs,
    plain,
    why_not_moved,
)
from pyops.elastic.runtime.run_state import merged_meter, run_of, saved, states_of
from pyops.elastic.runtime.scoring import scored
from pyops.mesh import check_initialized
from pyops.pipeline import Profile
from pyops.renamed import refuse_renamed

__all__ = ["Elastic"]

SHARED = ("schedule", "max_grad_norm", "chunk", "context", "tensor")  # of ElasticRun, on all ranks


class Elastic:
    """Trains the composition of `layers` on all ranks that torch.distributed runs; in one process
    where it does not.

    Args:
        layers: by name, in order: an embedding, the blocks that may be frozen, a head; the same on
            all ranks. Those on the meta device get memory where they are needed, and their first
            values from callbacks.initialize; others bring theirs. A parameter of two layers (a tied
            head) is an error: a frozen one can't learn.
        optimizer: ([(name, parameter)]) -> a torch optimizer of them, at the start and after each
            change; it then gets the states of before.
        loss: (what the last layer returns, target) -> the SUM over rows that count.
        data: the samples, and how many make a batch.
        policy: decides what is frozen; None: the policy that config.freeze names.
        config: when layers are frozen, what is cached, and what free ranks do.
        run: stages, device and limits.
        callbacks: functions that the run calls.

    Raises:
        ValueError: on every rank alike, for arguments that do not fit.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        *,
        optimizer: MakeOptimizer,
        loss: Callable[[Any, Any], Tensor],
        data: ElasticData | None = None,
        policy: Policy | None = None,
        config: ElasticConfig | None = None,
        run: ElasticRun | None = None,
        callbacks: ElasticCallbacks | None = None,
        **renamed: Any,
    ) -> None:
        check_initialized("Elastic")
        refuse_renamed("Elastic", renamed, RENAMED)
        if data is None:
            raise TypeError(
                "Elastic: data is missing; give data=ElasticData(samples=, batch=, seed=)"
            )
        self.config, self.run, self.data = config or ElasticConfig(), run or ElasticRun(), data
        self.layers, self.device = dict(layers), torch.device(self.run.device)
        callbacks = callbacks or ElasticCallbacks()
        alone = not dist.is_initialized()
        self.ranks, self.rank = (1, 0) if alone else (dist.get_world_size(), dist.get_rank())
        self._before_forward = callbacks.before_forward
        self.frozen, self.steps, self._since = 0, 0, 0  # frozen: blocks
        self._portion: PaddedBatch | None = None
        with ranks_agree():
            self.config.validate()
            self.policy = self.config.policy() if policy is None else policy
            check_run(
                self.layers,
                data=data,
                config=self.config,
                run=self.run,
                ranks=self.ranks,
                has_initialize=callbacks.initialize is not None,
                has_policy=self.policy is not None,
            )
            self._replicas = self.ranks // (self.run.stages * self.run.context * self.run.tensor)
            self._costs = layer_costs(self.run, self.layers)
            self._packing = self._packing_config()
            first = self._pack(0)
            cache = self._cache_options(callbacks.rows_of)
            self.sampler = Sampler(
                data.samples,
                batch=data.batch if self._is_global else data.batch // self._replicas,
                seed=data.seed,
                replicas=self._replicas,
                batch_policy=self.config.batch_policy,
                lr_rule=self.config.lr_rule,
            )
        check_agreed(self._agreed(first, cache, callbacks), layers=self.layers)
        self._groups = RunGroups(patience=self.run.idle_timeout)
        chunk = self.run.chunk
        options = RuntimeOptions(
            loss=loss,
            make_optimizer=optimizer,
            schedule=self.run.schedule,
            device=self.device,
            key=self._key,
            chunk=self._micro_rows(self._layout(first)) if chunk is None else chunk,
            initialize=callbacks.initialize,
            trial=callbacks.rows_of if self.config.trial else None,
        )
        self._runtime = RankRuntime(
            self.layers,
            options,
            sampler=self.sampler,
            cache=cache,
            held_out=data.held_out,
            everyone=self._groups,
        )
        self._runtime.enter(first, self._layout(first), {}, first=True)

    def _packing_config(self) -> PackingConfig:
        """The options of `pack`; a micro-batch costs a stage as much as one sample more, unless a
        Profile's seconds, or a machine that is given, say what it costs."""
        config = self.run.packing or PackingConfig()
        machine = config.machine
        if machine is None:
            costs = self._costs
            overhead = 0.0 if isinstance(costs, Profile) else sum(costs) / 3 / self.run.stages
            parts = self.run.context * self.run.tensor
            machine = Machine(devices=self.ranks // parts, overhead=overhead)
        return replace(
            config,
            machine=machine,
            batch_policy=self.config.batch_policy,
            schedule=self.run.schedule,
            replicate=self.config.replicate,
        )

    def _cache_options(self, rows_of: RowsOf | None) -> CacheOptions:
        if self.config.trial and rows_of is None:
            raise ValueError(
                "trial is True, which needs rows to try; give "
                "callbacks=ElasticCallbacks(rows_of=...)"
            )
        if self.run.cache is not None:
            return self.run.cache
        off = self.policy is None or self.run.context > 1
        return CacheOptions() if off else self.config.cache_options(rows_of)

    def _agreed(
        self, first: Packing, cache: CacheOptions, callbacks: ElasticCallbacks
    ) -> dict[str, Any]:
        """What must be the same on all ranks."""
        shared = ("every", "batch_policy", "lr_rule", "compress", "replicate", "trial")
        return {
            **vars(self.data),
            **{name: getattr(self.config, name) for name in shared},
            **{name: getattr(self.run, name) for name in SHARED},
            "policy": type(self.policy).__name__,
            "the policy": plain(self.policy),
            "packing": first,
            "cache": {**plain(cache), "disk": cache.disk is not None},
            "rows_of": "None" if callbacks.rows_of is None else "given",
            "the order of layers": list(self.layers),
        }

    @property
    def _is_global(self) -> bool:
        return self.config.batch_policy == "global"

    # --------------------------------------------------------------------------------------------
    # layouts

    @property
    def blocks(self) -> int:
        """How many layers can be frozen."""
        return len(self.layers) - 2

    @property
    def layout(self) -> Layout:
        """The present one."""
        return self._runtime.layout

    @property
    def is_active(self) -> bool:
        """Whether this rank has work in the present layout."""
        return self._runtime.is_active

    @property
    def is_cached(self) -> bool:
        """Whether what the frozen layers say is read from the cache, unless that was lost on this
        rank."""
        return self._runtime.is_cached and not (
            self._runtime.worker is not None and self._runtime.worker.computes_frozen
        )

    def _pack(self, layers: int) -> Packing:
        return pack(
            self._costs,
            frozen=layers,
            stages=self.run.stages,
            batch=-(-self.data.batch // self._replicas),
            min_stages=1 if self.config.compress and layers else self.run.stages,
            config=self._packing,
        )

    def _layout(self, packing: Packing) -> Layout:
        each = packing.stages * self.run.context * self.run.tensor
        replicas = self.ranks // each if self.config.replicate else self._replicas
        return Layout(
            ranks=self.ranks,
            stages=packing.stages,
            replicas=replicas,
            boundaries=packing.boundaries,
            frozen=packing.frozen,
            micro_batches=packing.micro_batches,
            context=self.run.context,
            tensor=self.run.tensor,
        )

    def _micro_rows(self, layout: Layout) -> int:
        """Rows of a micro-batch, as `padded_batch` fills it up."""
        return -(-self.sampler.global_batch // layout.replicas // layout.micro_batches)

    def _key(self, names: Sequence[str], layers: Sequence[nn.Module], number: int) -> None:
        if self._before_forward is not None and self._portion is not None:
            self._before_forward(names, layers, self._portion, number)

    # --------------------------------------------------------------------------------------------
    # training

    def shares(self, *, most: int | None = None) -> Iterator[PaddedBatch]:
        """This replica's part of each batch until the next decision or the epoch's end, or of
        `most` batches, the same number on all ranks: `is_due` then says whether the decision comes
        next. An idle rank's are skipped: it is at the end at once, and where the others are after
        `decide` or `state_dict`."""
        batches = self._until_decision()
        for _ in range(batches if most is None else min(batches, most)):
            share = self.sampler.next()
            portion = self._portion_of(share.samples, batch=share.batch, epoch=share.epoch)
            self.steps += 1
            if (worker := self._runtime.worker) is not None:
                worker.prefetch(self.sampler.peek())
                yield portion
            else:
                self._since += 1  # as `step` does elsewhere

    @property
    def is_due(self) -> bool:
        """Whether a decision comes next, as this rank has no more shares before it."""
        return (
            self._since >= self.config.every
            if self.config.every
            else self.sampler.position == self.sampler.samples
        )

    def _until_decision(self) -> int:
        sampler = self.sampler
        left = (
            sampler.samples - sampler.position
            if sampler.position < sampler.samples
            else sampler.samples
        )
        batches = -(-left // sampler.global_batch)
        return min(batches, self.config.every - self._since) if self.config.every else batches

    def _portion_of(self, samples: Tensor, *, batch: int, epoch: int) -> PaddedBatch:
        layout, replica = self.layout, self._runtime.replica
        most = -(-self.sampler.global_batch // layout.replicas)
        return padded_batch(
            samples,
            most=most,
            micro_batches=layout.micro_batches,
            first_row=batch * replica // layout.replicas,
            batch=batch,
            epoch=epoch,
            step=self.steps,
        )

    def step(
        self,
        inputs: Any,
        target: Any,
        *,
        share: PaddedBatch,
        lr: float,
        flag: bool = False,
        augmentation: int = 0,
        **named: Any,
    ) -> Step:
        """One step with this rank's part of a batch; every active rank calls it.

        What goes wrong in the forward or backward of one rank is raised on all active ones; the
        next step may come. What goes wrong in its optimizer, while others take the step, is raised
        on all at whatever they call next, and again at what comes then: go on from a checkpoint.

        Args:
            inputs, target, named: As for `Pipeline.step`, of the rows `share.samples`.
            lr: Takes the place of the optimizer's default; parameter groups that were given another
                keep its ratio to that.
            flag: Of this rank; the Step says whether any set it, such as one that was asked to
                stop.
            augmentation: A number that tells apart the inputs that a sample has at different times,
                0 where they are always the same: what is kept of one is not read for another.
        """
        worker = self._runtime.worker
        if worker is None:
            raise RuntimeError(
                f"rank {self.rank} is idle, and has no step to take; call step() for "
                "what shares() gives"
            )
        self._portion = share
        if self.layout.frozen:
            named["samples"] = share.samples
            worker.augment(augmentation)
        count = share.batch * self.data.terms
        with abort_on_failure(self._groups.waiting_group):
            loss = worker.differentiate(inputs, target, scale=1.0 / count, flag=flag, **named)
            norm = worker.norm()
            if math.isfinite(norm):  # in all stages: a step that is not taken counts in none
                self._runtime.meter.observe()
            worker.update(norm, lr=lr, max_grad_norm=self.run.max_grad_norm)
        self._portion = None
        self._since += 1
        return Step(loss / count, norm, worker.flagged)

    def evaluate(
        self,
        count: int,
        rows_of: Callable[[PaddedBatch], tuple[Any, Any, Mapping[str, Any]]],
        *,
        score: Callable[[Any, Any], Tensor],
        cached: bool = False,
    ) -> float:
        """The sum of score(what the last layer returns, target) over `count` held-out samples,
        shared out over the replicas; on every rank, which all call it.

        Args:
            rows_of: A portion, whose samples are numbers of held-out samples, -> inputs, target,
                named arguments.
            cached: These are the run's `held_out` samples, the same rows in each call with it, so
                that what frozen layers say of them is kept and read.

        Raises:
            ValueError: For another count of these. What rows_of or score raises on one rank is
                raised on all.
        """
        if cached and count != self.data.held_out:
            raise ValueError(
                f"count is {count}, but cached=True is of the {self.data.held_out} samples "
                "of held_out=; give that count, or leave "
                "cached out"
            )
        total = 0.0
        error: Exception | None = None
        try:
            if self._runtime.worker is not None:
                total = scored(
                    self._runtime.worker.pipeline,
                    self._portions(count),
                    rows_of,
                    score,
                    waiting_group=self._groups.waiting_group,
                    first=self.sampler.samples if cached and self._runtime.is_cached else None,
                )
        except CommunicationError:
            raise
        except Exception as caught:
            error = caught
        self._runtime.barrier("evaluate", error or self._runtime.failure)
        # Ranks that share weights have the same score, which counts once.
        total *= self._runtime.is_first
        return sum(gather(total, group=self._groups.control_group))

    def _portions(self, count: int) -> list[PaddedBatch]:
        """This replica's part of `count` held-out samples."""
        replica, replicas = self._runtime.replica, self.layout.replicas
        mine = torch.arange(
            count * replica // replicas, count * (replica + 1) // replicas, device="cpu"
        )
        size = len(self._portion_of(mine[:0], batch=count, epoch=0).samples)
        return [
            self._portion_of(some, batch=count, epoch=0)
            for some in (mine.split(size) if len(mine) else ())
        ]

    def any_of(self, flag: bool) -> bool:
        """Whether it is set on any rank, idle ones too; all call it."""
        self._runtime.barrier("any_of", self._runtime.failure)
        return any(gather(flag, group=self._groups.control_group))

    # --------------------------------------------------------------------------------------------
    # decisions

    def decide(self) -> LayoutChange | None:
        """Ask the policy, and go over to the layout that follows. A collective of all ranks, idle
        ones too.

        Where no step was taken since the last decision, the policy is asked at the next one.

        Raises:
            ValueError: On every rank for policies that disagree, and for layers that were pruned
                meanwhile.
        """
        self._catch_up("decide", why_not_moved(self.layers))
        self._since = 0
        if self.policy is None or self.frozen == self.blocks or (norms := self._norms()) is None:
            return None
        frozen = decide_together(self.policy, norms, self.frozen, group=self._groups.control_group)
        if frozen == self.frozen:
            return None
        started, before, packing = time.perf_counter(), self.layout, self._pack(frozen + 1)
        self.frozen, after = frozen, self._layout(packing)
        states = self.states()
        self._runtime.detach()
        states = carry(states, before, after, group=self._groups.control_group, device=self.device)
        reason = self._runtime.enter(packing, after, states)
        seconds = max(gather(time.perf_counter() - started, group=self._groups.control_group))
        return LayoutChange(frozen, before, self.layout, seconds, reason)

    def _catch_up(self, what: str, error: Exception | None = None) -> None:
        """Idle ranks come to where the others stopped, which may be short of the decision. A
        collective, which raises on all the error of one."""
        self._runtime.barrier(what, self._runtime.failure or error)
        if self.layout.active == self.ranks:
            return
        place = gather(
            (self.steps, self._since, self.sampler.state_dict()), group=self._groups.control_group
        )[0]  # rank 0 is never idle
        if not self.is_active:
            self.steps, self._since, cursor = place
            self.sampler.load_state_dict(cursor)

    def _norms(self) -> list[float] | None:
        """Of each block's gradients since the last decision, on every rank, idle ones too; None
        where no step was taken."""
        measured = None if self._runtime.worker is None else self._runtime.meter.steps
        if 0 in gather(measured, group=self._groups.control_group):
            return None
        norms = self._runtime.gradient_norms()
        return next(
            each for each in gather(norms, group=self._groups.control_group) if each is not None
        )

    def states(self) -> dict[int, LayerState]:
        """{layer: {"parameters": {name: tensor}, "slots": {name: the optimizer's}}} of this rank's
        layers: those in use. A frozen layer has no slots."""
        return self._runtime.states()

    def state_dict(self) -> dict[str, Any]:
        """{"model", "optimizer", "elastic"}: this rank's part, for `pyops.checkpoint.save`; any
        number of ranks goes on from it. A collective."""
        self._catch_up("state_dict")
        meter = self._runtime.meter.state_dict() if self._runtime.worker is not None else None
        run = {
            "frozen": self.frozen,
            "steps": self.steps,
            "since": self._since,
            "sampler": self.sampler.state_dict(),
            "policy": None if self.policy is None else self.policy.state_dict(),
            "meter": merged_meter(gather(meter, group=self._groups.control_group), self.layout),
        }
        tensors = saved(
            self.states(),
            writes=self._runtime.writes,
            placements=placements_of(self.layers),
            is_first=self._runtime.is_first,
        )
        return {**tensors, "elastic": run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, of any number of ranks; tensors may be on disk still. A
        collective.

        Raises:
            ValueError: On every rank alike and before anything is changed, for the state of another
                model, other data, another policy, or of a run that is not elastic, and for layers
                that were pruned meanwhile.
        """
        self._runtime.barrier("load_state_dict", why_not_moved(self.layers))
        with ranks_agree(self._groups.control_group):
            packing, layout, states = self._read(state)
        run = state["elastic"]
        with ranks_agree(self._groups.control_group):
            if self.policy is not None:
                self.policy.load_state_dict(run["policy"])
        self.sampler.load_state_dict(run["sampler"])
        self._runtime.detach()
        self.frozen, self.steps, self._since = run["frozen"], run["steps"], run["since"]
        for layer in self.layers.values():
            drop_memory(layer)
        self._runtime.clear_cache()
        self._runtime.enter(packing, layout, states)
        if self._runtime.worker is not None:
            pairs = zip(run["meter"]["squares"], self._runtime.held, strict=True)
            mine = [s if here and self._runtime.is_first else 0.0 for s, here in pairs]
            self._runtime.meter.load_state_dict({"squares": mine, "steps": run["meter"]["steps"]})

    def _read(self, state: Mapping[str, Any]) -> tuple[Packing, Layout, dict[int, LayerState]]:
        """How the run of this state goes on, and the states of this rank's layers then. ValueError
        for that of another run."""
        run = run_of(state, blocks=self.blocks, has_policy=self.policy is not None)
        copy(self.sampler).load_state_dict(run["sampler"])  # which says whether it can
        packing = self._pack(run["frozen"] + 1 if run["frozen"] else 0)
        layout = self._layout(packing)
        own = layout.layers(self.rank) if layout.is_active(self.rank) else range(0)
        return packing, layout, states_of(state, layers=self.layers, numbers=own)

    def close(self) -> None:
        """Let go of groups and memory; every rank calls it at the end."""
        self._runtime.close()
        self._groups.close()
