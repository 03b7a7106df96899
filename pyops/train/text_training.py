"""The training run; it reads the way the data goes.

    one step:   rows -> forward -> loss -> backward --buckets, all-reduce--> optimizer -> metrics

The loss of a micro-batch is divided by the tokens of the global batch before backward, and
gradients are summed over ranks and micro-batches, so nothing is divided afterwards. The same code
runs as one process and under torchrun.
"""

from __future__ import annotations

import math
import os
import signal
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.checkpoint import Checkpoints, load
from pyops.comm.agreement import naming_lost_ranks, on_first_rank
from pyops.config import Config, ConfigError
from pyops.data import Batches, prepare, validation_rows
from pyops.flat import Placement
from pyops.mesh import Axes, Mesh
from pyops.models import sample
from pyops.precision import PRECISIONS
from pyops.train.folder import continues, finished, only_run_in, prepare_folder
from pyops.train.host.heap import trim_after
from pyops.train.host.memory import check_memory
from pyops.train.host.ranks import StopRequest, joined_ranks, stand_by
from pyops.train.outcome import Outcome
from pyops.train.report.display import Display, describe_memory
from pyops.train.report.metrics import MetricsLog, StepMemory, peak_memory_gib, plot_losses
from pyops.train.report.notes import collected_notes
from pyops.train.report.traffic import Traffic
from pyops.train.sample_training import TaskRun
from pyops.train.setup.adapted_layout import adapted, started_ranks, trouble_ahead
from pyops.train.setup.pipelined import Part, Pipelined
from pyops.train.setup.recipe import make_loss_scale, make_model, recompute_modules
from pyops.train.setup.state import read
from pyops.train.setup.strategy import Zero, make_strategy

__all__ = ["Run", "train"]


def train(config: Config, *, resume: bool = False) -> Outcome:
    """Train as `config` says; outputs go to config.folder.

    resume: continue from the newest checkpoint there, if there is one; else a folder of an earlier
    run is moved aside. Runs alone, or as one of the ranks that torchrun started; when torchrun
    starts them again, they go on by themselves. Raises ConfigError, CorpusError, CheckpointError on
    every rank alike for what the user can put right.
    """
    config, chosen = adapted(config, started_ranks(), idle=not dist.is_initialized())
    if chosen.idle and int(os.environ["RANK"]) >= chosen.grid.ranks:
        return Outcome(0, None, None, 0, stand_by())
    check_memory(config, ranks=chosen.grid.ranks)
    joined = joined_ranks(
        config.train, active=chosen.grid.ranks, request=(request := StopRequest())
    )
    with joined as device, only_run_in(config.folder), collected_notes() as notes:
        resume = continues(config.folder) or resume
        run: Run | TaskRun = (TaskRun if config.over_samples else Run)(
            config, device=device, resume=resume
        )
        notes.show(run.display.note)
        if chosen.reason:
            run.display.note(f"{chosen.reason}{trouble_ahead()}")
        if run.is_over:
            steps, key = (
                run.display.num_steps,
                "task.epochs" if config.over_samples and config.task.epochs else "train.steps",
            )
            run.display.note(
                f"already finished: {config.folder} has all {steps} steps; set {key} to "
                "more, or leave out --resume to begin "
                "anew"
            )
        try:
            with request:
                stopped = run.loop(request)
        except BaseException:
            run.checkpoints.close()
            raise
        request.number = request.number or signal.SIGTERM if stopped else 0
        outcome = run.finish(stopped_by=request.number)
        if run.rank == 0 and not stopped:
            finished(config.folder)
        return outcome


