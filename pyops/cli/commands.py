"""The command `pyops`: train, data, generate, eval, compress, plan, launch, doctor, profile,
flight, replay, page, convert, simulate, bench, env.

    pyops train CONFIG.toml [--set section.key=value]... [--resume | --lr-range-test [RANGE]]
    pyops data SOURCE... --tokenizer FILE --out FOLDER [--workers N] [--key KEY]
                                                     texts become token shards, in parallel
    pyops generate FOLDER --prompt TEXT [--chat] [--max-new-tokens N] [--temperature T] [--tp N]
    pyops eval FOLDER --data FILE [--sequence-length N] [--tp N] [--pp N]
    pyops compress CONFIG.toml [--set section.key=value]...
                                  a folder's model becomes smaller, each step measured
    pyops plan MODEL --cluster NAME [--devices N] [--explain] [--json]
                                                  which layout for a model on a cluster, and why
    pyops plan CONFIG.toml [--ranks N] [--set section.key=value]...
                                                          the layout that it has on 1 ... N ranks
    pyops launch CONFIG.toml [--slurm | --mpi | --kubernetes] [--nodes N] [--dry-run]
                                                  a run on several processes or hosts
    pyops doctor [--folder FOLDER]                what differs between the ranks, or is short
    pyops profile CONFIG.toml [--steps N] [--depth N] [--trace FILE]        the parts of a step
    pyops flight FOLDER            which rank of a run waits for which, in which call, and where
    pyops replay CONFIG.toml STEP                   the rows on which a run's loss stood out
    pyops page FOLDER                                                  a run's curves as run.html
    pyops convert SOURCE TARGET [--key model] [--dtype bfloat16]
                                               a checkpoint and one safetensors file, both ways
    pyops simulate NAME [--stages K] [--microbatches M] [--option v=2]... [--draw PICTURE.svg]
                                                                          a pipeline's schedule
    pyops bench [NAME]... [options of python -m benchmarks]
    pyops env
    torchrun --nproc-per-node 2 -m pyops train CONFIG.toml ...               over two processes

What the user can put right is one line on rank 0 and exit code 2; a run stopped by a signal ends
with 128 + its number.
"""

from __future__ import annotations

import argparse
import importlib
import math
import platform
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pyops
from pyops.cli.compressing import add_compress, compressed
from pyops.cli.data_command import add_data, tokens_made
from pyops.cli.first_rank import is_first_rank, print_error
from pyops.cli.folder_commands import add_eval, add_generate, answer, score
from pyops.cli.launching import add_doctor, add_launch, examined, launch
from pyops.cli.observing import (
    add_flight,
    add_page,
    add_profile,
    add_replay,
    flight,
    page,
    profile,
    replay,
)
from pyops.cli.overrides import add_overrides
from pyops.cli.planning import add_plan, plan
from pyops.cli.simulate import add_arguments, report
from pyops.cli.trials import launched as started_by_torchrun
from pyops.cli.trials import num_ranks
from pyops.launch import LaunchError
from pyops.launch.joining import launched

__all__ = ["main"]

