"""compress: a folder's model through all steps, each stage written, read again and measured.

folder in -> step 1 -> write -> step 2 -> write -> ...             in <output>.tmp/
                         |                  |
                         read again, scored and timed, all stages in turn
                                            |
                                            '-> folder out, compression.json, compression.svg
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyops.comm.agreement import on_first_rank, ranks_agree
from pyops.compress.folders import file_bytes, form_of, load_model, write_model
from pyops.compress.measuring import (
    Score,
    Spread,
    count_parameters,
    score,
    tensor_bytes,
    time_models,
)
from pyops.compress.methods import Work, apply_step, check_step, skeleton_of
from pyops.compress.methods.work import Facts
from pyops.compress.picture import check_picture, draw
from pyops.compress.report import CompressReport, StageReport
from pyops.compress.settings import CompressConfig
from pyops.compress.steps import DistillStep, QuantizeStep, Step
from pyops.compress.text import Texts
from pyops.config import ConfigError, TrainConfig
from pyops.hub.folder_files import FLOATING, HubError, open_weights
from pyops.mesh import ALONE
from pyops.tensor_parallel import Ranks
from pyops.train.host.ranks import joined_ranks
from pyops.train.pretrained.folder_model import FolderModel

__all__ = ["compress"]

REPORT, PICTURE = "compression.json", "compression.svg"
ROUNDING = 1e-4  # of what a model that was read again says, beside the one that was written


def _silent(line: str) -> None:
    """Say nothing."""


def compress(
    config: CompressConfig, *, device: str = "auto", say: Callable[[str], None] = _silent
) -> CompressReport:
    """Take all steps, measure the model before and after each, and write the folder out. A
    collective of the ranks that torchrun started, if any, which share the layers of the model.

    Args:
        config: What to do.
        device: "auto" is cuda where there is one; "cpu" or "cuda".
        say: Called with a line when a step begins and ends, on every rank.

    Returns:
        What was found, on every rank.

    Raises:
        ConfigError, CorpusError, HubError: On every rank alike, for what the user can put right;
            nothing is left behind then.
    """
    with joined_ranks(TrainConfig(device=device)) as place:
        run = _Run.prepare(config, place)
        with run.aside() as folder:
            return run.all_steps(folder, say)


@dataclass
class _Run:
    """A run of which all has been checked that can be before the first step."""

    config: CompressConfig
    ranks: Ranks
    texts: Texts
    model: Any
    dtype: torch.dtype

    @classmethod
    def prepare(cls, config: CompressConfig, device: torch.device) -> _Run:
        ranks = Ranks.of(dist.group.WORLD if dist.is_initialized() else ALONE)
        output, data = Path(config.model.output), config.data
        with ranks_agree(ranks.group):
            if config.measure.picture:
                check_picture()
        on_first_rank(lambda: _check_output(output), group=ranks.group)
        folder = FolderModel.read(config.model.folder)
        with ranks_agree(ranks.group):
            if (form := form_of(config.model.folder)) != "dense":
                raise ConfigError(
                    f"model.folder {config.model.folder} holds weights in the form {form!r}; name "
                    "the folder that it was made of, and write all steps in one file"
                )
        with ranks_agree(ranks.group):
            folder.check_length(
                data.sequence_length,
                f"data.sequence_length is {data.sequence_length}",
                "make it smaller",
            )
            new = config.measure.prompt_tokens + config.measure.new_tokens
            folder.check_length(
                new, f"measure.prompt_tokens and new_tokens are {new} together", "give less"
            )
            dtype = _dtype(config)
        try:
            model = load_model(config.model.folder, ranks=ranks, device=device, dtype=torch.float32)
        except HubError:
            raise
        except ValueError as error:  # of heads that the ranks can't share
            raise ConfigError(f"{config.model.folder} on {ranks.size} ranks: {error}") from None
        with ranks_agree(ranks.group):
            _check_finite(config.model.folder, model)
            skeleton = skeleton_of(model)
            for number, step in enumerate(config.steps, start=1):
                skeleton = _checked(number, step, skeleton, ranks)
        texts = Texts.prepare(config, folder.tokenizer, device)
        return cls(config, ranks, texts, model, dtype)

    @contextmanager
    def aside(self) -> Iterator[Path]:
        """The folder beside the folder out, in which the stages are written; it goes at the end."""
        output = Path(self.config.model.output)
        folder = output.with_name(output.name + ".tmp")

        def clear() -> None:
            shutil.rmtree(folder, ignore_errors=True)

        def make() -> None:
            clear()
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise _not_writable(output, error) from None

        on_first_rank(make, group=self.ranks.group)
        try:
            yield folder
        finally:
            if self.ranks.rank == 0:
                clear()

    def all_steps(self, aside: Path, say: Callable[[str], None]) -> CompressReport:
        config, ranks = self.config, self.ranks
        source = Path(config.model.folder)
        teaches = any(isinstance(step, DistillStep) for step in config.steps)
        teacher = None
        if teaches:
            teacher = load_model(source, ranks=ranks, device=self.texts.device, dtype=torch.float32)
        work = Work(self.model, teacher, self.texts, ranks)
        stages = [_Stage(source, "before", None, count_parameters(work.model))]
        for number, step in enumerate(config.steps, start=1):
            say(f"step {number} of {len(config.steps)}: {step.label}")
            started = time.perf_counter()
            try:
                apply_step(work, step)
            except ConfigError as error:
                raise ConfigError(f"step {number}: {error}") from None
            folder, quantizes = aside / str(number), isinstance(step, QuantizeStep)
            form = (
                "quantized" if quantizes else "dense" if work.masks is None else config.model.form
            )
            write_model(work.model, folder, source=source, ranks=ranks, form=form, dtype=self.dtype)
            count = stages[-1].num_parameters if quantizes else count_parameters(work.model)
            pruned = stages[-1].num_pruned if quantizes else work.num_pruned
            seconds = time.perf_counter() - started
            stages.append(
                _Stage(folder, step.label, step, count, pruned, seconds, dict(work.facts))
            )
        said = score(work.model, self.texts, batch=config.measure.batch)
        say("measuring")
        del work, teacher
        report = self._measured(stages, said)
        self._finish(stages[-1].folder, report)
        return report

    def _measured(self, stages: Sequence[_Stage], said: Score) -> CompressReport:
        """Of all stages, as their folders say."""
        config, ranks, texts = self.config, self.ranks, self.texts
        models: list[Any] = []
        found: list[tuple[Score, int]] = []
        for stage in stages:
            model = load_model(stage.folder, ranks=ranks, device=texts.device)
            found.append((score(model, texts, batch=config.measure.batch), tensor_bytes(model)))
            if config.measure.rounds:
                models.append(model)
        last = found[-1][0]
        as_computed = self.dtype == torch.float32 or form_of(stages[-1].folder) != "dense"
        if as_computed and abs(last.loss - said.loss) > ROUNDING * said.loss:
            raise RuntimeError(
                f"the model that was written has a loss of {last.loss:.6f} when it is read again, "
                f"the one in memory {said.loss:.6f}"
            )
        times: list[tuple[Spread, Spread] | tuple[None, None]] = [(None, None)] * len(stages)
        if config.measure.rounds:
            times = list(time_models(models, texts, config.measure, ranks))
        sizes = on_first_rank(
            lambda: [file_bytes(stage.folder) for stage in stages], group=ranks.group
        )
        return CompressReport(
            folder=config.model.folder,
            output=config.model.output,
            num_ranks=ranks.size,
            num_threads=torch.get_num_threads(),
            device=texts.device.type,
            num_tokens=last.num_tokens,
            batch_shape=(config.measure.batch, config.data.sequence_length),
            stages=tuple(
                stage.report(size, *numbers, times=each)
                for stage, size, numbers, each in zip(stages, sizes, found, times, strict=True)
            ),
        )

    def _finish(self, folder: Path, report: CompressReport) -> None:
        """The folder out."""
        output = Path(self.config.model.output)

        def rename() -> None:
            (folder / REPORT).write_text(report.as_json())
            if self.config.measure.picture:
                draw(report, folder / PICTURE)
            _check_output(output)
            os.replace(folder, output)

        on_first_rank(rename, group=self.ranks.group)


@dataclass(frozen=True)
class _Stage:
    """A model that was written."""

    folder: Path
    name: str
    step: Step | None
    num_parameters: int
    num_pruned: int = 0
    seconds: float = 0.0
    facts: Facts = field(default_factory=dict)

    def report(
        self,
        size: int,
        said: Score,
        in_memory: int,
        *,
        times: tuple[Spread | None, Spread | None],
    ) -> StageReport:
        options = {} if self.step is None else dataclasses.asdict(self.step)
        return StageReport(
            name=self.name,
            method="" if self.step is None else self.step.method,
            options=options,
            num_parameters=self.num_parameters,
            num_pruned=self.num_pruned,
            file_bytes=size,
            tensor_bytes=in_memory,
            loss=said.loss,
            accuracy=said.accuracy,
            token_ms=times[0],
            batch_ms=times[1],
            seconds=self.seconds,
            facts=self.facts,
        )


def _check_output(output: Path) -> None:
    if os.path.lexists(output):
        raise ConfigError(f"model.output {output} is there already; name another, or remove it")
    parent = next(each for each in output.absolute().parents if os.path.lexists(each))
    if not parent.is_dir():
        raise _not_writable(output, NotADirectoryError(errno.ENOTDIR, f"{parent} is no folder"))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise _not_writable(output, PermissionError(errno.EACCES, f"{parent} is read-only"))


def _not_writable(output: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"model.output {output} can't be written: {error.strerror or error}; name a place where "
        "this process may write"
    )


def _check_finite(folder: str, model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ConfigError(
                f"model.folder {folder}: {name} has a number that is not finite; name a folder of "
                "an earlier step"
            )


def _dtype(config: CompressConfig) -> torch.dtype:
    """Of the numbers that are written."""
    with open_weights(config.model.folder) as weights:
        kinds = {FLOATING[kind] for kind in weights.dtypes.values() if kind in FLOATING}
    if len(kinds) != 1:
        raise ConfigError(
            f"the files of {config.model.folder} hold {sorted(map(str, kinds))}; write them anew "
            "in one dtype first"
        )
    found: torch.dtype = getattr(torch, config.model.dtype) if config.model.dtype else kinds.pop()
    return found


def _checked(number: int, step: Step, skeleton: Any, ranks: Ranks) -> Any:
    try:
        return check_step(step, skeleton, ranks)
    except ConfigError as error:
        raise ConfigError(f"step {number} ({step.method}): {error}") from None
