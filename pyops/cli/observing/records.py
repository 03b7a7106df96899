"""`pyops flight`, `pyops replay` and `pyops page`: who waits for whom in a run, the batch on which
its loss stood out, and all of it on a page.

    $ pyops flight runs/small
    2 of 2 ranks left a record
    ...
    late: rank 0 waits for rank 1 in all_reduce #41 ...; rank 1 stands at data.py:17 load
    $ pyops replay small.toml runs/small/spikes/step-00000123
    loss  row  text
    9.871   3  'zzzzzzzz...
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch

from pyops.cli.overrides import add_overrides

__all__ = ["add_flight", "add_page", "add_replay", "flight", "page", "replay"]

SHOWN = 60  # characters of a row's text


def add_flight(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pyops flight`."""
    parser.add_argument(
        "folder", metavar="FOLDER", help="of a run, or of pyops.flight_record.recording"
    )


def flight(given: argparse.Namespace) -> str:
    """What `pyops flight` prints.

    Args:
        given: The arguments.

    Raises:
        ConfigError: The folder has no record.
    """
    from pyops.config import ConfigError
    from pyops.observe import FlightError, explain, read_records

    try:
        return explain(read_records(given.folder))
    except FlightError as error:
        raise ConfigError(str(error)) from None


def add_page(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pyops page`."""
    parser.add_argument("folder", metavar="FOLDER", help="of a run, which may still go on")


def page(given: argparse.Namespace) -> str:
    """What `pyops page` prints: where it wrote the page.

    Args:
        given: The arguments.

    Raises:
        ConfigError: The folder is not one of a run, or can't be written.
    """
    from pyops.config import ConfigError
    from pyops.observe.page import write_page

    try:
        return str(write_page(given.folder))
    except OSError as error:
        raise ConfigError(
            f"{given.folder}/run.html can't be written: {error.strerror or error}"
        ) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def add_replay(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pyops replay`."""
    parser.add_argument("config", metavar="CONFIG.toml")
    parser.add_argument("place", metavar="STEP", help="a folder of the run's spikes/")
    add_overrides(parser, help="override a key of the file, as for pyops train")


def replay(given: argparse.Namespace) -> str:
    """What `pyops replay` prints: the loss of each row of a batch, the highest first, by the newest
    checkpoint that is no later than the step.

    Args:
        given: The arguments.

    Raises:
        ConfigError: The run is not one over text, or the folder has no batch.
    """
    from pyops.checkpoint import load
    from pyops.config import ConfigError, ParallelConfig, ZeroConfig, load_config
    from pyops.observe.spikes import load_batch
    from pyops.train import TextTraining
    from pyops.train.setup.gpt_layers import batch_of

    config = load_config(given.config, overrides=given.overrides)
    if config.over_samples or config.model_folder.given or config.asynchronous.on:
        raise ConfigError(
            f"{given.config} is no run of a GPT over text, the only kind that replays a batch"
        )
    try:
        rows, about = load_batch(given.place)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    count = len(rows["tokens_BT"])
    alone = dataclasses.replace(
        config,
        parallel=ParallelConfig(),
        zero=ZeroConfig(),
        train=dataclasses.replace(config.train, batch=count, micro_batch=0, compile=False),
    )
    device = torch.device("cpu")
    training = TextTraining(alone, device=device)
    path = _newest_before(config.folder / "checkpoints", about["step"])
    if path is not None:
        training.load_state(load(path, lazy=True)[0], path)
    singles = [{name: each[i : i + 1] for name, each in rows.items()} for i in range(count)]
    losses = [training.trainer.evaluate([batch_of(each, device)]) for each in singles]
    source = f"checkpoint {path}" if path is not None else "the first weights: no checkpoint is old"
    lines = [
        f"step {about['step'] + 1}: {about['why']}",
        f"{count} rows by {source}{' enough' if path is None else ''}",
        f"{'loss':>10} {'row':>5}  text",
    ]
    for i in sorted(range(count), key=lambda row: -losses[row]):
        text = training.data.decode(rows["tokens_BT"][i])
        lines.append(f"{losses[i]:>10.4f} {i:>5}  {text[:SHOWN]!r}")
    return "\n".join(lines)


def _newest_before(folder: Path, step: int) -> Path | None:
    """The newest checkpoint of no more than `step` steps."""
    found = [
        path
        for path in sorted(folder.glob("step-*"))
        if int(path.name.removeprefix("step-")) <= step
    ]
    return found[-1] if found else None
