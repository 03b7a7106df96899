"""LocalSGD: replicas that train on their own and meet every so many steps.

    inner steps   x_i -= ...      x_i -= ...      x_i -= ...           each replica for itself
                      |                                 |
    meeting      D = mean_i (w - x_i)              D = ...             one vector over the slow link
                 w <- outer(w, D);  x_i <- w

McMahan et al., 2017 (local SGD as federated averaging); Lin et al., arXiv:1808.07217 (post-local);
Zhang et al., arXiv:1412.6651 (EASGD); Douillard et al., arXiv:2311.08105 and 2501.18512 (DiLoCo,
streaming).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pyops.local_sgd.checks import agree_on_setup
from pyops.local_sgd.config import LocalSGDConfig
from pyops.local_sgd.exchange import Exchange, GroupExchange
from pyops.local_sgd.extras import averaged_tensors, means_of, reset_states
from pyops.local_sgd.fragments import begins_at, fragment_of_layer, layer_of, layers_of
from pyops.local_sgd.part import Part, working_dtype
from pyops.local_sgd.saving import OnItsWay, SavedReplica, everything
from pyops.local_sgd.values import Value, values_of, write_back
from pyops.mesh import ALONE, ProcessGroupLike, axis_group

__all__ = ["LocalSGD"]


class Failed:
    """In the place of an exchange that did not even begin."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