STOPPED = 128
WIDTH = 80  # columns of what is to be pasted into a report


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a checkpoint's folder; a Hugging Face folder; or a safetensors file",
    )
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="of a checkpoint: a new safetensors file, or a new Hugging Face "
        "folder for its model; else a new checkpoint's folder",
    )
    parser.add_argument(
        "--key",
        default="model",
        help="which part of the state a file is of: model, or optimizer.w, say",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="of floating tensors that are written",
    )
    parser.add_argument(
        "--like",
        metavar="FOLDER",
        help="take other fields of config.json from this Hugging Face folder",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pyops", description="Train, measure, and describe this installation."
    )
    parser.add_argument("--version", action="version", version=f"pyops {pyops.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(
        commands.add_parser(
            "train", help="train a GPT, or a Hugging Face folder, as a TOML file says"
        )
    )
    add_data(commands.add_parser("data", help="texts become token shards to train on"))
    add_generate(
        commands.add_parser("generate", help="a text, continued by a Hugging Face folder's model")
    )
    add_eval(commands.add_parser("eval", help="how well a Hugging Face folder predicts a text"))
    add_compress(
        commands.add_parser("compress", help="a folder's model becomes smaller, step by step")
    )
    add_plan(commands.add_parser("plan", help="which layout for a model on a cluster, and why"))
    add_profile(commands.add_parser("profile", help="where a step of a run spends its time"))
    add_flight(commands.add_parser("flight", help="who waits for whom in a run's collectives"))
    add_replay(commands.add_parser("replay", help="the rows on which a run's loss stood out"))
    add_page(commands.add_parser("page", help="a run's curves on one page, run.html"))
    _add_convert(
        commands.add_parser(
            "convert", help="between checkpoints, Hugging Face folders and safetensors files"
        )
    )
    add_launch(
        commands.add_parser("launch", help="a run on several processes or hosts, by their launcher")
    )
    add_doctor(commands.add_parser("doctor", help="what differs between the ranks, or is short"))
    simulate = commands.add_parser(
        "simulate", help="a pipeline's schedule: its picture, bubble and memory"
    )
    add_arguments(simulate)
    commands.add_parser("bench", help="check and time the kernels beside their rivals")
    commands.add_parser("env", help="what a bug report needs: versions, build, kernels")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    # All the rest is for the benches: argparse.REMAINDER would keep --help and other leading
    # options for itself.
    if words[:1] == ["bench"]:
        return _bench(words[1:])
    given = _parser().parse_args(words)
    try:
        if given.command in OF_RANKS:
            launched()
    except LaunchError as error:
        return _fail(error)
    if given.command == "train":
        return _train(given.config, given.overrides, resume=given.resume, lr_range=given.lr_range)
    if given.command == "plan" and given.measured and (given.devices or 1) > 1 and num_ranks() == 1:
        return started_by_torchrun(given.devices, words)
    if given.command in ACTIONS:
        return _act(ACTIONS[given.command], given)
    if given.command in USES:
        return _print(USES[given.command], given)
    if given.command == "convert":
        return _convert(
            given.source, given.target, key=given.key, dtype=given.dtype, like=given.like
        )
    if given.command == "simulate":
        try:
            print(report(given))
        except (ValueError, ImportError, OSError) as error:
            return _fail(error)
        return 0
    return _env()


def _add_train(train: argparse.ArgumentParser) -> None:
    train.add_argument("config", metavar="CONFIG.toml")
    add_overrides(train, help="override a key of the file: --set train.num_steps=10")
    train.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint of this run"
    )
    train.add_argument(
        "--lr-range-test",
        nargs="?",
        const="1e-6:1:200",
        metavar="MIN:MAX:STEPS",
        dest="lr_range",
        help="train with a rising learning rate instead, and draw the loss against it (1e-6:1:200)",
    )


def _fail(error: object) -> int:
    print_error(error)
    return 2


def _train(config: str, overrides: Sequence[str], *, resume: bool, lr_range: str | None) -> int:
    from pyops.checkpoint import CheckpointError
    from pyops.config import ConfigError, load_config
    from pyops.data import CorpusError
    from pyops.train import lr_range_test, train

    try:
        if lr_range is not None:
            if resume:
                return _fail(
                    "--resume has no meaning with --lr-range-test, which begins anew; "
                    "leave one of them out"
                )
            lr_range_test(load_config(config, overrides=overrides), sweep=lr_range)
            return 0
        outcome = train(load_config(config, overrides=overrides), resume=resume)
    except (ConfigError, CorpusError, CheckpointError, LaunchError) as error:
        return _fail(error)
    except KeyboardInterrupt:  # before or after the loop, which asks for a checkpoint instead
        return STOPPED + 2
    return STOPPED + outcome.stopped_by if outcome.stopped_by else 0


OF_RANKS = ("train", "generate", "eval", "compress", "plan", "profile", "doctor")
USES = {
    "data": tokens_made,
    "generate": answer,
    "eval": score,
    "compress": compressed,
    "plan": plan,
    "profile": profile,
    "flight": flight,
    "replay": replay,
    "page": page,
}


ACTIONS = {"launch": launch, "doctor": examined}


def _act(action: Callable[[argparse.Namespace], int], given: argparse.Namespace) -> int:
    from pyops.config import ConfigError

    try:
        return action(given)
    except (ConfigError, LaunchError, TimeoutError) as error:
        return _fail(error)


