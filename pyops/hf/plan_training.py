"""transformers.Trainer on a ParallelPlan: a script changes one import, and names a plan.

    from pyops.hf import Trainer                       was: from transformers import Trainer
    Trainer(model=..., args=..., plan=ParallelPlan(tp=2, zero=ZeroConfig(stage=1)))

    dp 0   rows 0 1    tp 0   tp 1     ranks that share a copy of the model read the same rows;
    dp 1   rows 2 3    tp 0   tp 1     copies share out what ZeRO says

What is left of ZeroTraining's: the optimizer, its checkpoints, what is refused. Here are the cut of
the layers, and what follows of it: which rows, which weights are written, which are read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pyops import recompute, tensor_parallel
from pyops.comm.agreement import ranks_agree
from pyops.hf.state_layouts import CUT, WHOLE, states_laid_back, states_laid_out
from pyops.hf.trainer import ZeroTraining
from pyops.hub.pretrained import PretrainedWeights
from pyops.mesh import ALONE, Mesh
from pyops.parallel import ParallelPlan
from pyops.parallel.dropout.keyed_dropout import key_dropout, set_keyed_dropout
from pyops.tensor_parallel import whole_state_dict
from pyops.zero import ZeroConfig

__all__ = ["PlanTraining"]

# Options of ParallelPlan that something of the Trainer's stands for.
INSTEAD = {
    "cp": "pyops.parallel.parallelize(model, plan, optimizer=...) shares out the tokens of rows",
    "max_grad_norm": "TrainingArguments(max_grad_norm=...) clips",
    "num_microbatches": "TrainingArguments(gradient_accumulation_steps=...) cuts the rows",
    "compile": "call compile() of the model's blocks before",
    "sequence_parallel": "pyops.parallel.parallelize(model, plan, optimizer=...) has it",
}
# Methods of the Trainer that a plan with tp overrides: an earlier transformers has not all of them.
OVERRIDDEN = ("_get_dataloader", "get_tp_size")


class PlanTraining(ZeroTraining):
    """The part of a Trainer that trains on a plan, named before the Trainer: class
    Mine(PlanTraining, SFTTrainer).

    Args:
        plan: How the ranks share the model out: dp, tp, tensor_parallel, zero, recompute and
            precision of ParallelPlan. None: every rank has all of the model, and other rows.
            Everything else is the Trainer's. With tp the model is cut in place when the Trainer is
            made, and its dropout draws by counters: the same masks on every layout.

    Raises:
        ValueError, TypeError: When it is made, for a plan that the Trainer's loop can't follow, or
            options which cannot work together, with what to do instead.
    """

    def __init__(self, *args: Any, plan: ParallelPlan | None = None, **kwargs: Any) -> None:
        self._plan = _checked_plan(plan)
        self._shared_out: Any = None  # the model that was cut
        self._dropouts: list[tuple[str, nn.Module]] = []
        self._forwards = (-1, 0)  # (step, number of its next micro-batch)
        self._whole_state: dict[str, Tensor] | None = None
        super().__init__(*args, zero=_zero_of(self._plan), **kwargs)
        with ranks_agree():
            axes = self._plan.axes(dist.get_world_size() if dist.is_initialized() else 1)
            if self._plan.tp > 1:
                _check_tensor_parallel(self._this)
        if self._plan.tp > 1:
            self._mesh = Mesh(axes, device_type=self._this.args.device.type)
            self._let_step_clip()
        self._share_out(self._this.model)

    def _share_out(self, model: Any) -> None:
        """Cut the layers, once for each model: model_init makes new ones."""
        if model is None or model is self._shared_out:
            return
        plan, mesh = self._plan, self._mesh
        inner = model.get_base_model() if hasattr(model, "peft_config") else model
        if mesh is not None:
            tensor_parallel.parallelize(inner, group=mesh.group("tp"), plan=plan.tensor_parallel)
        with ranks_agree():
            if mesh is not None:
                key_dropout(inner, group=mesh.group("tp") or ALONE)
            if plan.recompute:
                offload = None if plan.recompute_offload == "none" else plan.recompute_offload
                recompute.apply(inner, plan.recompute, offload=offload)
        self._dropouts = [
            (name, each)
            for name, each in inner.named_modules()
            if hasattr(each, "set_dropout_state")
        ]
        self._shared_out = model

    # ----------------------------------------------------------------------------------------------
    # training

    def create_optimizer(self, model: Any = None) -> Any:
        """As the Trainer's, over ZeroOptimizer and of the model as it was cut."""
        self._share_out(self._this.model if model is None else model)
        return super().create_optimizer(model)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """As the Trainer's, with dropout by counters where layers are cut.

        Args:
            model: As the Trainer calls it.
            inputs: Of one micro-batch.
            *args: What else the Trainer gives.
            **kwargs: The same.
        """
        this, mesh = self._this, self._mesh
        if mesh is not None and self._dropouts:
            step, number = self._forwards
            number = number if step == this.state.global_step else 0
            self._forwards = this.state.global_step, number + 1
            set_keyed_dropout(
                self._dropouts,
                seed=this.args.seed,
                step=this.state.global_step * this.args.gradient_accumulation_steps + number,
                first_row=mesh.rank("dp") * this.args.train_batch_size,
            )
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        return loss

    def get_tp_size(self) -> int:
        """Of how many ranks each set reads the same rows: the Trainer counts rows and labels by
        it."""
        return self._plan.tp

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(*args, **kwargs)  # type: ignore[misc]
        return loader if self._mesh is None else _of_copy(loader, self._mesh)

    # ----------------------------------------------------------------------------------------------
    # evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's: each row counts once, though all ranks of its copy have it."""
        this = self._this
        if self._mesh is not None:
            this.gather_function = partial(
                _gather_copies, this.gather_function, this.accelerator, self._plan.tp
            )
        try:
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        finally:
            this.gather_function = this.accelerator.gather_for_metrics  # as the Trainer leaves it

    # ----------------------------------------------------------------------------------------------
    # weights

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's; every rank must call it. Parameters are whole meanwhile, on all
        ranks."""
        if self._mesh is not None:
            with self._whole():
                group = self._mesh.group("tp")
                self._whole_state = whole_state_dict(self._this.model, group=group)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._whole_state = None

    @property
    def _layers(self) -> str:
        return WHOLE if self._mesh is None else CUT

    def _as_here(self, state: dict[str, Any], layers: str) -> dict[str, Any]:
        model = self._this.model
        if layers == self._layers or hasattr(model, "peft_config"):  # adapters lie alike in both
            return state
        states = state["state"]
        if self._mesh is not None:
            return {**state, "state": states_laid_out(states, model)}
        return {**state, "state": states_laid_back(states, model, self._plan.tensor_parallel)}

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        given = self._whole_state if state_dict is None else state_dict
        super()._save(output_dir, given)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._mesh is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._fill(resume_from_checkpoint, self._this.model if model is None else model)

    def _load_best_model(self) -> None:
        if self._mesh is None:
            super()._load_best_model()
        else:
            self._fill(self._this.state.best_model_checkpoint, self._this.model)

    def _fill(self, folder: str, model: Any) -> None:
        """Each rank's part of the weights of a folder."""
        if hasattr(model, "peft_config"):
            raise ValueError(
                f"{folder} holds adapters of PEFT, which can't be read with plan tp="
                f"{self._plan.tp}; go on with tp=1, or train by pyops.parallel.parallelize, whose "
                "save() and load() have any plan"
            )
        self._share_out(model)
        with ranks_agree(), self._whole(), PretrainedWeights(folder) as weights:
            weights.check(model)
            for module in model.modules():
                weights.fill(module)
        if self.zero_optimizer is not None:
            self.zero_optimizer.refresh_masters()


