"""`pyops train --lr-range-test`: the run's first steps with a rising learning rate, and the loss
drawn against it.

loss   ..........
                 `.  <- steepest: a good peak rate lies here, or a little below
                   `._.'|
                         lr, logarithmic; ended where the loss is 4 times its least
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from pyops.config import Config, ConfigError
from pyops.launch.joining import launched
from pyops.optim.lr_scheduler import LRRangeTest, steepest
from pyops.train.host.ranks import joined_ranks
from pyops.train.host.run_folder import only_run_in
from pyops.train.loop import TrainingLoop
from pyops.train.report.notes import collected_notes
from pyops.train.setup.adapted_layout import adapted, started_ranks
from pyops.train.text_training import TextTraining

__all__ = ["lr_range_test"]

ENOUGH = 4.0  # times the least loss


def lr_range_test(config: Config, *, sweep: str = "1e-6:1:200") -> float | None:
    """Train from the beginning with rates from MIN to MAX in STEPS steps; the rate at which the
    loss falls fastest, or None.

    Args:
        sweep: "MIN:MAX:STEPS". Leaves lr_range.png and metrics.jsonl in <name>-lr-range, and no
            checkpoint. Smith, Cyclical learning rates for training neural networks, WACV 2017,
            section 3.3.

    Raises:
        ConfigError: On every rank alike.
    """
    if config.model_folder.given:
        raise ConfigError(
            f"--lr-range-test is for a GPT, but model.folder is {config.model_folder.folder!r}; "
            "leave one of them out"
        )
    least, most, steps = _parse(sweep)
    name = f"{config.name}-lr-range"
    config = dataclasses.replace(
        config, name=name, train=dataclasses.replace(config.train, num_steps=steps)
    )
    launched()
    config, _ = adapted(config, started_ranks(), idle=False)
    with (
        joined_ranks(config.train) as device,
        only_run_in(config.folder),
        collected_notes() as notes,
    ):
        training = TextTraining(config, device=device)
        loop = TrainingLoop(lambda _: training, config)
        notes.show(loop.display.note)
        schedule = LRRangeTest(training.optimizer, min_lr=least, max_lr=most, steps=steps)
        training.lr_at = lambda step: schedule.rate(step, 0.0)
        rates, losses = _sweep(training, loop)
        loop.display.close()
        found = steepest(rates, losses)
        if loop.log is not None:
            loop.log.close()
            picture = config.folder / "lr_range.png"
            if plot_range(picture, rates, losses, found=found, title=name):
                loop.display.note(f"loss against learning rate: {picture}")
        if found is None:
            loop.display.note("the loss never fell: try smaller rates")
            return None
        loop.display.note(
            f"the loss falls fastest at a learning rate of {rates[found]:.2g}: set optimizer.lr "
            "there, or a little below"
        )
        return rates[found]


def _sweep(training: TextTraining, loop: TrainingLoop) -> tuple[list[float], list[float]]:
    """Rates and losses up to where training falls apart."""
    rates: list[float] = []
    losses: list[float] = []
    while not training.is_over:
        row, _ = training.train_step()
        loop.write(row, tensorboard=False)
        # The loss is of all ranks, so that they stop together.
        loss = math.inf if row["loss"] is None else row["loss"]
        rates.append(row["lr"])
        losses.append(loss)
        if loss > ENOUGH * min(losses):
            break
    return rates, losses


def _parse(sweep: str) -> tuple[float, float, int]:
    try:
        least, most, steps = sweep.split(":")
        found = float(least), float(most), int(steps)
    except ValueError:
        raise ConfigError(
            f"--lr-range-test {sweep} is no MIN:MAX:STEPS; write 1e-6:1:200, say"
        ) from None
    if not (0 < found[0] < found[1] < float("inf") and found[2] >= 10):
        raise ConfigError(
            f"--lr-range-test {sweep}: it takes 0 < MIN < MAX and 10 steps or more; "
            "write 1e-6:1:200, say"
        )
    return found


def plot_range(
    path: Path, rates: Sequence[float], losses: Sequence[float], *, found: int | None, title: str
) -> bool:
    """Draw losses over rates and mark the position `found`; False without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(rates, losses, color="C0", linewidth=1.2)
    if found is not None:
        axes.axvline(rates[found], color="C3", linestyle="--", linewidth=1.0)
        axes.plot(
            [rates[found]], [losses[found]], "o", color="C3", label=f"steepest: {rates[found]:.2g}"
        )
        axes.legend()
    finite = [loss for loss in losses if loss < float("inf")]
    if finite:
        axes.set_ylim(bottom=0, top=1.3 * finite[0])
    axes.set(xscale="log", xlabel="learning rate", ylabel="nats per byte", title=title)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True
