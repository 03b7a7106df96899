"""A run over numbered samples: a task, epochs of it, and a layout that follows what is frozen.

    one epoch:   shares of the batches -> Elastic.step -> metrics;  held-out samples;  Elastic.decide;  checkpoint

`pyops train` takes this way for every task but text, and for text with [elastic] freeze.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pyops.checkpoint import Checkpoints, load
from pyops.comm.agreement import on_first_rank
from pyops.comm.failure import CommunicationError
from pyops.config import Config, ConfigError
from pyops.config.task_config import KINDS
from pyops.elastic import CacheOptions, Elastic, Portion, machine_of, plot_elastic, rows_besides
from pyops.precision import PRECISIONS
from pyops.tensor_parallel import set_dropout
from pyops.train.folder import prepare_folder
from pyops.train.host.heap import trim_after
from pyops.train.host.ranks import StopRequest
from pyops.train.initial_weights import FirstValues, weights_of
from pyops.train.outcome import Outcome
from pyops.train.report.display import Display, describe_transition
from pyops.train.report.metrics import MetricsLog, peak_memory_gib
from pyops.train.setup.recipe import make_named_optimizer, make_policy
from pyops.train.setup.state import read
from pyops.train.tasks import make_task

__all__ = ["TaskRun"]


class TaskRun:
    """Everything of a run over samples. ConfigError, on every rank alike, for what the user can put
    right."""

    def __init__(self, config: Config, *, device: torch.device, resume: bool = False) -> None:
        _check(config)
        self.config, self.device, options = config, device, config.train
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.task = make_task(config)
        self.precision = PRECISIONS[config.precision.dtype]
        model = self._model(device=torch.device("meta"))  # ranks give memory to their own layers
        self.checkpoints = Checkpoints(
            config.folder / "checkpoints", keep=options.keep, background=True
        )
        latest = on_first_rank(self.checkpoints.latest) if resume else None
        pretrained = config.task.pretrained if latest is None else ""
        weights = weights_of(Path(pretrained), task=self.task) if pretrained else None
        initialise = FirstValues(
            model, draw=lambda module: model.initialize(options.seed, only=module), weights=weights
        )
        self.num_parameters = sum(p.numel() for p in model.parameters())
        elastic = config.elastic
        layers = dict(zip(self.task.layer_names, _layers(model), strict=True))
        self.besides = self._rows_besides(latest)
        packing = {
            "machine": machine_of(_layers(model), besides=self.besides, stages=config.parallel.pp)
        }
        try:
            self.elastic = Elastic(
                layers,
                optimizer=partial(make_named_optimizer, config),
                loss=self.task.loss,
                samples=self.task.samples,
                held_out=self.task.held_out,
                batch=options.batch,
                seed=options.seed,
                terms=self.task.terms,
                device=device,
                stages=config.parallel.pp,
                schedule=config.parallel.schedule,
                policy=make_policy(elastic),
                every=elastic.every,
                compress=elastic.compress,
                replicate=elastic.replicate,
                batch_policy=elastic.batch_policy,
                lr_rule=elastic.lr_rule,
                max_grad_norm=config.optimizer.max_grad_norm or None,
                before=self._key_dropout,
                cache=self._cache_options(),
                packing=packing,
                trial=self._rows if elastic.trial else None,
                initialise=initialise,
            )
        except ValueError as error:
            raise ConfigError(f"[elastic], [parallel], [train]: {error}") from None
        initialise.forget_weights()
        self.per_epoch = -(-self.task.samples // options.batch)
        self.num_steps = config.task.epochs * self.per_epoch or options.steps
        self.skipped, self.score = 0, math.nan

        on_first_rank(lambda: prepare_folder(config, resume=resume))
        if latest is not None:
            self.restore(latest)
        self.log = None
        if self.rank == 0:
            self.log = MetricsLog(
                config.folder, first_step=self.elastic.steps, tensorboard=config.train.tensorboard
            )
        self.display = Display(
            config.name,
            num_steps=self.num_steps,
            first_step=self.elastic.steps,
            every=options.log_every,
            quiet=self.rank != 0,
        )
        self.display.note(self._introduction(resumed=latest, wanted=resume))

    def _cache_options(self) -> CacheOptions:
        options = self.config.elastic
        changing = self.task.augmentation(0) != self.task.augmentation(1)
        if changing and options.cache == "on":
            raise ConfigError(
                f"elastic.cache is 'on', but task.kind {self.task.name!r} has other "
                "inputs in each epoch; set it to 'off'"
            )

        def example(samples: torch.Tensor) -> tuple[Any, dict[str, Any]]:
            inputs, _, named = self._rows(Portion(samples, 0, len(samples), 0, 0, len(samples)))
            return inputs, named

        return CacheOptions(
            "off" if changing or not options.on else options.cache,
            example,
            budget=int(options.cache_gib * 2**30) or None,
            stored=torch.bfloat16 if options.cache_dtype == "bf16" else None,
            disk=options.cache_folder or None,
        )

    def _model(self, *, device: torch.device) -> Any:
        """The task's, without values."""
        return self.task.model(seed=None, device=device, dtype=self.precision.dtype)

    def _rows_besides(self, latest: Path | None) -> float:
        """What a micro-batch costs, in rows; what was measured stays so after a checkpoint, and
        layouts are the same."""
        if self.config.elastic.rows_besides:
            return self.config.elastic.rows_besides
        if latest is not None:
            state, _ = load(latest, lazy=True, compare=True)
            if state.get("besides"):  # 0: of a run with one stage, which did not measure
                return float(state["besides"])
        if self.config.parallel.pp == 1:
            return 0.0

        def rows_of(count: int) -> tuple[Any, Any, dict[str, Any]]:
            samples = torch.arange(count, device="cpu") % self.task.samples
            return self._rows(Portion(samples, 0, count, 0, 0, count))

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

    def _introduction(self, *, resumed: Path | None, wanted: bool) -> str:
        task, layout = self.task, self.elastic.layout
        layers = f"{layout.replicas} x {layout.stages} stages, {layout.micro_batches} micro-batches"
        epochs = self.config.task.epochs
        length = f"{epochs} epochs" if epochs else f"{self.num_steps} steps in epochs"
        text = (
            f"{task.name}: {self.num_parameters / 1e6:.2f} M parameters on "
            f"{layout.ranks} x {self.device.type}, "
            f"{task.samples:,} samples, {task.held_out:,} held out; {length} of "
            f"{self.per_epoch} steps\n{layers}"
        )
        if resumed is not None:
            return f"{text}\nresumed from {resumed}"
        return (
            f"{text}\nno checkpoint in {self.checkpoints.folder}: from the beginning"
            if wanted
            else text
        )

    # ------------------------------------------------------------------------------------------------
    # training

    @property
    def is_over(self) -> bool:
        """Whether no step is left."""
        return self._left() <= 0

    def _left(self) -> int:
        """Samples from here on, counted from the next one's epoch, to the run's end: beyond that
        epoch's where it goes on."""
        sampler = self.elastic.sampler
        epoch, position = sampler.epoch, sampler.position
        if position == sampler.samples:
            epoch, position = epoch + 1, 0
        return (self.num_steps - epoch * self.per_epoch) * self.config.train.batch - position

    def _ahead(self) -> int:
        """Batches until the run ends or a checkpoint is due, the same on all ranks."""
        every, batches = (
            self.config.train.checkpoint_every,
            -(-self._left() // self.elastic.sampler.global_batch),
        )
        return min(batches, every - self.elastic.steps % every) if every else batches

    def loop(self, request: StopRequest) -> bool:
        """All steps that are left; True when a signal to any rank ended them early."""
        every = self.config.train.checkpoint_every
        while not self.is_over:
            row: dict[str, Any] | None = None
            broken = False
            for share in self.elastic.shares(most=self._ahead()):
                if row is not None:
                    self._tell(row)
                row, broken = self.train_step(share, stop=bool(request.number))
                if broken:
                    break
            ends = self._at_epoch_end() or self.elastic.is_due or self.is_over
            broken, asked = (
                self.elastic.any_of(broken and not ends),
                self.elastic.any_of(bool(request.number)),
            )
            if ends and not broken:
                self._conclude(row)
            elif row is not None:
                self._tell(row)
            due = bool(every) and self.elastic.steps % every == 0
            if due or self._at_epoch_end() or self.is_over or broken or asked:
                self.save()
            if broken or (asked and not self.is_over):
                return True
        return False

    def _at_epoch_end(self) -> bool:
        return self.elastic.sampler.position == self.elastic.sampler.samples

    def _conclude(self, row: dict[str, Any] | None) -> None:
        """At an epoch's end, a decision, and the run's end: how well the held-out samples are
        known, if an epoch ends, or the run, and what was changed. row: of the last step; None on a
        rank that had none."""
        ends: dict[str, Any] = {}
        if self._at_epoch_end() or self.is_over:
            self.score = self.validate()
            ends["validation_accuracy" if self.task.metric == "accuracy" else "validation_loss"] = (
                self.score
            )
        change = self.elastic.decide() if self.elastic.is_due and not self.is_over else None
        if change is not None:
            ends["transition_s"] = change.seconds
        if row is not None:
            self._tell({**row, **ends})
            if change is not None:
                text = describe_transition(
                    row, self._described(), seconds=change.seconds, reason=change.reason
                )
                self.display.note(text)

    def _described(self) -> dict[str, Any]:
        layout = self.elastic.layout
        return {
            "frozen": self.elastic.frozen,
            "stages": layout.stages,
            "replicas": layout.replicas,
            "micro_batches": layout.micro_batches,
        }

    def train_step(self, share: Portion, *, stop: bool = False) -> tuple[dict[str, Any], bool]:
        """One optimizer step; its row of metrics, and whether any rank wants to stop."""
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

    def lr_at(self, share: Portion) -> float:
        """Of the step of this share, the last that was taken: a function of the samples seen
        before, whatever the batches."""
        sampler = self.elastic.sampler
        step = (
            share.epoch * self.per_epoch
            + (sampler.position - share.batch) / self.config.train.batch
        )
        return sampler.lr_factor * self.config.optimizer.lr_at(step, num_steps=self.num_steps)

    def _rows(
        self, share: Portion, *, epoch: int = 0, held_out: bool = False
    ) -> tuple[Any, Any, dict[str, Any]]:
        inputs, target, named = self.task.batch(share.samples, epoch=epoch, held_out=held_out)
        named["shape"] = (share.micro_rows, self.task.tokens)
        moved = {
            key: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for key, value in named.items()
        }
        return inputs.to(self.device), target.to(self.device), moved

    def _key_dropout(
        self, names: Sequence[str], layers: Sequence[nn.Module], share: Portion, number: int
    ) -> None:
        model = getattr(self.config, KINDS[self.config.task.kind])
        if model.dropout or model.attention_dropout:
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

    def _tell(self, row: dict[str, Any]) -> None:
        self.display.step(row)
        if self.log is None:
            return
        written = (
            any(key.startswith("validation") for key in row)
            or row["step"] % self.config.train.log_every == 0
        )
        self.log.write(row, tensorboard=written)
        for problem in self.log.take_problems():
            self.display.note(problem)

    # ------------------------------------------------------------------------------------------------
    # states

    def save(self) -> Path:
        """Write a checkpoint of the steps done so far."""
        state = {
            **self.elastic.state_dict(),
            "step": self.elastic.steps,
            "skipped": self.skipped,
            "score": self.score,
            "besides": self.besides,
            "data": self.task.digest,
            "task": asdict(self.config.task),
            "precision": self.precision.name,
            "optimizer_name": self.config.optimizer.name,
            "model_config": asdict(getattr(self.config, KINDS[self.config.task.kind])),
        }
        return self.checkpoints.save(
            self.elastic.steps, state, own={"torch": torch.get_rng_state()}
        )

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint, on any number of ranks. ConfigError when it is of another
        model or task."""
        state, own = load(path, lazy=True, compare=True)
        if "elastic" not in state:
            raise ConfigError(
                f"checkpoint {path} is of a run over text in which nothing was frozen, "
                "but this one is over numbered samples; "
                "set task.kind to 'text' and elastic.freeze to 'none', or give this run "
                "another name"
            )
        section = KINDS[self.config.task.kind]
        now = {
            f"{section}.{key}": value
            for key, value in asdict(getattr(self.config, section)).items()
        }
        now |= {"task.kind": self.config.task.kind, "precision.dtype": self.precision.name}
        now |= {"optimizer.name": self.config.optimizer.name}
        before = {f"{section}.{key}": value for key, value in state["model_config"].items()}
        before |= {"task.kind": state["task"]["kind"], "precision.dtype": state["precision"]}
        before |= {"optimizer.name": state["optimizer_name"]}
        for key, value in now.items():
            if before.get(key, value) != value:
                raise ConfigError(
                    f"{key} is {value!r}, but checkpoint {path} was made with "
                    f"{before[key]!r}; set it to that, "
                    "or give this run another name"
                )
        if state.get("data", "") != self.task.digest:
            raise ConfigError(
                f"checkpoint {path} is of a run over other data, or another split of it; "
                "set [data] to what it "
                "was, or give this run another name"
            )
        try:
            self.elastic.load_state_dict(state)
        except ValueError as error:
            raise ConfigError(
                f"checkpoint {path} does not fit this configuration: {error}"
            ) from None
        self.skipped, self.score = state["skipped"], state["score"]
        if own is not None:
            torch.set_rng_state(read(own)["torch"])

    def finish(self, *, stopped_by: int = 0) -> Outcome:
        """Draw the run, and say how it went."""
        self.display.close()
        self.checkpoints.wait()
        self.elastic.close()
        accuracy = self.task.metric == "accuracy"
        score = None if math.isnan(self.score) else self.score
        loss, right = (None, score) if accuracy else (score, None)
        outcome = Outcome(self.elastic.steps, loss, None, self.skipped, stopped_by, accuracy=right)
        if self.log is None:
            return outcome
        self.log.close()
        if stopped_by:
            name = signal.Signals(stopped_by).name
            self.display.note(
                f"stopped by {name} after step {self.elastic.steps}; continue with --resume"
            )
            return outcome
        picture = self.config.folder / "run.png"
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if self.config.train.plot and plot_elastic(
            picture, self.log.rows, ranks=ranks, title=self.config.name, most=self.elastic.blocks
        ):
            self.display.note(f"picture of the run: {picture}")
        what = (
            "no score"
            if score is None
            else f"accuracy {score:.2%}"
            if accuracy
            else f"{score:.4f} nats"
        )
        self.display.note(
            f"{what} on {self.task.held_out:,} held-out samples; {self.elastic.steps} "
            f"steps, {self.skipped} skipped"
        )
        return outcome


def _layers(model: Any) -> list[nn.Module]:
    found: list[nn.Module] = model.layers()
    return found


def _check(config: Config) -> None:
    """ConfigError for what a run over samples has not."""
    kind, parallel = config.task.kind, config.parallel
    problems: tuple[tuple[str, Any, Any], ...] = (
        ("zero.stage", config.zero.stage, 0),
        ("parallel.tp", parallel.tp, 1),
        ("parallel.micro_batches", parallel.micro_batches, 0),
        ("parallel.recompute", parallel.recompute, "never"),
        ("train.compile", config.train.compile, False),
        ("train.micro_batch", config.train.micro_batch, 0),
        ("recompute.modules", config.recompute.modules, ()),
        ("communication.codec", config.communication.codec, "none"),
    )
    for key, value, wanted in problems:
        if value != wanted:
            raise ConfigError(
                f"{key} is {json.dumps(value)}, which task.kind {kind!r} with numbered "
                "samples has not; set it to "
                f"{json.dumps(wanted)}"
            )
    if parallel.schedule not in ("1f1b", "gpipe"):
        raise ConfigError(
            f"parallel.schedule is {parallel.schedule!r}; with task.kind {kind!r} set it "
            "to 1f1b or gpipe"
        )
    if config.optimizer.communicates:
        raise ConfigError(
            f"optimizer.name is {config.optimizer.name!r}, which communicates; with "
            f"task.kind {kind!r} set adamw"
        )
    if PRECISIONS[config.precision.dtype].scaled:
        raise ConfigError(
            f"precision.dtype is {config.precision.dtype!r}; with task.kind {kind!r} set "
            "fp32 or bf16"
        )
