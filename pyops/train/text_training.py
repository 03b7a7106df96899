"""TextTraining: a GPT learns the next tokens of a text; it reads the way the data goes.

    one step:   rows -> forward -> loss -> backward --buckets, all-reduce--> optimizer -> metrics

The loss of a micro-batch is divided by the tokens of the global batch before backward, and
gradients are summed over ranks and micro-batches, so nothing is divided afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.agreement import naming_lost_ranks
from pyops.config import Config, ConfigError
from pyops.host_heap import trim_after
from pyops.models import sample
from pyops.precision import PRECISIONS
from pyops.train.host.ranks import StopRequest
from pyops.train.loop import (
    Row,
    StepResult,
    Training,
    check_same_options,
    is_due,
    refuse_folder_checkpoint,
)
from pyops.train.report.display import describe_memory
from pyops.train.report.metrics import StepMemory, peak_memory_gib, plot_losses
from pyops.train.report.outcome import Outcome
from pyops.train.report.traffic import Traffic
from pyops.train.setup.pipelined import LocalStages, PipelinedModel
from pyops.train.setup.recipe import make_loss_scale, make_mesh, make_model, num_parameters
from pyops.train.setup.strategy import Zero, make_strategy
from pyops.train.setup.text_data import TextData

__all__ = ["TextTraining"]

PROMPT_TOKENS = 64  # of the first held-out sequence, which the sample continues


class TextTraining(Training):
    """A GPT over text, on every layout: mesh, data, model, strategy, in this order."""

    def __init__(self, config: Config, *, device: torch.device) -> None:
        """Make the model with its first values, and all that a step needs.

        Raises:
            ConfigError, CorpusError: On every rank alike, for what the user can put right.
        """
        self.config, self.device, self.num_steps = config, device, config.train.num_steps
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.mesh = make_mesh(config, device_type=device.type)
        self.data = TextData(config, self.mesh)
        self.precision = PRECISIONS[config.precision.dtype]
        self.loss_scale = make_loss_scale(config.precision)
        self.model = make_model(config, self.mesh, device=device)
        self.num_parameters = num_parameters(self.model)
        sent = self.num_parameters // config.parallel.tp
        stages = None
        if config.parallel.pp > 1:
            plan = config.parallel.plan(self.data.num_microbatches)
            stages = LocalStages(self.model, plan=plan, rank=self.mesh.rank("pp"))
            sent = sum(p.numel() for p in self.model.parameters())
        self.strategy = make_strategy(config, self.model, self.mesh, device=device)
        self.optimizer = self.strategy.optimizer
        self.pipelined: PipelinedModel | None = None
        if stages is not None and isinstance(self.strategy, Zero):
            self.pipelined = PipelinedModel(
                config,
                self.model,
                stages,
                self.strategy.zero,
                mesh=self.mesh,
                num_rows=self.data.num_rows,
            )
        self.traffic = Traffic(
            self.strategy.communicator, numel=sent, window=config.train.log_every
        )
        self.lr_at: Callable[[int], float] = lambda step: config.optimizer.lr_at(
            step, num_steps=self.num_steps
        )
        self.skipped, self.peak_gib = 0, 0.0
        self._step = self._first_step = 0

    @property
    def step(self) -> int:
        """The number of steps that were taken, skipped ones too."""
        return self._step

    def introduction(self) -> str:
        """What is trained, and on what, for the display."""
        corpus = self.data.corpus
        num_ranks = math.prod(self.mesh.axes.degrees().values())
        text = (
            f"{self.num_parameters / 1e6:.2f} M parameters on {num_ranks} x {self.device.type}, "
            f"{corpus.train.size:,} tokens of {corpus.path}; a byte-bigram model reaches "
            f"{corpus.bigram_loss:.3f} nats per byte"
        )
        if num_ranks > 1:
            sizes = {axis: self.mesh.size(axis) for axis in ("pp", "dp", "tp")}
            text += "\n" + " x ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1)
        return f"{text}; {self.pipelined.described}" if self.pipelined is not None else text

    def steps(self, request: StopRequest) -> Iterator[StepResult]:
        """Take one step after the other; see `Training.steps`."""
        options, first = self.config.train, self.step
        while not self.is_over:
            note = ""
            if self.step == first + 1:  # the first step made the optimizer's states
                row, stop, note = self._measured_step(stop=bool(request.number))
            else:
                row, stop = self.train_step(stop=bool(request.number))
            last = self.is_over
            if last or is_due(self.step, options.validate_every):
                row["validation_loss"] = self.validate()
            yield StepResult(
                row,
                note,
                tensorboard=last
                or "validation_loss" in row
                or is_due(self.step, options.log_every),
                save=stop or last or is_due(self.step, options.checkpoint_every),
                stop=stop and not last,
            )

    def _measured_step(self, *, stop: bool) -> tuple[Row, bool, str]:
        """As `train_step`; and a line on what memory there is for what."""
        # StepMemory sets the mark of the process's peak back.
        self.peak_gib = peak_memory_gib(self.device)
        with StepMemory(self.device) as memory:
            row, stop = self.train_step(stop=stop)
        return row, stop, describe_memory(self.strategy.memory(), taken=memory.taken)

    def train_step(self, *, stop: bool = False) -> tuple[Row, bool]:
        """Take one optimizer step.

        Args:
            stop: Whether this rank wants to stop.

        Returns:
            The metrics of the step, and whether any rank wants to stop.
        """
        started = time.perf_counter()
        num_tokens = self.config.train.batch * self.config.model.sequence_length
        rows_BT = self.data.batches.next()
        # nats, bytes, ranks that want to stop
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        totals[1] = self.data.num_bytes(rows_BT)
        totals[2] = float(stop)
        totals[0] = self._differentiate(
            rows_BT.to(self.device), scale=self.loss_scale.scale / num_tokens
        )
        nats, num_bytes, num_stops = _sum_over_ranks(totals).tolist()

        lr = self.lr_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        grad_norm = self._update(finite=math.isfinite(nats))
        row = {
            "step": self.step,
            "loss": nats / num_bytes if math.isfinite(nats) else None,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens_per_s": num_tokens / (time.perf_counter() - started),
            "memory_gib": max(self.peak_gib, peak_memory_gib(self.device)),
            "skipped": self.skipped,
            **({"loss_scale": self.loss_scale.scale} if self.precision.scaled else {}),
            **self.traffic.step(),
        }
        self._step += 1
        trim_after(self.step)
        return row, num_stops > 0

    def _differentiate(self, rows_BT: Tensor, *, scale: float) -> Tensor:
        """Nats of this rank's sequences; their gradients, times `scale`, are reduced, or on their
        way."""
        first_row = self.data.batches.first_row
        if self.pipelined is not None:
            return self.pipelined.differentiate(
                rows_BT, scale=scale, step=self.step, first_row=first_row
            )
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        microbatches = rows_BT.split(self.data.microbatch_rows)
        for i, microbatch_BT in enumerate(microbatches):
            self.model.set_dropout(
                (microbatch_BT.shape[0], microbatch_BT.shape[1] - 1),
                seed=self.config.train.seed,
                step=self.step,
                first_row=first_row + i * self.data.microbatch_rows,
            )
            # The last backward communicates the sum of all.
            last = i + 1 == len(microbatches)
            with nullcontext() if last else self.strategy.no_sync():
                nats = self._nats(self.strategy.forward, microbatch_BT)
                (nats * scale).backward()
            total += nats.detach()
        return total

    def _update(self, *, finite: bool) -> float | None:
        """Step the optimizer, unless the loss or a gradient is not finite; the gradient's norm,
        None when it is not."""
        norm = math.nan
        if finite:
            if self.precision.scaled:
                self.optimizer.grad_scale = torch.full(
                    (), self.loss_scale.scale, device=self.device
                )
            # The optimizer looks at the norm itself, and changes nothing but zeroes gradients if
            # it is not finite.
            self.optimizer.step()
            norm = float(self.optimizer.grad_norm)
        if self.precision.scaled:
            self.loss_scale.update(not math.isfinite(norm))
        if math.isfinite(norm):
            return norm
        self.strategy.drop_gradients()
        self.skipped += 1
        return None

    def _nats(self, model: nn.Module, rows_BT: Tensor) -> Tensor:
        """Sum over the rows of -ln p(next token)."""
        nats: Tensor = model(rows_BT[:, :-1], rows_BT[:, 1:], reduction="sum")
        return nats

    @torch.no_grad()
    def validate(self) -> float:
        """Nats per byte on the held-out sequences, the same on every rank."""
        self.model.eval()
        held_out_BT = self.data.held_out_BT
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        totals[1] = self.data.num_bytes(held_out_BT)
        if self.pipelined is not None:
            totals[0] = self.pipelined.evaluate(held_out_BT.to(self.device))
        else:
            for rows_BT in held_out_BT.split(self.data.microbatch_rows):
                if len(rows_BT):
                    totals[0] += self._nats(self.model, rows_BT.to(self.device))
        self.model.train()
        nats, num_bytes = _sum_over_ranks(totals).tolist()
        return float(nats / num_bytes)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "step": self.step,
            "skipped": self.skipped,
            "model_config": asdict(self.config.model),
            "precision": self.precision.name,
            "loss_scale": self.loss_scale.state_dict(),
            "data": self.data.batches.state_dict(),
            "recipe": self._recipe(),
            **self.strategy.state(),
        }

    def _recipe(self) -> dict[str, str]:
        """The options that decide which states there are."""
        return {
            "optimizer.name": self.config.optimizer.name,
            "communication.codec": self.config.communication.codec,
        }

    def load_state(self, state: Mapping[str, Any], path: Path) -> None:
        """Go on from a checkpoint; see `Training.load_state`."""
        refuse_folder_checkpoint(path, state)
        if "elastic" in state:
            raise ConfigError(
                f"checkpoint {path} is of a run over numbered samples, of task.kind "
                f"{state['task']['kind']!r}, but this one is over text in which nothing is frozen; "
                "set task.kind and elastic.freeze as they were, or give this run another name"
            )
        check_same_options(
            path,
            {
                **{f"model.{key}": value for key, value in asdict(self.config.model).items()},
                "precision.dtype": self.precision.name,
                **self._recipe(),
            },
            {
                **{f"model.{key}": value for key, value in state["model_config"].items()},
                "precision.dtype": state["precision"],
                **state.get("recipe", {}),
            },
        )
        self.data.batches.load_state_dict(state["data"])
        self.strategy.load(state)
        self._step = self._first_step = state["step"]
        self.skipped = state["skipped"]
        if "loss_scale" in state:  # runs of the first versions had none
            self.loss_scale.load_state_dict(state["loss_scale"])

    def finish(self, rows: Sequence[Row], *, stopped_by: int) -> tuple[Outcome, list[str]]:
        """Draw the curve, write a sample of text, say how it went; see `Training.finish`."""
        bigram_loss = self.data.corpus.bigram_loss
        held_out = [row["validation_loss"] for row in rows if "validation_loss" in row]
        outcome = Outcome(
            self.step, held_out[-1] if held_out else None, bigram_loss, self.skipped, stopped_by
        )
        folder, options = self.config.folder, self.config.train
        written = self._first_step >= self.num_steps and (folder / "sample.txt").exists()
        text = self.sample() if options.num_sample_tokens and not stopped_by and not written else ""
        notes: list[str] = []
        if self.rank:
            return outcome, notes
        picture = folder / "loss.png"
        if options.plot and plot_losses(
            picture, rows, bigram_loss=bigram_loss, title=self.config.name
        ):
            notes.append(f"loss curve: {picture}")
        if stopped_by:
            return outcome, notes
        if text:
            (folder / "sample.txt").write_text(text)
            notes.append(f"--- a sample ({folder / 'sample.txt'}) ---\n{text}\n---")
        return outcome, [*notes, self._summary(outcome)]

    def _summary(self, outcome: Outcome) -> str:
        loss = "none" if outcome.validation_loss is None else f"{outcome.validation_loss:.3f}"
        skipped = f", {self.skipped} steps skipped (loss or gradient not finite)"
        return (
            f"validation loss {loss} nats per byte, a byte-bigram model "
            f"{self.data.corpus.bigram_loss:.3f}; "
            f"{self.step} steps{skipped if self.skipped else ''}, peak memory "
            f"{max(self.peak_gib, peak_memory_gib(self.device)):.2f} GiB per process"
        )

    def sample(self) -> str:
        """The beginning of the first held-out sequence, continued by the model; "" on ranks that
        have other models. All ranks call it."""
        with self.strategy.whole():
            if self.mesh.rank("dp"):
                return ""  # the ranks that share a model with rank 0 help it
            tokens = sample(
                self.model if self.pipelined is None else self.pipelined.whole(),
                self.data.held_out_BT[0, :PROMPT_TOKENS].to(self.device),
                num_tokens=self.config.train.num_sample_tokens,
                context=self.config.model.sequence_length,
                seed=self.config.train.seed,
            )
        return self.data.decode(tokens)


def _sum_over_ranks(totals: Tensor) -> Tensor:
    """The sums over all ranks, in place. Ranks that share a model all count the same."""
    if dist.is_initialized():
        with naming_lost_ranks("the sum of losses"):
            dist.all_reduce(totals)
    return totals