class LocalSGD(SavedReplica):
    """Brings replicas of a model together that train on their own.

        outer = LocalSGD(model, optimizer, LocalSGDConfig(method="diloco", every=100))
        for batch in my_part_of_the_batches:
            optimizer.zero_grad()
            loss(model(batch)).backward()
            optimizer.step()              # of this replica alone
            outer.step()                  # every 100th time all replicas meet

    Every tensor that the inner optimizer steps is exchanged, and each exactly once in `every`
    steps. The global values, and the outer momentum, have the same bits at every replica, and
    a replica that joins begins with them.

    An exchange comes about everywhere or nowhere: where one fails, `step` raises on every replica
    that is left, and neither parameters nor the outer state have changed. Make a group of those
    that are left and call `regroup`, or let `Members` do both. An exchange whose mean is not
    finite changes nothing and is counted in `skipped`; a replica whose own values are not finite
    begins again from the global ones.

    A replica may itself be several processes (tensor parallelism, pipeline stages, ZeRO): each
    exchanges what it steps with those at its place in the other replicas. Its optimizer's step is
    then the replica's own, and `within` names the replica's ranks.

    Args:
        model: The same at every replica up to values; replica 0's are taken by all at the
            beginning.
        optimizer: The inner optimizer, over parameters of the model: one of pyops.optim or of
            torch.optim, or a ZeroOptimizer over the ranks of this replica.
        config: How often, what and how; see `LocalSGDConfig`.
        group: The ranks with this rank's place in their replicas, one of each replica; see
            `pyops.mesh.resolve`. With `pyops.mesh.ALONE` a replica waits for `regroup`, or for
            `Members`. Or an `Exchange` of another kind.
        mesh: A torch DeviceMesh with a dimension "replica", in place of `group`.
        within: The ranks of this replica; ALONE for a replica of one process.

    Attributes:
        config: As given.
        steps: Inner steps so far.
        rounds: Exchanges of fragments that came about.
        skipped: Exchanges whose mean was not finite.
        exchange: What the replicas meet by.

    Raises:
        ValueError: On every replica alike: replicas that differ in names, shapes, dtypes or
            configuration; more fragments than layers; tied parameters in two fragments; an
            optimizer that communicates by itself, or of another model.
        TypeError: On every replica alike: what is no model, optimizer or configuration.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: LocalSGDConfig | None = None,
        *,
        group: ProcessGroupLike | Exchange = None,
        mesh: DeviceMesh | None = None,
        within: ProcessGroupLike = ALONE,
    ) -> None:
        config = LocalSGDConfig() if config is None else config
        self.exchange: Exchange
        if isinstance(group, Exchange):
            self.exchange = group
        else:
            ranks = axis_group("LocalSGD", "replica", group=group, mesh=mesh)
            self.exchange = GroupExchange(ranks, within=within)
        self.model, self.optimizer, self.config = model, optimizer, config
        agree_on_setup(model, optimizer, config, self.exchange)
        self._within = within
        self._values = values_of(model, optimizer)
        self.steps = self.rounds = self.skipped = 0
        self._joined = self.exchange.size > 1
        self._on_its_way: list[OnItsWay] = []
        self._failed: list[int] = []
        self.exchange.broadcast(everything(model, self._values()), source=0)
        write_back(optimizer)
        self.fragments = self._laid_out()

    def _laid_out(self) -> list[list[Part]]:
        """The parts of each fragment."""
        self._place: list[list[list[int]]] = []
        found: list[list[Part]] = []
        values = self._values()
        fragment_of = fragment_of_layer(
            layers_of(name for name, _ in self.model.named_parameters()),
            fragments=self.config.fragments,
        )
        for fragment in range(self.config.fragments):
            kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
            for place, value in enumerate(values):
                if fragment_of[layer_of(value.name)] == fragment:
                    kind = (working_dtype(value.tensor), value.tensor.device)
                    kinds.setdefault(kind, []).append(place)
            self._place.append(list(kinds.values()))
            found.append(
                [
                    Part(
                        [values[place] for place in places],
                        config=self.config,
                        label=f"fragment {fragment}",
                    )
                    for places in kinds.values()
                ]
            )
        return found

    def _values_of(self, fragment: int) -> list[list[Value]]:
        """The replica's values of each part of a fragment."""
        values = self._values()
        return [[values[place] for place in places] for places in self._place[fragment]]

    # ----------------------------------------------------------------------------------------------
    # steps

    @torch.no_grad()
    def step(self) -> bool:
        """Count an inner step, and exchange what is due. Call it after the optimizer's step, at
        every replica.

        Returns:
            Whether parameters of this replica were written.

        Raises:
            CommunicationError: At every replica that is left: one is lost. Nothing has changed.
        """
        if self._failed:
            raise RuntimeError(
                "the last exchange failed, and its replicas are not together any more; call "
                "regroup(group) with those that are left"
            )
        self.steps += 1
        written = self.rounds
        for due in [each for each in self._on_its_way if each.due <= self.steps]:
            self._finish(due)
        config = self.config
        delay = 0 if self.steps <= config.after else config.delay
        for fragment in begins_at(
            self.steps, every=config.every, fragments=config.fragments, after=config.after
        ):
            self._begin(fragment, delay=delay)
        for due in [each for each in self._on_its_way if each.due <= self.steps]:
            self._finish(due)
        return self.rounds > written

    def finish(self) -> None:
        """Wait for the exchanges that are on their way, and apply them now: at the end of
        training."""
        for due in list(self._on_its_way):
            self._finish(due)

    @contextlib.contextmanager
    def global_values(self) -> Iterator[None]:
        """Within, the model has the global values, the same at every replica: to evaluate it, or to
        save it. Afterwards it has its own again."""
        own = self._values()
        before = [(v.tensor.clone(), None if v.copy is None else v.copy.clone()) for v in own]
        for fragment, parts in enumerate(self.fragments):
            for part, values in zip(parts, self._values_of(fragment), strict=True):
                part.give(values)
        write_back(self.optimizer)
        try:
            yield
        finally:
            with torch.no_grad():
                for value, (tensor, copied) in zip(own, before, strict=True):
                    value.tensor.copy_(tensor)
                    if value.copy is not None and copied is not None:
                        value.copy.copy_(copied)
            write_back(self.optimizer)

    def meets(self, step: int) -> bool:
        """Whether an exchange begins at the end of this inner step, 1 being the first."""
        config = self.config
        return bool(
            begins_at(step, every=config.every, fragments=config.fragments, after=config.after)
        )

    def _begin(self, fragment: int, *, delay: int, weight: float = 1.0) -> None:
        means, pending = [], []
        parts, values = self.fragments[fragment], self._values_of(fragment)
        for part, own in zip(parts, values, strict=True):
            means.append(part.message(own, weight=weight))
            try:
                pending.append(part.begin(means[-1], self.exchange))
            except Exception as error:  # of which all are told when they agree
                pending.append(Failed(error))
        self._on_its_way.append(OnItsWay(fragment, self.steps + delay, means, pending))

    def _finish(self, arriving: OnItsWay) -> None:
        """Wait, agree, and only then write."""
        fragment = arriving.fragment
        last = fragment == self.config.fragments - 1
        error: Exception | None = None
        extras: list[Tensor] = []
        means: list[Tensor] = []
        try:
            for pending in arriving.pending:
                pending.wait()
            if last:
                extras = averaged_tensors(self.model, self.optimizer, self.config)
                means = means_of(extras, self.exchange)
        except Exception as caught:
            error = caught
        fine = error is None and all(bool(mean.isfinite().all()) for mean in arriving.means)
        try:
            fine = self.exchange.agree(error, fine=fine)
        except Exception:
            self._failed = [each.fragment for each in self._on_its_way]
            for part in (part for number in self._failed for part in self.fragments[number]):
                part.take_back()
            self._on_its_way.clear()
            raise
        self._on_its_way.remove(arriving)
        if fine:
            self._apply(arriving, list(zip(extras, means, strict=True)), resets=last)
        else:
            self._skip(fragment)

    def _apply(
        self, arriving: OnItsWay, extras: list[tuple[Tensor, Tensor]], *, resets: bool
    ) -> None:
        parts, values = self.fragments[arriving.fragment], self._values_of(arriving.fragment)
        outer = arriving.due > self.config.after
        for part, own, mean in zip(parts, values, arriving.means, strict=True):
            part.apply(mean, own, replicas=self.exchange.size, outer=outer)
        for tensor, mean in extras:
            tensor.copy_(mean)
        if resets and self.config.states == "reset":
            reset_states(self.optimizer)
        write_back(self.optimizer)
        self.rounds += 1

    def _skip(self, fragment: int) -> None:
        """A mean that is not finite: nothing is applied, and a replica that made it so begins again
        from the global values."""
        self.skipped += 1
        for part in self.fragments[fragment]:
            part.take_back()
        own = self._values_of(fragment)
        if not all(bool(v.tensor.isfinite().all()) for values in own for v in values):
            for part, values in zip(self.fragments[fragment], own, strict=True):
                part.give(values)
        write_back(self.optimizer)

    # ----------------------------------------------------------------------------------------------
    # replicas that come and go

    @torch.no_grad()
    def regroup(
        self, group: ProcessGroupLike | Exchange, *, within: ProcessGroupLike | None = None
    ) -> None:
        """Go on with other replicas: those that are left, and those that join. Every replica of the
        new group calls it.

        Those that were together stay where they are. A replica that joins, or that missed the last
        exchange, takes the global values, the outer momentum and the counts of steps from the
        first that has them. An exchange that failed, or was on its way, is done again at once,
        among those that have moved something since.

        Args:
            group: As in the constructor.
            within: The ranks of this replica; None: as before.

        Raises:
            ValueError: On every replica alike, for replicas that differ in model or configuration.
        """
        self._within = self._within if within is None else within
        self.exchange = (
            group if isinstance(group, Exchange) else GroupExchange(group, within=self._within)
        )
        agree_on_setup(self.model, self.optimizer, self.config, self.exchange)
        due = self._call_back()
        mine = (self._joined, self.rounds, self.steps, self.skipped, due)
        everyone = self.exchange.gather(mine)
        source = max(range(len(everyone)), key=lambda rank: (everyone[rank][:3], -rank))
        _, rounds, steps, skipped, due = everyone[source]
        contributing = sum(each[:3] == everyone[source][:3] for each in everyone)
        began = everyone[source][0]  # else all of them join, and begin as the first does
        behind = mine[:3] != everyone[source][:3] or not (began or self.exchange.rank == source)
        self._take_global(source=source, behind=behind)
        self.steps, self.rounds, self.skipped, self._joined = steps, rounds, skipped, True
        for fragment in due:
            weight = 0.0 if behind else self.exchange.size / contributing
            self._begin(fragment, delay=0, weight=weight)
            self._finish(self._on_its_way[-1])

    def _call_back(self) -> list[int]:
        """The fragments whose exchange failed or is on its way, as if it had not begun."""
        for arriving in self._on_its_way:
            for pending in arriving.pending:
                with contextlib.suppress(Exception):
                    pending.wait()
            for part in self.fragments[arriving.fragment]:
                part.take_back()
        due = sorted({*self._failed, *(each.fragment for each in self._on_its_way)})
        self._on_its_way, self._failed = [], []
        return due
