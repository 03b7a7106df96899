"""SampleTraining: a task over numbered samples, epoch by epoch, in a layout that follows what is
frozen.

    one epoch:   shares of the batches -> Elastic.step -> metrics;
                 held-out samples;  Elastic.decide;  checkpoint

`pyops train` takes this way for every task but text, and for text with [elastic] freeze.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pyops.checkpoint import load
from pyops.comm.failure import CommunicationError
from pyops.config import Config, ConfigError
from pyops.config.rules.samples import check_norm, check_samples
from pyops.context_parallel import ContextRanks
from pyops.elastic import (
    Elastic,
    ElasticCallbacks,
    ElasticConfig,
    ElasticData,
    ElasticRun,
    PackingConfig,
    PaddedBatch,
    machine_of,
    plot_elastic,
    rows_besides,
)
from pyops.host_heap import trim_after
from pyops.precision import PRECISIONS
from pyops.tensor_parallel import set_dropout
from pyops.train.host.ranks import StopRequest
from pyops.train.initial_weights import FirstValues, class_teacher, kept_layers, weights_of
from pyops.train.loop import Row, StepResult, Training, check_same_options, refuse_folder_checkpoint
from pyops.train.report.display import describe_transition
from pyops.train.report.metrics import peak_memory_gib
from pyops.train.report.outcome import Outcome
from pyops.train.setup.recipe import make_mesh, make_named_optimizer, num_parameters, on_grid
from pyops.train.tasks import make_task

__all__ = ["SampleTraining"]

DROPOUTS = ("dropout", "attention_dropout", "stochastic_depth")  # fields of models


class SampleTraining(Training):
    """A task of `pyops.train.tasks`, trained by `pyops.elastic.Elastic`."""

    def __init__(
        self, config: Config, *, device: torch.device, checkpoint: Path | None = None
    ) -> None:
        """Make the task, its model and the runtime of its layers.

        Args:
            config: The run's configuration.
            device: Where the layers of this rank are.
            checkpoint: The folder of the checkpoint that the run will go on from, if any: what was
                measured for it holds on, and no pretrained weights are read.

        Raises:
            ConfigError: On every rank alike, for what the user can put right.
        """
        check_samples(config)
        self.config, self.device = config, device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        check_norm(config, ranks=dist.get_world_size() if dist.is_initialized() else 1)
        self.task = make_task(config)
        if config.distill.on:
            self.task.teacher = class_teacher(config, task=self.task, device=device)
        self.precision = PRECISIONS[config.precision.dtype]
        self.besides = self._rows_besides(checkpoint)
        self.elastic = self._make_elastic(pretrained=checkpoint is None)
        self.per_epoch = -(-self.task.samples // config.train.batch)
        self.num_steps = config.task.num_epochs * self.per_epoch or config.train.num_steps
        self.skipped, self.score = 0, math.nan

    def _make_elastic(self, *, pretrained: bool) -> Elastic:
        config, options = self.config, self.config.train
        context = self._context()
        # Ranks give memory to their own layers.
        model = self._model(device=torch.device("meta"), context=context)
        if context is not None:
            self.task.places = model.shared_rows.row(self.task.tokens).index(device=self.device)
        self.num_parameters = num_parameters(model)
        keep = config.distill.keep
        initialize = FirstValues(
            model,
            draw=lambda module: model.initialize(options.seed, only=module),
            weights=self._first_weights() if pretrained else None,
            head=bool(keep),
            key="distill.teacher" if keep else "task.pretrained",
        )
        layers = dict(zip(self.task.layer_names, _layers(model), strict=True))
        packing = PackingConfig(
            machine=machine_of(
                _layers(model),
                besides=self.besides,
                stages=config.parallel.pp,
                context=config.parallel.cp * config.parallel.tp,
            )
        )
        try:
            made = Elastic(
                layers,
                optimizer=partial(make_named_optimizer, config),
                loss=self.task.loss,
                data=ElasticData(
                    samples=self.task.samples,
                    batch=options.batch,
                    seed=options.seed,
                    held_out=self.task.held_out,
                    terms=self.task.terms,
                ),
                config=self._elastic_config(),
                run=ElasticRun(
                    stages=config.parallel.pp,
                    context=config.parallel.cp,
                    tensor=config.parallel.tp,
                    schedule=config.parallel.schedule,
                    device=self.device,
                    max_grad_norm=config.optimizer.max_grad_norm or None,
                    packing=packing,
                ),
                callbacks=ElasticCallbacks(
                    initialize=initialize,
                    before_forward=self._key_dropout,
                    rows_of=self._rows,
                ),
            )
        except ValueError as error:
            raise ConfigError(f"[elastic], [parallel], [train]: {error}") from None
        initialize.forget_weights()
        return made

    def _first_weights(self) -> Mapping[str, Any] | None:
        if self.config.distill.keep:
            return kept_layers(self.config, task=self.task)
        folder = self.config.task.pretrained
        return weights_of(Path(folder), task=self.task) if folder else None

    def _elastic_config(self) -> ElasticConfig:
        """[elastic], without a cache where a sample has other inputs in each epoch, or ranks share
        out its tokens."""
        options, why = self.config.elastic, ""
        if self.task.augmentation(0) != self.task.augmentation(1):
            why = f"task.kind {self.task.name!r} has other inputs in each epoch"
        elif (cp := self.config.parallel.cp) > 1:
            why = f"parallel.cp is {cp}, whose ranks need a sample's tokens at the same time"
        if why and options.cache == "on":
            raise ConfigError(f"elastic.cache is 'on', but {why}; set it to 'off'")
        return replace(options, cache="off") if why else options

    def _model(self, *, device: torch.device, context: ContextRanks | None = None) -> Any:
        """The task's, without values; on a grid, this rank's part of it. ConfigError for heads that
        the grid does not divide."""
        where: dict[str, Any] = {"device": device, "dtype": self.precision.dtype}
        if self.config.parallel.grid == "1d":
            return self.task.model(seed=None, context=context, **where)
        return on_grid(self.config, self.task.model, device_type=self.device.type, **where)

    def _context(self) -> ContextRanks | None:
        """The ranks that share out the tokens of samples with this one."""
        if self.config.parallel.cp == 1:
            return None
        mesh = make_mesh(self.config, device_type=self.device.type)
        return ContextRanks.of(mesh, method=self.config.parallel.cp_method)

    def _rows_besides(self, checkpoint: Path | None) -> float:
        """What a micro-batch costs, in rows; what was measured stays so after a checkpoint, and
        layouts are the same."""
        if self.config.elastic.rows_besides:
            return self.config.elastic.rows_besides
        if checkpoint is not None:
            state, _ = load(checkpoint, lazy=True, compare=True)
            if state.get("besides"):  # 0: of a run with one stage, which did not measure
                return float(state["besides"])
        if self.config.parallel.pp == 1:
            return 0.0

        def rows_of(count: int) -> tuple[Any, Any, dict[str, Any]]:
            samples = torch.arange(count, device="cpu") % self.task.samples
            return self._rows(PaddedBatch(samples, 0, count, 0, 0, count))

        def layers() -> list[nn.Module]:  # a whole model, on the rank that measures
            model = self._model(device=self.device)
            model.initialize(self.config.train.seed)
            return _layers(model.eval())  # dropout has no key here

        try:
            rows = max(1, self.config.train.batch // self.config.parallel.pp)
            return rows_besides(layers, rows_of, loss=self.task.loss, rows=rows)
        except CommunicationError:
            raise
        except (MemoryError, RuntimeError) as error:  # torch has both for memory that is not there
            raise ConfigError(
                "elastic.rows_besides is 0, so that rank 0 measures with the whole "
                f"model, where it failed: {error}; set it "
                "to a number of rows, such as 8"
            ) from error

    @property
    def step(self) -> int:
        """The number of steps that were taken, skipped ones too."""
        return self.elastic.steps

    @property
    def is_over(self) -> bool:
        """Whether no step is left."""
        return self._samples_left() <= 0

    def introduction(self) -> str:
        """What is trained, and on what, for the display."""
        task, layout, epochs = self.task, self.elastic.layout, self.config.task.num_epochs
        length = f"{epochs} epochs" if epochs else f"{self.num_steps} steps in epochs"
        return (
            f"{task.name}: {self.num_parameters / 1e6:.2f} M parameters on {layout.ranks} x "
            f"{self.device.type}, {task.samples:,} samples, {task.held_out:,} held out; {length} "
            f"of {self.per_epoch} steps\n"
            f"{layout.replicas} x {layout.stages} stages, {layout.micro_batches} micro-batches"
        )

    # ----------------------------------------------------------------------------------------------
    # training

    def _samples_left(self) -> int:
        """Samples from here on, counted from the next one's epoch, to the run's end: beyond that
        epoch's where it goes on."""
        sampler = self.elastic.sampler
        epoch, position = sampler.epoch, sampler.position
        if position == sampler.samples:
            epoch, position = epoch + 1, 0
        return (self.num_steps - epoch * self.per_epoch) * self.config.train.batch - position

    def _batches_ahead(self) -> int:
        """Batches until the run ends or a checkpoint is due, the same on all ranks."""
        every = self.config.train.checkpoint_every
        batches = -(-self._samples_left() // self.elastic.sampler.global_batch)
        return min(batches, every - self.elastic.steps % every) if every else batches

    def steps(self, request: StopRequest) -> Iterator[StepResult]:
        """Take one step after the other; see `Training.steps`.

        The result of a step comes after the next one, or after what ends with it: an epoch, the
        run, the part before a checkpoint or a change of layout, whose metrics its row gets.
        """
        every = self.config.train.checkpoint_every
        while not self.is_over:
            row: Row | None = None
            broken = False
            for share in self.elastic.shares(most=self._batches_ahead()):
                if row is not None:
                    yield self._result(row)
                row, broken = self.train_step(share, stop=bool(request.number))
                if broken:
                    break
            ends = self._at_epoch_end() or self.elastic.is_due or self.is_over
            # A rank without a part in the layout took no step, and is told of the signal here.
            broken = self.elastic.any_of(broken and not ends)
            asked = self.elastic.any_of(bool(request.number))
            note = ""
            if ends and not broken:
                row, note = self._conclude(row)
            due = bool(every) and self.elastic.steps % every == 0
            yield self._result(
                row,
                note,
                save=due or self._at_epoch_end() or self.is_over or broken or asked,
                stop=broken or (asked and not self.is_over),
            )

    def _result(
        self, row: Row | None, note: str = "", *, save: bool = False, stop: bool = False
    ) -> StepResult:
        tensorboard = row is not None and (
            any(key.startswith("validation") for key in row)
            or row["step"] % self.config.train.log_every == 0
        )
        return StepResult(row, note, tensorboard=tensorboard, save=save, stop=stop)

    def _at_epoch_end(self) -> bool:
        return self.elastic.sampler.position == self.elastic.sampler.samples

    def _conclude(self, row: Row | None) -> tuple[Row | None, str]:
        """What is done at an epoch's end, at a decision, and at the run's end: the score of the
        held-out samples, if an epoch or the run ends, and a change of layout.

        Args:
            row: The metrics of the last step; None on a rank that had none.

        Returns:
            The metrics with the score and the time of the change; a line on the change.
        """
        ends: Row = {}
        if self._at_epoch_end() or self.is_over:
            self.score = self.validate()
            kind = "accuracy" if self.task.metric == "accuracy" else "loss"
            ends[f"validation_{kind}"] = self.score
        change = self.elastic.decide() if self.elastic.is_due and not self.is_over else None
        if change is not None:
            ends["transition_s"] = change.seconds
        if row is None or change is None:
            return (None if row is None else {**row, **ends}), ""
        note = describe_transition(
            row, self._described(), seconds=change.seconds, reason=change.reason
        )
        return {**row, **ends}, note

    def _described(self) -> dict[str, Any]:
        layout = self.elastic.layout
        return {
            "frozen": self.elastic.frozen,
            "stages": layout.stages,
            "replicas": layout.replicas,
            "micro_batches": layout.micro_batches,
        }

    def train_step(self, share: PaddedBatch, *, stop: bool = False) -> tuple[Row, bool]:
        """Take one optimizer step.

        Args:
            share: This rank's samples of the batch.
            stop: Whether this rank is to stop.

        Returns:
            The metrics of the step, and whether any rank is to stop.
        """
        started = time.perf_counter()
        inputs, target, named = self._rows(share, epoch=share.epoch)
        lr = self.lr_at(share)
        found = self.elastic.step(
            inputs,
            target,
            share=share,
            lr=lr,
            flag=stop,
            augmentation=self.task.augmentation(share.epoch),
            **named,
        )
        finite = math.isfinite(found.grad_norm)
        self.skipped += not finite
        row = {
            "step": share.step,
            "epoch": share.epoch,
            "loss": found.loss if math.isfinite(found.loss) else None,
            "lr": lr,
            "grad_norm": found.grad_norm if finite else None,
            "samples_per_s": share.batch / (time.perf_counter() - started),
            **self._described(),
            "cached": self.elastic.is_cached,
            "skipped": self.skipped,
            "memory_gib": peak_memory_gib(self.device),
            "time": time.time(),
        }
        trim_after(share.step)
        return row, found.flagged

    def lr_at(self, share: PaddedBatch) -> float:
        """Of the step of this share, the last that was taken: a function of the samples seen
        before, whatever the batches."""
        sampler = self.elastic.sampler
        step = (
            share.epoch * self.per_epoch
            + (sampler.position - share.batch) / self.config.train.batch
        )
        return sampler.lr_factor * self.config.optimizer.lr_at(step, num_steps=self.num_steps)

    def _rows(
        self, share: PaddedBatch, *, epoch: int = 0, held_out: bool = False
    ) -> tuple[Any, Any, dict[str, Any]]:
        inputs, target, named = self.task.batch(share.samples, epoch=epoch, held_out=held_out)
        if self.task.told_shape:
            named["shape"] = (share.micro_rows, self.task.tokens)
        moved = {
            key: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for key, value in named.items()
        }
        return inputs.to(self.device), target.to(self.device), moved

    def _key_dropout(
        self, names: Sequence[str], layers: Sequence[nn.Module], share: PaddedBatch, number: int
    ) -> None:
        model = getattr(self.config, self.config.task.section)
        if any(getattr(model, name, 0.0) for name in DROPOUTS):
            for name, layer in zip(names, layers, strict=True):
                set_dropout(
                    layer,
                    seed=self.config.train.seed,
                    step=share.step,
                    shape=(share.micro_rows, self.task.tokens),
                    first_row=share.first_row + number * share.micro_rows,
                    prefix=f"{name}.",
                )

    def validate(self) -> float:
        """The share of held-out samples that are known, or nats for each term of their loss; on
        every rank."""
        total = self.elastic.evaluate(
            self.task.held_out,
            lambda share: self._rows(share, held_out=True),
            score=self.task.score,
            cached=True,
        )
        return total / (self.task.held_out * self.task.held_out_terms)

    # ----------------------------------------------------------------------------------------------
    # states

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            **self.elastic.state_dict(),
            "step": self.elastic.steps,
            "skipped": self.skipped,
            "score": self.score,
            "besides": self.besides,
            "data": self.task.digest,
            "task": asdict(self.config.task),
            "precision": self.precision.name,
            "optimizer_name": self.config.optimizer.name,
            "model_config": asdict(getattr(self.config, self.config.task.section)),
        }

    def load_state(self, state: Mapping[str, Any], path: Path) -> None:
        """Go on from a checkpoint; see `Training.load_state`."""
        refuse_folder_checkpoint(path, state)
        if "elastic" not in state:
            raise ConfigError(
                f"checkpoint {path} is of a run over text in which nothing was frozen, but this "
                "one is over numbered samples; set task.kind to 'text' and elastic.freeze to "
                "'none', or give this run another name"
            )
        section = self.config.task.section
        model = asdict(getattr(self.config, section))
        check_same_options(
            path,
            {
                **{f"{section}.{key}": value for key, value in model.items()},
                "task.kind": self.config.task.kind,
                "precision.dtype": self.precision.name,
                "optimizer.name": self.config.optimizer.name,
            },
            {
                **{f"{section}.{key}": value for key, value in state["model_config"].items()},
                "task.kind": state["task"]["kind"],
                "precision.dtype": state["precision"],
                "optimizer.name": state["optimizer_name"],
            },
        )
        if state.get("data", "") != self.task.digest:
            raise ConfigError(
                f"checkpoint {path} is of a run over other data, or another split of it; set "
                "[data] to what it was, or give this run another name"
            )
        try:
            self.elastic.load_state_dict(state)
        except ValueError as error:
            raise ConfigError(
                f"checkpoint {path} does not fit this configuration: {error}"
            ) from None
        self.skipped, self.score = state["skipped"], state["score"]

    def finish(self, rows: Sequence[Row], *, stopped_by: int) -> tuple[Outcome, list[str]]:
        """Draw the run, and say how it went; see `Training.finish`."""
        self.elastic.close()
        is_accuracy = self.task.metric == "accuracy"
        score = None if math.isnan(self.score) else self.score
        outcome = Outcome(
            self.elastic.steps,
            None if is_accuracy else score,
            None,
            self.skipped,
            stopped_by,
            accuracy=score if is_accuracy else None,
        )
        notes: list[str] = []
        if self.rank or stopped_by:
            return outcome, notes
        picture = self.config.folder / "run.png"
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if self.config.train.plot and plot_elastic(
            picture, rows, ranks=ranks, title=self.config.name, most=self.elastic.blocks
        ):
            notes.append(f"picture of the run: {picture}")
        if score is None:
            text = "no score"
        else:
            text = f"accuracy {score:.2%}" if is_accuracy else f"{score:.4f} nats"
        notes.append(
            f"{text} on {self.task.held_out:,} held-out samples; {self.elastic.steps} steps, "
            f"{self.skipped} skipped"
        )
        return outcome, notes


def _layers(model: Any) -> list[nn.Module]:
    found: list[nn.Module] = model.layers()
    return found
