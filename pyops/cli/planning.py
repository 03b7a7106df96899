"""`pyops plan`: which layout for a model on a cluster, or which one a TOML file has on N ranks.

$ pyops plan llama-8b --cluster h100 --devices 64 --batch 512
llama-8b, 8.03 billion parameters, on 64 x NVIDIA H100 SXM (8 nodes), bf16, 512 rows a step
* dp 64          2   1x8 none   59.0   8.67 s   7,563   44%
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from pyops.cli.first_rank import is_first_rank
from pyops.cli.overrides import add_overrides
from pyops.cli.trials import blocks_measured, num_ranks, ranks_joined, tried

if TYPE_CHECKING:
    from pyops.plan import ImageShape, ModelShape, Options, Plan

__all__ = ["add_plan", "plan"]

NUMBERED = ("tp", "cp", "pp", "dp", "zero", "micro_batch", "num_microbatches", "stages_per_rank")
OF_IMAGES = "coatnet-"  # begins the names of models of images
NAMES_OF_BLOCKS = {"gpt2": "transformer.h.*"}  # of transformers' models; others "model.layers.*"


def add_plan(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pyops plan`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a TOML file with [model], a Hugging Face folder, a config.json, or coatnet-0 to "
        "coatnet-7",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--cluster", metavar="NAME", help="a100, h100, h200, b200, laptop, or a TOML file"
    )
    where.add_argument(
        "--measured",
        action="store_true",
        help="this machine and the model's blocks on it; the three best layouts are tried. With "
        "--devices N as N processes, whose messages are timed, too",
    )
    parser.add_argument(
        "--devices", type=int, default=None, metavar="N", help="of the cluster (one node)"
    )
    parser.add_argument("--sequence", type=int, default=0, metavar="N", help="tokens of a row")
    parser.add_argument(
        "--image-size", type=int, default=0, metavar="N", help="pixels of a side, of images (224)"
    )
    parser.add_argument(
        "--batch", type=int, default=0, metavar="ROWS", help="of a step (four for each device)"
    )
    parser.add_argument(
        "--tokens",
        type=float,
        default=0.0,
        metavar="N",
        help="of the whole training, or images: 1e12",
    )
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="(bf16)")
    parser.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="what a layout must have: tp=2, zero=1, recompute=block, schedule=zb1p",
    )
    parser.add_argument(
        "--codec",
        action="append",
        default=[],
        metavar="NAME",
        help="what gradients of whole copies may travel as: bf16, int8, onebit, power_sgd, topk",
    )
    parser.add_argument(
        "--memory-part", type=float, default=0.92, metavar="P", help="usable (0.92)"
    )
    parser.add_argument("--rows", type=int, default=6, metavar="N", help="layouts shown (6)")
    parser.add_argument(
        "--explain", action="store_true", help="what takes memory and time, and why"
    )
    parser.add_argument("--json", action="store_true", help="all of it, for programs")
    parser.add_argument("--draw", metavar="PICTURE", help="an .svg, .png or .pdf to write")
    parser.add_argument("--write", metavar="FILE.toml", help="the file to train with")
    parser.add_argument(
        "--ranks",
        type=int,
        default=8,
        metavar="N",
        help="without a cluster: the layouts with parallel.adapt on 1, 2, ... N ranks (8)",
    )
    add_overrides(parser, help="as train")


def plan(given: argparse.Namespace) -> str:
    """What `pyops plan` prints.

    Args:
        given: The arguments.

    Raises:
        PlanError, ConfigError, HubError: For what the user can put right.
    """
    if not given.cluster and not given.measured:
        return _adapted(given.model, given.overrides, ranks=given.ranks)
    from pyops.plan import ModelShape, Options, best, draw, explain, load_cluster, summary, table
    from pyops.plan.pictures import picture_path

    shape, section, defaults = _model(given)
    options = Options(
        batch=given.batch or defaults.get("batch", 0),
        precision=given.precision or defaults.get("precision", "bf16"),
        memory_part=given.memory_part,
        codecs=tuple(given.codec),
        fixed=_fixed(given.fix),
    )
    options.validate()
    if given.draw:
        picture_path(given.draw)
    if given.measured:
        found = _measured(given, shape, options, section)
    else:
        cluster = load_cluster(given.cluster)
        if given.devices is not None:
            cluster = cluster.with_devices(given.devices)
        found = best(shape, cluster, options)
    blocks = str(defaults.get("blocks", "blocks.*"))
    if given.write and is_first_rank():
        _write(given.write, found, section, blocks)
    if given.draw and is_first_rank():
        draw(found, given.draw)
    if given.json:
        return found.to_json()
    texts = [summary(found), table(found, rows=given.rows)]
    if given.measured and not found.best.measured:
        texts.append("no layout was tried: that is done where the model is a GPT of a TOML file")
    if given.explain:
        texts.append(explain(found, tokens=given.tokens))
    texts.append(found.code(blocks=blocks))
    if isinstance(shape, ModelShape):
        texts.append(found.toml(model=section, blocks=blocks).rstrip())
        texts.append(found.command(given.write or "plan.toml"))
    return "\n\n".join(texts)


def _adapted(config: str, overrides: Sequence[str], *, ranks: int) -> str:
    """The layouts that a file has on 1 ... N ranks, with [parallel] adapt."""
    from pyops.config import load_config
    from pyops.train.setup.adapted_layout import plans

    return "\n".join(
        f"{number:5d} rank{' ' if number == 1 else 's'}   {reason}"
        for number, reason in plans(load_config(config, overrides=overrides), ranks)
    )


def _of_images(given: argparse.Namespace) -> ImageShape:
    """The shape of a CoAtNet, by its name."""
    from pyops.plan import ImageShape, PlanError

    if given.sequence:
        raise PlanError(
            f"--sequence {given.sequence}: {given.model} has images; give --image-size, the pixels "
            "of a side"
        )
    if given.write:
        raise PlanError(
            f"--write {given.write}: pyops train has no task for images of {given.model}; give the "
            "ParallelPlan that is printed to pyops.parallel.parallelize"
        )
    shape = ImageShape.named(given.model)
    return shape.with_image_size(given.image_size) if given.image_size else shape


def _model(
    given: argparse.Namespace,
) -> tuple[ModelShape | ImageShape, dict[str, Any] | None, dict[str, Any]]:
    """The shape, the section [model] of a file that trains it, and what else is known of it."""
    from pyops.plan import ModelShape, PlanError, decoder_of_folder

    if given.model.startswith(OF_IMAGES) and not os.path.exists(given.model):
        return _of_images(given), None, {}
    if given.image_size:
        raise PlanError(
            f"--image-size {given.image_size}: {given.model} has tokens; give --sequence"
        )
    defaults: dict[str, Any] = {}
    section: dict[str, Any] | None
    if given.model.endswith(".toml"):
        from pyops.config import load_config

        config = load_config(given.model, overrides=given.overrides)
        defaults = {"batch": config.train.batch, "precision": config.precision.dtype}
        if not config.model_folder.given:
            model = config.model
            shape = ModelShape.of_gpt(model, name=config.name)
            section = {
                field.name: getattr(model, field.name)
                for field in fields(model)
                if getattr(model, field.name) != field.default
            }
            section = {"sequence_length": model.sequence_length, **section}
        else:
            folder = config.model_folder
            shape = decoder_of_folder(folder.folder).with_sequence(folder.sequence_length)
            section = asdict(folder)
    else:
        shape = decoder_of_folder(given.model)
        is_folder = os.path.isdir(given.model)
        section = {"folder": given.model} if is_folder else None
    if section is None or "folder" in section:
        defaults["blocks"] = _blocks(given.model if section is None else section["folder"])
    if given.sequence:
        shape = shape.with_sequence(given.sequence)
    if section is not None:
        section["sequence_length"] = shape.sequence_length
    return shape, section, defaults


def _blocks(path: str) -> str:
    """The names of the blocks of a Hugging Face folder's model."""
    import json
    from pathlib import Path

    file = Path(path) / "config.json" if os.path.isdir(path) else Path(path)
    kind = json.loads(file.read_text()).get("model_type")
    return NAMES_OF_BLOCKS.get(kind, "model.layers.*")


