"""StepWatch: what a run looks for after each step: slow ranks, replicas that differ, losses that
stand out."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from pyops import flight_record
from pyops.comm.agreement import gather, gather_numbers
from pyops.config import Config
from pyops.mesh import Mesh
from pyops.observe.replicas import compare_replicas
from pyops.observe.spikes import SpikeDetector, save_batch
from pyops.observe.stragglers import Stragglers

__all__ = ["StepWatch"]

MOST_NAMES = 3  # of tensors that differ, in a line


class StepWatch:
    """Looks at the steps of a run over text.

    Args:
        config: Of the run; with [asynchronous] ranks are not to wait for each other, and nothing is
            compared.
        mesh: The ranks.
        device: Of this rank.
        replicated: Gives the tensors that all ranks of the axis dp should have alike, by name.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        *,
        device: torch.device,
        replicated: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        options = config.observe
        self._config, self._mesh, self._device = config, mesh, device
        self._replicated = replicated
        size = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._together = size > 1 and not config.asynchronous.on
        self._stragglers = Stragglers() if options.stragglers and self._together else None
        self._spikes = None
        if options.spike and not config.asynchronous.on:
            self._spikes = SpikeDetector(deviations=options.spike)
        self._saved = 0
        self._hosts: list[str] = []
        self._own: list[float] = []
        self._waited = 0.0

    def after(self, row: dict[str, Any], batch: Mapping[str, Any], *, seconds: float) -> list[str]:
        """What there is to say after a step; adds to its metrics. A collective.

        Args:
            row: The metrics, with "step" and "loss".
            batch: This rank's rows.
            seconds: That the step took.
        """
        return [
            *self._slow(row, seconds),
            *self._different(row),
            *self._spiked(row, batch),
        ]

    def _slow(self, row: dict[str, Any], seconds: float) -> list[str]:
        record = flight_record.active()
        if self._stragglers is None or record is None:
            return []
        self._own.append(max(0.0, seconds - (record.waited - self._waited)))
        self._waited = record.waited
        if (row["step"] + 1) % self._config.train.log_every:
            return []
        own, self._own = statistics.median(self._own), []
        everyone = [each for (each,) in gather_numbers([own], device=self._device)]
        if not self._hosts:
            self._hosts = gather(socket.gethostname())
        slowest = max(range(len(everyone)), key=lambda rank: everyone[rank])
        row["slowest_rank"] = slowest
        row["slowest_score"] = min(everyone) / everyone[slowest] if everyone[slowest] else 1.0
        self._waited = record.waited
        return self._stragglers.update(everyone, hosts=self._hosts)

    def _different(self, row: Mapping[str, Any]) -> list[str]:
        every = self._config.observe.compare_every
        if not every or (row["step"] + 1) % every or not self._together:
            return []
        odd = compare_replicas(self._replicated(), group=self._mesh.group("dp"))
        found = [each for several in gather(odd) for each in several]
        by_ranks: dict[tuple[int, ...], list[str]] = {}
        for each in found:
            names = by_ranks.setdefault(each.ranks, [])
            if each.name not in names:
                names.append(each.name)
        return [
            f"replicas differ after step {row['step'] + 1}: rank"
            f"{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} "
            f"ha{'ve' if len(ranks) > 1 else 's'} other bits of "
            f"{', '.join(names[:MOST_NAMES])}"
            f"{f' and {len(names) - MOST_NAMES} more' if len(names) > MOST_NAMES else ''}"
            for ranks, names in by_ranks.items()
        ]

    def _spiked(self, row: Mapping[str, Any], batch: Mapping[str, Any]) -> list[str]:
        if self._spikes is None:
            return []
        why = self._spikes.update(row["loss"])
        if not why or self._saved >= self._config.observe.most_spikes:
            return [f"step {row['step'] + 1}: {why}"] if why else []
        self._saved += 1
        about = {"step": row["step"], "loss": row["loss"], "why": why}
        try:
            place = save_batch(self._config.folder, batch, rank=self._rank, about=about)
        except OSError as error:
            return [f"step {row['step'] + 1}: {why}; its batch can't be kept: {error}"]
        return [f"step {row['step'] + 1}: {why}; its batch is kept in {place}"]
