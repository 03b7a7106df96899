"""The teacher of a run that trains a folder: another folder's model, frozen, and shared out as the
student is, but for its stages.

    tp      the teacher's layers are cut over the same ranks
    ZeRO 3  each copy of the model keeps its share of the teacher's parameters, and no states
    pp      the ranks of the student's last stage have the whole teacher; no other rank keeps it
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from pyops.comm.agreement import ranks_agree
from pyops.config import Config, ConfigError, plan_for_run
from pyops.distill import TaughtHead, freeze
from pyops.host_heap import trim
from pyops.mesh import Axes, Mesh
from pyops.parallel import PipelineOptions, Trainer
from pyops.parallel.losses import LabelLoss
from pyops.train.pretrained.folder_model import FolderModel
from pyops.zero import ZeroConfig

__all__ = ["leave_to_last_stage", "loss_beside_teacher"]

CHANGED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # in config.json
WIDTHS = ("hidden_size", "n_embd", "d_model")  # in config.json


def loss_beside_teacher(
    config: Config, student: FolderModel, mesh: Mesh, *, device: torch.device
) -> LabelLoss | None:
    """What the student learns; None without [distill], where it is the labels' cross entropy. A
    collective.

    Args:
        config: Of the run.
        student: What is trained.
        mesh: The ranks.
        device: Of the teacher.

    Raises:
        ConfigError: On every rank alike, for a teacher that does not fit the student.
    """
    if not config.distill.on:
        return None
    folder = _folder(config.distill.teacher)
    teacher = FolderModel.read(folder)
    with ranks_agree():
        _check(config, student, teacher)
    several = config.parallel.pp > 1
    plan = plan_for_run(config, num_rows=1)
    plan = replace(
        plan,
        pp=1,
        dp=0,
        pipeline=PipelineOptions(),
        num_microbatches=1,
        recompute=(),
        compile=False,
        fused_loss=False,  # its last layer computes the student's loss
        zero=ZeroConfig(plan.zero.stage if plan.zero.stage == 3 and not several else 0),
    )
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    own = mesh
    if several:
        axes = Axes(dp=ranks // config.parallel.tp, tp=config.parallel.tp)
        own = Mesh(axes, device_type=device.type)
    made = teacher.trainer(plan, optimizer=None, mesh=own, device=device)
    taught = TaughtHead(freeze(made.model), config.distill.options, owner=made)
    try:
        taught.check(torch.zeros(1, 2, dtype=torch.int64, device=device))
    except ValueError as error:
        raise ConfigError(f"distill.teacher is {teacher.folder}: {error}") from None
    return LabelLoss(shifts=True, in_head=taught)


def leave_to_last_stage(loss: LabelLoss | None, student: Trainer) -> None:
    """Let go of the teacher on ranks of a pipeline that never call it.

    Args:
        loss: Of `loss_beside_teacher`.
        student: Who learns it.
    """
    staged = student.parts.staged
    if loss is None or staged is None or staged.plan.rank_of[-1] == student.mesh.rank("pp"):
        return
    assert isinstance(loss.in_head, TaughtHead)
    loss.in_head.forget_teacher()
    trim()


def _folder(given: str) -> str:
    """The folder of transformers: the one that is given, or what a run has left in its own."""
    trained = Path(given) / "model"
    return str(trained) if (trained / "config.json").exists() else given


def _check(config: Config, student: FolderModel, teacher: FolderModel) -> None:
    length = config.model_folder.sequence_length
    teacher.check_length(length, f"model.sequence_length is {length}", "make it smaller")
    for key in CHANGED_LOGITS:
        if (value := student.fields.get(key)) not in (None, 1, 1.0):
            raise ConfigError(
                f"{student.folder} has {key} {value} in config.json, which changes its logits "
                "after its last layer, where the loss of a teacher is computed; leave [distill] out"
            )
    words, theirs = student.fields.get("vocab_size"), teacher.fields.get("vocab_size")
    if words != theirs:
        raise ConfigError(
            f"distill.teacher is {teacher.folder}, a model of {theirs} words, but the one of "
            f"{student.folder} has {words} (vocab_size in config.json); a student learns from a "
            "teacher of its vocabulary"
        )
    if student.tokenizer.tokens != teacher.tokenizer.tokens:
        raise ConfigError(
            f"the tokenizers of {student.folder} and of {teacher.folder} (distill.teacher) have "
            "other tokens; a student learns from a teacher that cuts text as it does"
        )
    width, other = _width(student), _width(teacher)
    if (hidden := config.distill.hidden) and width != other:
        raise ConfigError(
            f"distill.hidden is {hidden}, but the hidden states of {student.folder} are {width} "
            f"wide and those of {teacher.folder} {other}; set it to 0, or compare them in a script "
            "of your own: pyops.distill.Distillation learns a projection"
        )


def _width(model: FolderModel) -> int | None:
    """Of the hidden states, where config.json says it."""
    return next((model.fields[key] for key in WIDTHS if key in model.fields), None)