def _measured(
    given: argparse.Namespace,
    shape: ModelShape | ImageShape,
    options: Options,
    section: dict[str, Any] | None,
) -> Plan:
    """The plan for the ranks that run here; that of a GPT with its best layouts tried."""
    from pyops.plan import ImageShape, Machine, PlanError, best, measure_layers

    ranks = num_ranks()
    if given.devices not in (None, ranks):
        raise PlanError(
            f"--devices {given.devices}, but torchrun has started {ranks} processes; leave it out"
        )
    with ranks_joined():
        cluster = Machine.here().cluster()
        if isinstance(shape, ImageShape):
            degrees = range(1, ranks + 1)
            layers = measure_layers(shape, precision=options.precision, tp=degrees)
            return best(shape, cluster, options, measured=layers)
        costs = blocks_measured(shape, options.precision)
        found = best(shape, cluster, options, measured=costs)
        if section is None or "folder" in section:
            return found
        return tried(found, section)


def _fixed(pairs: Sequence[str]) -> dict[str, Any]:
    from pyops.plan import PlanError

    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise PlanError(f"--fix {pair} is no assignment; write --fix tp=2, say")
        if key in NUMBERED:
            if not value.isdigit():
                raise PlanError(f"--fix {pair}: {value!r} is no whole number; write --fix {key}=2")
            found[key] = int(value)
        elif key == "sequence_parallel":
            if value not in ("true", "false"):
                raise PlanError(f"--fix {pair}: write --fix sequence_parallel=true, or false")
            found[key] = value == "true"
        else:
            found[key] = value
    return found


def _write(path: str, found: Plan, section: dict[str, Any] | None, blocks: str) -> None:
    from pyops.plan import PlanError

    if section is None:
        raise PlanError(
            f"--write {path}: a config.json alone can't be trained; name its folder, with weights "
            "and tokenizer"
        )
    try:
        with open(path, "w") as file:
            file.write(found.toml(model=section, blocks=blocks))
    except OSError as error:
        raise PlanError(
            f"--write {path}: {error.strerror}; name a file in a folder that is there"
        ) from None
