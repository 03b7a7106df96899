"""`pyops profile CONFIG.toml`: where a step of a run spends its time, on made-up tokens.

pyops profile small.toml                                       one process
pyops profile small.toml --trace step.json.gz                  and a trace for Perfetto
torchrun --nproc-per-node 2 -m pyops profile small.toml        every rank
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pyops.cli.overrides import add_overrides

if TYPE_CHECKING:
    from pyops.config import Config
    from pyops.observe.profile.table import Peak

__all__ = ["add_profile", "profile"]


def add_profile(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pyops profile`."""
    parser.add_argument("config", metavar="CONFIG.toml")
    add_overrides(parser, help="override a key of the file, as for pyops train")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="timed each way (3)")
    parser.add_argument(
        "--depth", type=int, default=2, metavar="N", help="of the modules that are listed (2)"
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="write a step of all ranks for Perfetto; .gz packs it"
    )


def profile(given: argparse.Namespace) -> str:
    """What `pyops profile` prints. A collective.

    Args:
        given: The arguments.

    Raises:
        ConfigError: On every rank alike, for what the user can put right.
    """
    from pyops.comm.agreement import gather, on_first_rank
    from pyops.config import ConfigError, load_config
    from pyops.flight_record import recording
    from pyops.observe.profile.measuring import profile_steps
    from pyops.observe.profile.table import profile_text
    from pyops.observe.profile.trace import clock_offsets
    from pyops.train.host.ranks import joined_ranks
    from pyops.train.setup.trial import Trial

    config = load_config(given.config, overrides=given.overrides)
    if config.over_samples or config.model_folder.given:
        raise ConfigError(
            f"{given.config} is no run of a GPT over text, the only kind that is profiled"
        )
    if given.steps < 1 or given.depth < 0:
        raise ConfigError(
            f"--steps is {given.steps} and --depth is {given.depth}; give 1 or more, and 0 or more"
        )
    # Within compiled code no module begins or ends.
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, compile=False))
    with joined_ranks(config.train) as device, tempfile.TemporaryDirectory() as notes:
        config.check_ranks(dist.get_world_size() if dist.is_initialized() else 1)
        trial = Trial(config, device=device)
        with recording(notes):
            own = profile_steps(trial.step, trial.strategy.model, device=device, steps=given.steps)
        offsets = clock_offsets()
        everyone = gather(own)
        peaks = on_first_rank(lambda: _peaks(config, device))
        text = profile_text(everyone, peaks=peaks, depth=given.depth)
        if given.trace:
            path = Path(given.trace)
            on_first_rank(lambda: _write([p.trace for p in everyone], path, offsets))
            text += f"\ntrace for https://ui.perfetto.dev: {path}"
    return text


def _write(traces: list[dict[str, Any]], path: Path, offsets: list[int]) -> None:
    from pyops.config import ConfigError
    from pyops.observe.profile.trace import merge

    try:
        merge(traces, path, offsets=offsets)
    except OSError as error:
        raise ConfigError(
            f"--trace {path} can't be written: {error.strerror or error}; name another file"
        ) from None


def _peaks(config: Config, device: torch.device) -> list[Peak]:
    """What the device could do: as measured now, and as its vendor says, where it is known."""
    from pyops.observe.profile.operations import measured_peak
    from pyops.observe.profile.table import Peak
    from pyops.plan.clusters import cluster_names, load_cluster
    from pyops.precision import PRECISIONS

    precision = config.precision.dtype
    dtype = PRECISIONS[precision].dtype
    found = [Peak(measured_peak(device, dtype), f"the fastest {precision} product measured now")]
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for each in cluster_names():
            known = load_cluster(each).device
            if known.name in name and precision in known.peak:
                found.append(Peak(known.peak[precision], f"{precision}, {known.name} data sheet"))
    return found
