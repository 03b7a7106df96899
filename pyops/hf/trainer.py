"""transformers.Trainer over ZeroOptimizer: its loop, schedules, logs and checkpoint folders, and no
wrapper around the model.

    create_optimizer     the Trainer's own groups and optimizer class, over ZeroOptimizer
    save_model           parameters are gathered, rank 0 writes them as ever
    checkpoint-N/zero    every rank's part of the optimizer's states

Any number of ranks, and any stage, goes on from such a checkpoint.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops import checkpoint
from pyops.hf.accelerate import check_accelerator, prepare
from pyops.hf.state_layouts import WHOLE
from pyops.mesh import Mesh
from pyops.optim import OneBitAdam
from pyops.precision import PRECISIONS
from pyops.zero import ZeroConfig, ZeroOptimizer

__all__ = ["ZeroTraining", "is_scaled", "trainer_class"]

FOLDER = "zero"  # within a checkpoint of the Trainer
SCHEDULER = "scheduler.pt"  # as the Trainer calls it
# Options of ZeroConfig that something of the Trainer's stands for.
INSTEAD = {
    "max_grad_norm": "TrainingArguments(max_grad_norm=...) clips",
    "reduction": "the Trainer expects the mean over ranks",
    "delayed_update": "the Trainer looks at the model between steps",
}
# Methods of the Trainer that are overridden where step() clips; earlier ones have not all of them.
CLIPPING = ("_clip_grad_norm", "_get_grad_norm", "_maybe_log_save_evaluate")
# Arguments of the Trainer, the value that they must have, and what to do instead.
REFUSED = {
    "torch_compile": (False, "call model.compile() before"),
    "auto_find_batch_size": (
        False,
        "one rank that runs out of memory would leave the others waiting: set the batch size",
    ),
    "fp16_full_eval": (False, "it casts the parameters in place: fp16=True computes in 16 bits"),
    "bf16_full_eval": (False, "it casts the parameters in place: bf16=True computes in 16 bits"),
}


class ZeroTraining:
    """The part of a Trainer that trains over ZeroOptimizer, named before the Trainer: class
    Mine(ZeroTraining, SFTTrainer).

    Args:
        zero: ZeroConfig(stage=2), say. The optimizer's class, its options, param groups and
            clipping are those of TrainingArguments, or optimizer_cls_and_kwargs=(pyops.optim.AdamW,
            {"lr": 1e-4}). With precision "fp16" the loss is multiplied by its loss scale, and
            steps that overflow are skipped, schedule included. Everything else is the Trainer's.
            `zero_optimizer` is the ZeroOptimizer, once train() has begun.

    Raises:
        ValueError: When it is made, for options which cannot work together, with what to do
            instead.
    """

    zero_optimizer: ZeroOptimizer | None = None
    _mesh: Mesh | None = None  # where a plan shares layers out, too
    _step_clips = False  # instead of the Trainer

    def __init__(self, *args: Any, zero: ZeroConfig, **kwargs: Any) -> None:
        self._zero_config = _checked_config(zero)
        if any(each is not None for each in kwargs.get("optimizers") or ()):
            raise ValueError(
                "ZeroTrainer makes its ZeroOptimizer when the model is on its device; "
                "give the class instead of optimizers=: "
                "optimizer_cls_and_kwargs=(torch.optim.AdamW, {'lr': 1e-4}), and the "
                "schedule in TrainingArguments"
            )
        super().__init__(*args, **kwargs)
        self._this: Any = self  # what the Trainer gives: its class is not known here
        _check_trainer(self._this)
        if self._is_scaled:
            self._let_step_clip()

    @property
    def _is_scaled(self) -> bool:
        """Whether the loss is multiplied by a scale of ours."""
        return is_scaled(self._zero_config)

    def _let_step_clip(self) -> None:
        """Of gradients that are cut, or scaled, step() alone has the norm."""
        lacking = [name for name in CLIPPING if not hasattr(super(ZeroTraining, self), name)]
        if lacking:
            raise ValueError(
                f"this plan, or precision, needs a Trainer with {lacking[0]}, which that of this "
                "transformers has not: pip install -U transformers, or set tp to 1 and leave the "
                "precision out"
            )
        norm = self._this.args.max_grad_norm
        self._zero_config = replace(self._zero_config, max_grad_norm=norm or None)
        self._step_clips = True

    # ----------------------------------------------------------------------------------------------
    # optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        if self._step_clips:
            return None
        return super()._clip_grad_norm(model)  # type: ignore[misc]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if self._step_clips:
            return None
        return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kw: Any) -> Any:
        if self._step_clips and self.zero_optimizer is not None:
            grad_norm = self.zero_optimizer.grad_norm
        return super()._maybe_log_save_evaluate(  # type: ignore[misc]
            tr_loss, grad_norm, *args, **kw
        )

    def create_optimizer(self, model: Any = None) -> Any:
        """As the Trainer's, over ZeroOptimizer."""
        this = self._this
        if this.optimizer is not None and this.optimizer.optimizer is self.zero_optimizer:
            return this.optimizer
        if self.zero_optimizer is not None:  # of a model that model_init has replaced
            self.zero_optimizer.close()
            self.zero_optimizer = None
        model, given = this.model if model is None else model, this.optimizer_cls_and_kwargs
        found, arguments = _optimizer_class(this, model)
        maker = _over_ranks(model, found, self._zero_config, self._mesh)
        this.optimizer_cls_and_kwargs = maker, arguments
        try:
            zero = super().create_optimizer(model)  # type: ignore[misc]
        finally:
            this.optimizer_cls_and_kwargs = given
        self.zero_optimizer = zero
        _, this.optimizer = prepare(this.accelerator, model, zero, scales_loss=self._is_scaled)
        if self._is_scaled:
            self._scale_losses(zero)
        return this.optimizer

    def _scale_losses(self, zero: ZeroOptimizer) -> None:
        """What the Trainer calls backward of is multiplied by the present scale, in float32."""
        accelerator = self._this.accelerator
        backward = getattr(accelerator.backward, "unscaled", accelerator.backward)

        def scaled(loss: Tensor, **options: Any) -> None:
            backward(zero.scale(loss.float()), **options)

        scaled.unscaled = backward  # type: ignore[attr-defined]
        accelerator.backward = scaled

    def _whole(self) -> AbstractContextManager[None]:
        return (
            nullcontext() if self.zero_optimizer is None else self.zero_optimizer.whole_parameters()
        )

    # ----------------------------------------------------------------------------------------------
    # checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's; every rank must call it. Parameters are whole meanwhile, on all
        ranks."""
        with self._whole():
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        this, zero = self._this, self.zero_optimizer
        assert zero is not None
        state = {"optimizer": zero.state_dict(), "layers": self._layers}
        checkpoint.save(Path(output_dir, FOLDER), state)
        if this.args.should_save:
            torch.save(this.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER))

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        this, zero = self._this, self.zero_optimizer
        if folder is None:
            return
        assert zero is not None
        zero.refresh_masters()  # of the weights that were loaded before
        path = Path(folder)
        if not (path / FOLDER).is_dir():
            if (path / "optimizer.pt").exists() or (path / "optimizer.bin").exists():
                raise ValueError(
                    f"{folder} has optimizer states of another Trainer, and none of a "
                    f"ZeroTrainer ({FOLDER}/): go on "
                    "with that one, or load its weights into the model and start anew "
                    "without resume_from_checkpoint"
                )
            return  # as the Trainer does: a folder of weights alone
        state, _ = checkpoint.load(path / FOLDER, lazy=True)
        zero.load_state_dict(self._as_here(state["optimizer"], state.get("layers", self._layers)))
        this.lr_scheduler.load_state_dict(torch.load(path / SCHEDULER, weights_only=True))

    @property
    def _layers(self) -> str:
        """How layers lie: WHOLE, as transformers has them, or CUT."""
        return WHOLE

    def _as_here(self, state: dict[str, Any], layers: str) -> dict[str, Any]:
        """An optimizer's state_dict, with tensors as this Trainer's layers lie.

        Raises:
            ValueError: They lie otherwise, and nothing says how they were cut.
        """
        if layers != self._layers:
            raise ValueError(
                "the checkpoint is of a Trainer whose layers were cut by a plan with tp; go on "
                "with pyops.hf.Trainer(plan=...), at any tp"
            )
        return state

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with self._whole():
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        if self.zero_optimizer is not None:
            self.zero_optimizer.refresh_masters()

    def _load_best_model(self) -> None:
        with self._whole():
            super()._load_best_model()  # type: ignore[misc]
        if self.zero_optimizer is not None:
            self.zero_optimizer.refresh_masters()


def _optimizer_class(
    trainer: Any, model: Any
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """What the Trainer would make its optimizer of; ValueError for what ZeroOptimizer, or the
    Trainer's clipping, can't use."""
    args = trainer.args
    found, arguments = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(
        args, model
    )
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(
            f"optim={getattr(args.optim, 'value', args.optim)!r} is not one optimizer's "
            "class, which ZeroOptimizer needs; take "
            "'adamw_torch', or optimizer_cls_and_kwargs=(pyops.optim.AdamW, {'lr': 1e-4})"
        )
    if issubclass(found, OneBitAdam) and args.max_grad_norm > 0:
        raise ValueError(
            "after its warm-up OneBitAdam leaves gradients on their ranks, and the "
            "Trainer would clip each by its own norm; "
            "set TrainingArguments(max_grad_norm=0)"
        )
    return found, arguments


def _over_ranks(
    model: Any,
    optimizer_class: type[torch.optim.Optimizer],
    config: ZeroConfig,
    mesh: Mesh | None,
) -> type[torch.optim.Optimizer]:
    """What the Trainer takes for an optimizer's class, and makes a ZeroOptimizer over
    `optimizer_class` when it is called."""

    class OverRanks(torch.optim.Optimizer):
        def __new__(cls, groups: Any, **options: Any) -> Any:
            return ZeroOptimizer(
                model, optimizer_class, config, params=groups, mesh=mesh, **options
            )

    return OverRanks


def _checked_config(zero: Any) -> ZeroConfig:
    if not isinstance(zero, ZeroConfig):
        raise ValueError(
            f"zero is {zero!r}; give a pyops.zero.ZeroConfig, ZeroConfig(stage=2) for one"
        )
    for name, why in INSTEAD.items():
        if getattr(zero, name) != getattr(ZeroConfig, name):
            raise ValueError(f"zero has {name}={getattr(zero, name)!r}; leave it out: {why}")
    return zero


def _check_trainer(trainer: Any) -> None:
    """ValueError for arguments of a Trainer under which the model would be wrapped, cast or
    replaced."""
    args = trainer.args
    if args.n_gpu > 1:
        raise ValueError(
            f"this Trainer would copy the model to {args.n_gpu} GPUs of one process; "
            "start a process for each: "
            f"torchrun --nproc-per-node {args.n_gpu}"
        )
    for name, (wanted, why) in REFUSED.items():
        if getattr(args, name, wanted) != wanted:
            raise ValueError(
                f"TrainingArguments({name}={getattr(args, name)!r}) does not go with "
                f"ZeroOptimizer; {why}"
            )
    if is_scaled(trainer._zero_config) and args.fp16:
        raise ValueError(
            "TrainingArguments(fp16=True) and precision='fp16' would both scale the loss; leave "
            "one of them out"
        )
    if trainer._zero_config.stage == 3 and getattr(args, "predict_with_generate", False):
        raise ValueError(
            "predict_with_generate=True: ranks generate different numbers of tokens, and "
            "at stage 3 each needs all the others; "
            "take stage 2, or generate within zero_optimizer.whole_parameters()"
        )
    check_accelerator(trainer.accelerator)
    _optimizer_class(trainer, trainer.model)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks != trainer.accelerator.num_processes:
        raise ValueError(
            f"Accelerate has {trainer.accelerator.num_processes} processes, "
            f"torch.distributed {ranks}: start all with torchrun"
        )


def is_scaled(config: ZeroConfig) -> bool:
    """Whether gradients of this precision need a loss scale.

    Args:
        config: Checked or not.
    """
    precision = config.precision
    found = PRECISIONS.get(precision) if isinstance(precision, str) else precision
    return found is not None and found.scaled


@cache
def trainer_class(training: type, name: str) -> type:
    """transformers.Trainer with what `training` does otherwise, made when it is first asked for,
    since transformers is slow to import.

    Args:
        training: A class of methods that come before transformers' own.
        name: Of the class in pyops.hf.

    Raises:
        ImportError: transformers, or accelerate, is not installed.
    """
    try:
        base = importlib.import_module("transformers").Trainer
    except ImportError as error:
        raise ImportError(
            f"pyops.hf.{name} needs transformers and accelerate: pip install "
            "transformers accelerate"
        ) from error
    return type(name, (training, base), {"__doc__": training.__doc__, "__module__": "pyops.hf"})