def _print(use: Callable[[argparse.Namespace], str], given: argparse.Namespace) -> int:
    from pyops.config import ConfigError
    from pyops.data import CorpusError
    from pyops.hub import HubError
    from pyops.plan import PlanError

    try:
        text = use(given)
    except (ConfigError, CorpusError, HubError, PlanError) as error:
        return _fail(error)
    if is_first_rank():
        print(text)
    return 0


def _convert(source: str, target: str, *, key: str, dtype: str | None, like: str | None) -> int:
    import torch

    from pyops import hub
    from pyops.checkpoint import CheckpointError
    from pyops.checkpoint.convert import export_weights, import_weights, is_checkpoint

    wanted = getattr(torch, dtype) if dtype else None
    to_folder = is_checkpoint(source) and not target.endswith(".safetensors")
    try:
        if like is not None and not to_folder:
            return _fail(
                f"--like {like} is for a Hugging Face folder made of a checkpoint; leave it out"
            )
        if to_folder:
            shapes = hub.from_checkpoint(source, target, dtype=wanted, like=like)
        elif is_checkpoint(source):
            shapes = export_weights(source, target, key=key, dtype=wanted)
        elif dtype is not None:
            return _fail(
                f"--dtype {dtype} is for what is made of a checkpoint, and {source} is "
                "none; leave it out"
            )
        elif hub.is_hub_folder(source):
            shapes = hub.to_checkpoint(source, target)
        else:
            shapes = import_weights(source, target, key=key)
    except (CheckpointError, hub.HubError) as error:
        return _fail(error)
    print(
        f"{len(shapes)} tensors, {sum(math.prod(shape) for shape in shapes.values()):,} "
        f"numbers: {target}"
    )
    return 0


def _bench(arguments: Sequence[str]) -> int:
    checkout = Path(pyops.__file__).resolve().parent.parent
    if not (checkout / "benchmarks" / "__main__.py").exists():
        return _fail(
            f"the benches are part of a source checkout, and {checkout} is none: clone "
            "the repository, install it with "
            "pip install -e . and call pyops bench again"
        )
    return subprocess.run([sys.executable, "-m", "benchmarks", *arguments], cwd=checkout).returncode


def _env() -> int:
    import torch

    from pyops.ops import library

    info = library.build_info()
    cuda = (
        f"{torch.version.cuda}, {torch.cuda.device_count()} device(s)"
        if torch.version.cuda
        else "not in this torch"
    )
    backends = [
        name for name in ("gloo", "nccl", "mpi") if torch.distributed.is_backend_available(name)
    ]
    lines = {
        "pyops": pyops.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "torch cuda": cuda,
        "backends": ", ".join(backends) or "none",
        "build": "with kernels" if info["extension"] else "plain torch, without kernels",
        **{f"build {key}": _show(value) for key, value in info.items() if key != "extension"},
        "cpu isa": f"{library.isa()} (of {', '.join(library.isas()) or 'none'})",
    }
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        lines[f"gpu {i}"] = f"{torch.cuda.get_device_name(i)}, sm_{major}{minor}"
    names = sorted(_ops())
    column = max(map(len, [*lines, *names])) + 4
    for key, value in lines.items():
        print(
            textwrap.fill(
                f"{key:{column}s}{value}",
                WIDTH,
                subsequent_indent=" " * column,
                break_on_hyphens=False,
            )
        )
    print(f"{'kernels':{column}s}cpu   cuda")
    for name in names:
        present = ["yes" if pyops.has_kernel(name, device) else "-" for device in ("cpu", "cuda")]
        print(f"  {name:{column - 2}s}{present[0]:6s}{present[1]}")
    return 0


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        ", ".join(map(str, value)) or "none"
        if isinstance(value, list | tuple)
        else str(value) or "none"
    )


def _ops() -> set[str]:
    """The names of all ops of pyops."""
    from pyops.torch_private import all_op_names

    importlib.import_module("pyops.ops")  # which defines them
    names = all_op_names()
    return {
        name.removeprefix("pyops::").split(".")[0] for name in names if name.startswith("pyops::")
    }