def _checked_plan(plan: Any) -> ParallelPlan:
    """The plan, or the error that says why the Trainer can't follow it."""
    if plan is None:
        return ParallelPlan()
    if not isinstance(plan, ParallelPlan):
        raise TypeError(f"plan is {plan!r}; give pyops.parallel.ParallelPlan(tp=2)")
    plan.validate()
    if plan.pp > 1:
        raise ValueError(
            f"plan has pp={plan.pp}, and the Trainer's loop calls the whole model; set pp to 1, or "
            "train by pyops.parallel.parallelize(model, plan, optimizer=...), whose step() runs a "
            "pipeline"
        )
    for name, why in INSTEAD.items():
        if getattr(plan, name) != getattr(ParallelPlan, name):
            raise ValueError(f"plan has {name}={getattr(plan, name)!r}; leave it out: {why}")
    return plan


def _zero_of(plan: ParallelPlan) -> ZeroConfig:
    return replace(plan.zero, precision=None if plan.precision == "fp32" else plan.precision)


def _check_tensor_parallel(trainer: Any) -> None:
    """ValueError for what does not go with layers that are cut."""
    lacking = [name for name in OVERRIDDEN if not hasattr(super(PlanTraining, trainer), name)]
    if lacking:
        raise ValueError(
            f"plan has tp={trainer._plan.tp}, and the Trainer of this transformers has no "
            f"{lacking[0]}; upgrade transformers (pip install -U transformers), or set tp to 1"
        )
    if trainer.args.gradient_checkpointing:
        raise ValueError(
            f"plan has tp={trainer._plan.tp}, and TrainingArguments(gradient_checkpointing=True) "
            "would draw other dropout the second time; name the modules in the plan instead: "
            "recompute=('model.layers.*',)"
        )


def _of_copy(loader: Any, mesh: Mesh) -> Any:
    """The loader with the rows of this rank's copy of the model, instead of this rank's."""
    for each in (getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)):
        if each is not None and hasattr(each, "num_processes"):
            each.num_processes, each.process_index = mesh.size("dp"), mesh.rank("dp")
            return loader
    raise ValueError(
        f"plan has tp={mesh.size('tp')}, and this {type(loader).__name__} does not say how it "
        "shares rows out among ranks; of an iterable dataset each rank must read its own: "
        "TrainingArguments(accelerator_config={'dispatch_batches': False})"
    )


def _gather_copies(gather: Any, accelerator: Any, tp: int, values: Any, **options: Any) -> Any:
    """What `gather` of Accelerate's gives, of one rank of each copy of the model."""
    of_ranks = accelerator.gather

    def of_copies(found: Any) -> Any:
        shape = (accelerator.num_processes, -1)
        return tree_map(
            lambda x: x.unflatten(0, shape)[::tp].flatten(0, 1) if isinstance(x, Tensor) else x,
            of_ranks(found),
        )

    # Accelerate drops the rows that it had added to the last batch from what this gives.
    accelerator.gather = of_copies
    try:
        return gather(values, **options)
    finally:
        del accelerator.gather