class Run:
    """Everything a run consists of, made in the order in which the data goes through it."""

    def __init__(self, config: Config, *, device: torch.device, resume: bool = False) -> None:
        self.config, self.device = config, device
        world, parallel = dist.get_world_size() if dist.is_initialized() else 1, config.parallel
        axes = Axes(pp=parallel.pp, dp=parallel.copies(world), tp=parallel.tp)
        self.rank, self.mesh = (
            dist.get_rank() if world > 1 else 0,
            Mesh(axes, device_type=device.type),
        )
        groups = {
            f"{axis}_group": self.mesh.group(axis)
            for axis in ("tp", "pp")
            if self.mesh.size(axis) > 1
        }
        num_ranks = self.mesh.size("dp")  # ranks that share a model see the same rows
        model, options = config.model, config.train
        rows = {
            "sequence_length": model.sequence_length,
            "rank": self.mesh.rank("dp"),
            "num_ranks": num_ranks,
        }

        self.corpus = prepare(
            config.data, vocab_size=model.vocab_size, sequence_length=model.sequence_length
        )
        self.batches = Batches(self.corpus, global_batch=options.batch, seed=options.seed, **rows)
        self.held_out = validation_rows(
            self.corpus, num_sequences=options.validation_sequences, **rows
        )
        share = options.batch // num_ranks
        self.micro_batch = share // parallel.cut(share, micro_batch=options.micro_batch)

        self.precision = PRECISIONS[config.precision.dtype]
        self.loss_scale = make_loss_scale(config.precision)
        self.model = make_model(config, device=device, tp_group=groups.get("tp_group"))
        if options.compile:
            self.model.compile()
        if config.recompute.modules:
            recompute_modules(self.model, config.recompute)
        whole = Placement.of(self.model)
        self.num_parameters = sum(
            math.prod(whole[name].global_shape if name in whole else p.shape)
            for name, p in self.model.named_parameters()
        )
        numel, part = self.num_parameters // parallel.tp, None
        if parallel.pp > 1:
            part = Part(
                self.model, plan=parallel.plan(share // self.micro_batch), rank=self.mesh.rank("pp")
            )
            numel = sum(p.numel() for p in self.model.parameters())
        self.strategy = make_strategy(
            config, self.model, device=device, group=self.mesh.group("dp"), **groups
        )
        self.optimizer, self.pipelined = self.strategy.optimizer, None
        if part is not None and isinstance(self.strategy, Zero):
            self.pipelined = Pipelined(
                config, self.model, part, self.strategy.zero, mesh=self.mesh, rows=share
            )
        self.traffic = Traffic(self.strategy.communicator, numel=numel, window=options.log_every)
        self.step, self.skipped, self.peak_gib = 0, 0, 0.0
        self.lr_at = lambda step: config.optimizer.lr_at(step, num_steps=options.steps)

        on_first_rank(lambda: prepare_folder(config, resume=resume))
        # A copy of states in files, to be written in the background, would take the memory that
        # they were put there to save.
        background = config.zero.offload in ("none", "cpu")
        self.checkpoints = Checkpoints(
            config.folder / "checkpoints", keep=options.keep, background=background
        )
        latest = on_first_rank(self.checkpoints.latest) if resume else None
        if latest is not None:
            self.restore(latest)
        self.was_over = self.is_over  # when it began
        self.log = None
        if self.rank == 0:
            self.log = MetricsLog(
                config.folder, first_step=self.step, tensorboard=config.train.tensorboard
            )
        self.display = Display(
            config.name,
            num_steps=options.steps,
            first_step=self.step,
            every=options.log_every,
            quiet=self.rank != 0,
        )
        self.display.note(self._introduction(world, resumed=latest, wanted=resume))

    @property
    def is_over(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.config.train.steps

    def _introduction(self, num_ranks: int, *, resumed: Path | None, wanted: bool) -> str:
        text = (
            f"{self.num_parameters / 1e6:.2f} M parameters on {num_ranks} x "
            f"{self.device.type}, {self.corpus.train.size:,} "
            f"tokens of {self.corpus.path}; a byte-bigram model reaches "
            f"{self.corpus.bigram_loss:.3f} nats per byte"
        )
        sizes = " x ".join(
            f"{axis} {self.mesh.size(axis)}"
            for axis in ("pp", "dp", "tp")
            if self.mesh.size(axis) > 1
        )
        text += f"\n{sizes}" if num_ranks > 1 else ""
        text += f"; {self.pipelined.described}" if self.pipelined is not None else ""
        if resumed is not None:
            return f"{text}\nresumed from {resumed}"
        return (
            f"{text}\nno checkpoint in {self.checkpoints.folder}: from the beginning"
            if wanted
            else text
        )

    def loop(self, request: StopRequest) -> bool:
        """All steps that are left; True when a signal to any rank ended them early."""
        options = self.config.train
        first = self.step
        while self.step < options.steps:
            if self.step == first + 1:  # the first one made the states
                row, stop = self._measured_step(stop=bool(request.number))
            else:
                row, stop = self.train_step(stop=bool(request.number))
            number, last = self.step, self.step == options.steps
            if last or (options.validate_every and number % options.validate_every == 0):
                row["validation_loss"] = self.validate()
            self.display.step(row)
            if self.log is not None:
                self.log.write(
                    row,
                    tensorboard=last or "validation_loss" in row or number % options.log_every == 0,
                )
                for problem in self.log.take_problems():
                    self.display.note(problem)
            if (
                stop
                or last
                or (options.checkpoint_every and number % options.checkpoint_every == 0)
            ):
                self.save()
            if stop and not last:
                return True
        return False

    def _measured_step(self, *, stop: bool) -> tuple[dict[str, Any], bool]:
        """As `train_step`; says what memory there is for what."""
        self.peak_gib = peak_memory_gib(self.device)  # the mark falls
        with StepMemory(self.device) as memory:
            found = self.train_step(stop=stop)
        self.display.note(describe_memory(self.strategy.memory(), taken=memory.taken))
        return found

    def train_step(self, *, stop: bool = False) -> tuple[dict[str, Any], bool]:
        """One optimizer step; its row of metrics, and whether any rank wants to stop."""
        started = time.perf_counter()
        options, length = self.config.train, self.config.model.sequence_length
        rows_BT = self.batches.next()
        totals = torch.zeros(
            3, dtype=torch.float64, device=self.device
        )  # nats, bytes, ranks that want to stop
        totals[1] = self.corpus.tokenizer.token_bytes(rows_BT[:, 1:].numpy())
        totals[2] = float(stop)
        totals[0] = self._differentiate(
            rows_BT.to(self.device), scale=self.loss_scale.scale / (options.batch * length)
        )
        nats_all, bytes_all, stops = self._sum(totals).tolist()

        lr = self.lr_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        grad_norm = self._update(finite=_is_finite(nats_all))
        row = {
            "step": self.step,
            "loss": nats_all / bytes_all if _is_finite(nats_all) else None,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens_per_s": options.batch * length / (time.perf_counter() - started),
            "memory_gib": max(self.peak_gib, peak_memory_gib(self.device)),
            "skipped": self.skipped,
            **({"loss_scale": self.loss_scale.scale} if self.precision.scaled else {}),
            **self.traffic.step(),
        }
        self.step += 1
        trim_after(self.step)
        return row, stops > 0

    def _differentiate(self, rows_BT: Tensor, *, scale: float) -> Tensor:
        """Nats of this rank's sequences; their gradients, times `scale`, are reduced, or on their
        way."""
        seed, first_row, length = (
            self.config.train.seed,
            self.batches.first_row,
            rows_BT.shape[1] - 1,
        )
        if self.pipelined is not None:
            return self.pipelined.differentiate(
                rows_BT, scale=scale, step=self.step, first_row=first_row
            )
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        micro_batches = rows_BT.split(self.micro_batch)
        for i, micro_BT in enumerate(micro_batches):
            self.model.set_dropout(
                (micro_BT.shape[0], length),
                seed=seed,
                step=self.step,
                first_row=first_row + i * self.micro_batch,
            )
            with nullcontext() if i + 1 == len(micro_batches) else self.strategy.no_sync():
                nats = self._nats(self.strategy.forward, micro_BT)
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
            # looks at the norm itself, and changes nothing but zeroes gradients if it is not finite
            self.optimizer.step()
            assert self.optimizer.grad_norm is not None
            norm = float(self.optimizer.grad_norm)
        if self.precision.scaled:
            self.loss_scale.update(not _is_finite(norm))
        if _is_finite(norm):
            return norm
        self.strategy.drop_gradients()
        self.skipped += 1
        return None

    def _nats(self, model: nn.Module, rows_BT: Tensor) -> Tensor:
        """Sum over the rows of -ln p(next token)."""
        nats: Tensor = model(rows_BT[:, :-1], rows_BT[:, 1:], reduction="sum")
        return nats

    def _sum(self, totals: Tensor) -> Tensor:
        """Over all ranks; those that share a model count the same, all alike."""
        if dist.is_initialized():
            with naming_lost_ranks("the sum of losses"):
                dist.all_reduce(totals)
        return totals

    @torch.no_grad()
    def validate(self) -> float:
        """Nats per byte on the held-out sequences."""
        self.model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        totals[1] = self.corpus.tokenizer.token_bytes(self.held_out[:, 1:].numpy())
        if self.pipelined is not None:
            totals[0] = self.pipelined.evaluate(self.held_out.to(self.device))
        else:
            for rows_BT in self.held_out.split(self.micro_batch):
                if len(rows_BT):
                    totals[0] += self._nats(self.model, rows_BT.to(self.device))
        self.model.train()
        nats, num_bytes = self._sum(totals).tolist()
        return nats / num_bytes

    def save(self) -> Path:
        """Write a checkpoint of the steps done so far."""
        state = {
            "step": self.step,
            "skipped": self.skipped,
            "model_config": asdict(self.config.model),
            "precision": self.precision.name,
            "loss_scale": self.loss_scale.state_dict(),
            "data": self.batches.state_dict(),
            "recipe": self._recipe(),
            **self.strategy.state(),
        }
        own = {"torch": torch.get_rng_state()}
        if self.device.type == "cuda":
            own["cuda"] = torch.cuda.get_rng_state(self.device)
        return self.checkpoints.save(self.step, state, own=own)

    def _recipe(self) -> dict[str, str]:
        """What decides which states there are."""
        return {
            "optimizer.name": self.config.optimizer.name,
            "communication.codec": self.config.communication.codec,
        }

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint, on any number of ranks. Raises ConfigError when it is of
        another model."""
        state, own = load(path, lazy=True, compare=True)  # damage met later is not met by all ranks
        if "elastic" in state:
            raise ConfigError(
                f"checkpoint {path} is of a run over numbered samples, of task.kind "
                f"{state['task']['kind']!r}, but this one is "
                "over text in which nothing is frozen; set task.kind and elastic.freeze "
                "as they were, or give this run another "
                "name"
            )
        now = {f"model.{k}": v for k, v in asdict(self.config.model).items()}
        now |= {"precision.dtype": self.precision.name, **self._recipe()}
        before = {f"model.{k}": v for k, v in state["model_config"].items()} | {
            "precision.dtype": state["precision"]
        }
        before |= state.get("recipe", {})
        for key, value in now.items():
            if before.get(key, value) != value:
                raise ConfigError(
                    f"{key} is {value!r}, but checkpoint {path} was made with "
                    f"{before[key]!r}; set it to that, "
                    "or give this run another name"
                )
        self.batches.load_state_dict(state["data"])
        self.strategy.load(state)
        self.step, self.skipped = state["step"], state["skipped"]
        if "loss_scale" in state:  # not of a run from before there was one
            self.loss_scale.load_state_dict(state["loss_scale"])
        if own is not None:
            own = read(own)
            torch.set_rng_state(own["torch"])
            if self.device.type == "cuda" and "cuda" in own:
                torch.cuda.set_rng_state(own["cuda"], self.device)

    def finish(self, *, stopped_by: int = 0) -> Outcome:
        """Draw the curve, write a sample of text, say how it went."""
        self.display.close()
        self.checkpoints.wait()
        rows = self.log.rows if self.log is not None else []
        held_out = [row["validation_loss"] for row in rows if "validation_loss" in row]
        outcome = Outcome(
            self.step,
            held_out[-1] if held_out else None,
            self.corpus.bigram_loss,
            self.skipped,
            stopped_by,
        )
        drawn = self.was_over and (self.config.folder / "sample.txt").exists()
        text = (
            self.sample()
            if self.config.train.sample_tokens and not stopped_by and not drawn
            else ""
        )
        if self.log is None:
            return outcome
        self.log.close()
        folder = self.config.folder
        picture = folder / "loss.png"
        if self.config.train.plot and plot_losses(
            picture, rows, bigram_loss=self.corpus.bigram_loss, title=self.config.name
        ):
            self.display.note(f"loss curve: {picture}")
        if stopped_by:
            name = signal.Signals(stopped_by).name
            self.display.note(f"stopped by {name} after step {self.step}; continue with --resume")
            return outcome
        if text:
            (folder / "sample.txt").write_text(text)
            self.display.note(f"--- a sample ({folder / 'sample.txt'}) ---\n{text}\n---")
        skipped = (
            f", {self.skipped} steps skipped (loss or gradient not finite)" if self.skipped else ""
        )
        loss = "none" if outcome.validation_loss is None else f"{outcome.validation_loss:.3f}"
        self.display.note(
            f"validation loss {loss} nats per byte, a byte-bigram model "
            f"{self.corpus.bigram_loss:.3f}; "
            f"{self.step} steps{skipped}, peak memory "
            f"{max(self.peak_gib, peak_memory_gib(self.device)):.2f} GiB per process"
        )
        return outcome

    def sample(self) -> str:
        """The beginning of the first held-out sequence, continued by the model; "" on ranks that
        have other models."""
        with self.strategy.whole():
            if self.mesh.rank("dp"):
                return ""  # those that share a model with rank 0 help it
            prompt = self.held_out[0, :64].to(self.device)
            model = self.model if self.pipelined is None else self.pipelined.whole()
            tokens = sample(
                model,
                prompt,
                num_tokens=self.config.train.sample_tokens,
                context=self.config.model.sequence_length,
                seed=self.config.train.seed,
            )
        return self.corpus.tokenizer.decode(tokens.tolist())


def _is_finite(value: float) -> bool:
    return abs(value) < float("inf")
