"""Trainer: a model that was shared out by a plan, trained, evaluated, saved and read back as if it
were in one place.

    step(batch)   rows of this copy of the model -> forward, backward -> gradients summed over the
                  copies, clipped -> optimizer -> the mean loss of the rows of all copies

Every rank calls the same methods in the same order. Ranks of one copy (of one "dp" coordinate) give
the same rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyops import checkpoint
from pyops.comm.agreement import gather, ranks_agree
from pyops.mesh import ALONE, Mesh, ProcessGroupLike
from pyops.parallel.dropout.keyed_dropout import set_keyed_dropout
from pyops.parallel.fused_head import LABELS, FusedHead
from pyops.parallel.generation import (
    CACHE_NAMES,
    GenerationOptions,
    KeptKeys,
    checked_prompt,
    decoder_start,
    generate_tokens,
)
from pyops.parallel.losses import CountedLoss
from pyops.parallel.plan import ParallelPlan
from pyops.parallel.rows.batches import (
    BatchShare,
    accepted_names,
    microbatches,
    model_arguments,
    share_of,
    sum_over_copies,
)
from pyops.parallel.rows.shared_tokens import SharedLoss, SharedTokens
from pyops.parallel.stages.layered_model import LayeredModel
from pyops.parallel.stages.staged_model import StagedModel
from pyops.precision import LossScale
from pyops.zero import ZeroOptimizer

__all__ = ["Trainer", "TrainerParts"]


@dataclass(frozen=True)
class TrainerParts:
    """What `parallelize` has made; each part is usable by itself."""

    model: nn.Module
    """This rank's part of the model; with a pipeline that of its stages."""

    optimizer: ZeroOptimizer
    """Of this rank's parameters."""

    mesh: Mesh
    """The ranks."""

    plan: ParallelPlan
    """As given."""

    loss: CountedLoss
    """(sum, count) of rows."""

    staged: StagedModel | None
    """The pipeline; None without one."""

    head: FusedHead | None
    """Computes the loss with the last layer; None where the logits are needed."""

    save_folder: Callable[[Path], None]
    """Writes the model as a Hugging Face folder."""

    seed: int
    """Of the dropout."""

    layered: LayeredModel | None = None
    """What the model says of its layers, where it was written for several ranks."""

    tokens: SharedTokens | None = None
    """Cuts batches where ranks share out the tokens of rows; None where they do not, or where the
    model does it by itself."""


class Trainer:
    """Made by `pyops.parallel.parallelize`.

    Args:
        parts: What the trainer is made of.

    Attributes:
        parts: The same, for those who want the loop: `parts.model`, `parts.optimizer`,
            `parts.staged`, `parts.mesh`.
        num_steps: How many steps were taken, skipped ones included.
        grad_norm: Of the last step, before clipping; None without max_grad_norm.
        skipped: Steps that changed nothing, since the loss or a gradient was not finite.
        vote: Whether any rank voted in the last step.
    """

    def __init__(self, parts: TrainerParts) -> None:
        self.parts = parts
        self.num_steps, self.skipped = 0, 0
        self.grad_norm: float | None = None
        self.vote = False
        self._accepted = accepted_names(parts.model)
        self._dropouts = [
            (name, module)
            for name, module in parts.model.named_modules()
            if hasattr(module, "set_dropout_state") and parts.layered is None
        ]

    @property
    def model(self) -> nn.Module:
        """This rank's part of the model."""
        return self.parts.model

    @property
    def optimizer(self) -> ZeroOptimizer:
        """An ordinary torch.optim.Optimizer, for a learning-rate scheduler, say."""
        return self.parts.optimizer

    @property
    def loss_scale(self) -> LossScale | None:
        """Of fp16; None where gradients need none."""
        return self.optimizer.loss_scale

    @property
    def mesh(self) -> Mesh:
        """The ranks: `mesh.rank("dp")` says which rows this rank should read."""
        return self.parts.mesh

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def _dp(self) -> ProcessGroupLike:
        return self.mesh.group("dp") or ALONE

    # ----------------------------------------------------------------------------------------------
    # training

    def step(self, batch: Mapping[str, Any], *, vote: bool = False) -> float:
        """Take one optimizer step. A collective.

        Args:
            batch: {name of an argument of the model: tensor [rows, ...]}, and "labels" or what else
                the loss needs: the rows of this copy of the model. Other copies may have other
                numbers of rows.
            vote: What the ranks decide together, such as to stop: whether any of them voted is
                `vote` after the step, without a message of its own.

        Returns:
            The mean loss over the terms of the rows of all copies, such as nats per token.

        Raises:
            ValueError: On every rank and before anything is changed, for a batch that some rank
                can't use.
        """
        if not self.optimizer.trains:
            raise ValueError(
                "step: this trainer was made with optimizer=None, to evaluate and generate; give "
                "parallelize an optimizer, such as lambda params: pyops.optim.AdamW(params, "
                "lr=1e-4)"
            )
        share, batch = self._shared(batch, vote=vote)
        self.vote = share.vote
        if not share.count > 0:
            raise ValueError(
                f"the loss has nothing to count in the {share.all_rows} rows of this step: all "
                "labels are -100; leave such rows out"
            )
        self.model.train()
        total = float(self._differentiate(self._own_tokens(batch), share))
        total = sum_over_copies(total, self.mesh, device=self._device)
        self._update(math.isfinite(total))
        self.num_steps += 1
        return total / share.count

    def _shared(self, batch: Any, *, vote: bool) -> tuple[BatchShare, dict[str, Any]]:
        """What this rank has of the global batch, and its rows, padded where the pipeline, or a
        copy without rows, needs more."""
        share = self._share(batch, given=True, vote=vote)
        assert share is not None
        return share, self._padded(self._with_decoder_inputs(dict(batch)), share)

    def _share(self, batch: Any, *, given: bool, vote: bool = False) -> BatchShare | None:
        return share_of(
            batch,
            given,
            self.parts.loss,
            self.mesh,
            accepted=self._accepted,
            device=self._device,
            vote=vote,
        )

    def _padded(self, batch: dict[str, Any], share: BatchShare) -> dict[str, Any]:
        """The rows, and further ones where a copy needs them. All copies look at the one that has
        the fewest, so that a loss which can't be padded is refused on every rank."""
        least, part, staged = 1, 1, self.parts.staged
        if staged is not None:
            least = self.parts.plan.microbatches
            part = least if staged.stages.equal_parts else 1
        elif self.parts.plan.zero.stage == 3:  # whose copies gather parameters part by part
            least = max(1, min(self.parts.plan.microbatches, share.most_rows))
        if share.fewest_rows >= least and not any(rows % part for rows in share.sizes):
            return batch
        rows = max(least, share.rows)
        return self.parts.loss.padded(batch, rows + -rows % part)

    def _with_decoder_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """For a model of an encoder and a decoder: the decoder's input is made of the labels."""
        make = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        lacking = "decoder_input_ids" in self._accepted and "decoder_input_ids" not in batch
        if make is None or not lacking or "labels" not in batch:
            return batch
        return {**batch, "decoder_input_ids": make(labels=batch["labels"])}

    def _own_tokens(self, batch: dict[str, Any]) -> dict[str, Any]:
        tokens, loss = self.parts.tokens, self.parts.loss
        if tokens is None:
            return batch
        return tokens.own(batch, loss=loss.inner if isinstance(loss, SharedLoss) else loss)

    def _differentiate(self, batch: dict[str, Any], share: BatchShare) -> Tensor:
        """Forward and backward of this copy's rows: the sum of their losses."""
        optimizer, loss = self.optimizer, self.parts.loss
        scale = 1.0 if optimizer.loss_scale is None else optimizer.loss_scale.scale
        scale /= share.divisor
        if self.parts.staged is not None:
            return self._differentiate_stages(batch, share, scale)
        total, row = torch.zeros((), dtype=torch.float64, device=self._device), share.first_row
        several = microbatches(batch, self.parts.plan.num_microbatches)
        for number, rows in enumerate(several):
            self._key_dropout(rows, row)
            row += _num_rows(rows)
            last = number + 1 == len(several)
            with nullcontext() if last else optimizer.no_sync():
                summed = loss.sum(self._outputs(rows), rows)
                (summed * scale).backward()
            total += summed.detach()
        return total

    def _differentiate_stages(
        self, batch: dict[str, Any], share: BatchShare, scale: float
    ) -> Tensor:
        staged = self.parts.staged
        assert staged is not None
        several = microbatches(batch, self.parts.plan.microbatches)
        starts = list(itertools.accumulate(map(_num_rows, several), initial=share.first_row))
        staged.before_forward = lambda number: self._key_dropout(several[number], starts[number])
        arguments = self._stage_arguments(batch)
        with self.optimizer.no_sync():
            return staged.step(arguments, batch, rows=_num_rows(batch), scale=scale)

    def _outputs(self, rows: dict[str, Any]) -> Any:
        """What the model returns for these rows, or their loss."""
        arguments = model_arguments(rows, self._accepted)
        if self.parts.head is None:
            return self.model(**arguments)
        return self.parts.head.call(lambda: self.model(**arguments), rows["labels"], arguments)

    def _stage_arguments(self, batch: dict[str, Any]) -> dict[str, Any]:
        arguments = model_arguments(batch, self._accepted)
        return arguments if self.parts.head is None else {**arguments, LABELS: batch["labels"]}

    def _key_dropout(self, rows: Mapping[str, Any], first_row: int) -> None:
        """Before the forward of these rows, of which the first has this number in the batch."""
        layered, seed = self.parts.layered, self.parts.seed
        if layered is not None:
            layered.module.set_dropout(
                layered.shape(rows), seed=seed, step=self.num_steps, first_row=first_row
            )
        elif self._dropouts:
            set_keyed_dropout(self._dropouts, seed=seed, step=self.num_steps, first_row=first_row)

    def _update(self, finite: bool) -> None:
        optimizer = self.optimizer
        if finite:
            optimizer.step()
            norm = optimizer.grad_norm
            self.grad_norm = None if norm is None else float(norm)
        elif (
            optimizer.loss_scale is not None
        ):  # of fp16, whose gradients would not be finite either
            optimizer.loss_scale.update(True)
        if not finite or (self.grad_norm is not None and not math.isfinite(self.grad_norm)):
            self.skipped += 1
        optimizer.zero_grad()

    # ----------------------------------------------------------------------------------------------
    # evaluation

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Mapping[str, Any]]) -> float:
        """The mean loss over the terms of all rows of all batches and copies, without dropout. A
        collective; the copies may have different numbers of batches. Parameters, mode and random
        states stay as they were.

        Args:
            batches: As for `step`.

        Raises:
            ValueError: On every rank, where nothing counts or a batch can't be used.
        """
        total, count = torch.zeros((), dtype=torch.float64, device=self._device), 0.0
        with self._evaluating():
            for batch, share in self._in_step(batches):
                total += self._sum_of(self._own_tokens(batch))
                count += share.count
        summed = sum_over_copies(float(total), self.mesh, device=self._device)
        if not count > 0:
            raise ValueError("the batches have nothing that the loss counts")
        return summed / count

    def _in_step(
        self, batches: Iterable[Mapping[str, Any]]
    ) -> Iterator[tuple[dict[str, Any], BatchShare]]:
        """The batches, as long as any copy has one: a copy whose batches have ended takes part with
        rows that do not count, for at ZeRO stage 3 the others need its parameters."""
        iterator, previous = iter(batches), None
        while True:
            batch = next(iterator, None)
            share = self._share(batch, given=batch is not None)
            if share is None:
                return
            if batch is not None:
                previous = batch = self._with_decoder_inputs(dict(batch))
            if batch is None:
                if previous is None:
                    raise ValueError("this copy of the model has no batch at all to evaluate")
                batch = {
                    name: value[:0] if isinstance(value, Tensor) and value.dim() else value
                    for name, value in previous.items()
                }
            yield self._padded(batch, share), share

    def _sum_of(self, batch: dict[str, Any]) -> Tensor:
        staged = self.parts.staged
        if staged is not None:
            arguments = self._stage_arguments(batch)
            found: Tensor = staged.evaluate(arguments, batch, rows=_num_rows(batch))
            return found.to(self._device)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for rows in microbatches(batch, self.parts.plan.num_microbatches):
            total += self.parts.loss.sum(self._outputs(rows), rows)
        return total

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        was = self.model.training
        self.model.eval()
        if self.parts.staged is not None:
            self.parts.staged.before_forward = lambda number: None
        try:
            yield
        finally:
            self.model.train(was)

    @torch.no_grad()
    def generate(self, prompt: Mapping[str, Tensor] | Tensor, **options: Any) -> Tensor:
        """Continue texts with a causal language model, or answer them with one of an encoder and a
        decoder. A collective: the ranks of one copy of the model give the same prompt. Each layout
        gives the same tokens.

        Args:
            prompt: Tokens [rows, T]; or {"input_ids": ..., "attention_mask": ...}, where shorter
                rows are padded on the left (for an encoder anywhere).
            options: Fields of `GenerationOptions`: max_new_tokens=20, temperature=0.0, top_k=0,
                top_p=1.0, seed=0, eos_token_id=None (or one, or several), pad_token_id=0.

        Returns:
            The tokens on every rank: [rows, T + n], prompt included; of an encoder and a decoder
            the decoder's alone, [rows, 1 + n], which begin with its first token.

        Raises:
            ValueError, TypeError: On every rank, for a prompt or options that make no sense, or a
                model that does not predict the next token.
        """
        with ranks_agree():
            given = checked_prompt(prompt, self.model)
            chosen = GenerationOptions(**options)
            chosen.validate()
        start = decoder_start(self.model)
        takes = [name for name in CACHE_NAMES if name in self._accepted]
        staged = self.parts.staged
        stages = None if staged is None else staged.own_blocks
        num_blocks = 0 if staged is None else len(staged.stages.names)
        kept = None
        if takes and start is None and hasattr(self.model, "config"):
            kept = KeptKeys(self.model, takes[0], stages, num_blocks)
        rows = gather(len(given["input_ids"]), group=self._dp)
        first_row = sum(rows[: self.mesh.rank("dp")])
        tokens = self.parts.tokens
        whole = nullcontext() if tokens is None else tokens.context.whole_rows()
        with self._evaluating(), self.optimizer.whole_parameters(), whole:
            return generate_tokens(
                self._logits, given, chosen, kept=kept, first_row=first_row, start=start
            )

    def _logits(self, arguments: dict[str, Any]) -> Tensor:
        if self.parts.staged is not None:
            return self.parts.staged.logits(arguments)
        found: Tensor = self.model(**arguments)["logits"]
        return found

    # ----------------------------------------------------------------------------------------------
    # checkpoints

    def save(self, folder: Path | str, **more: Any) -> None:
        """Write a checkpoint that a trainer of any plan can load. A collective. The folder is whole
        or not there.

        Args:
            folder: The checkpoint.
            more: What else belongs to it, such as the place in the data: numbers, strings, tensors
                and nested lists and dicts of them, the same on every rank.
        """
        checkpoint.save(folder, self.state_dict(**more))

    def state_dict(self, **more: Any) -> dict[str, Any]:
        """What a checkpoint holds, of this rank's parts: for those who write it themselves, with
        `pyops.checkpoint.save`. A collective.

        Args:
            more: As of `save`.
        """
        return {
            "num_steps": self.num_steps,
            "skipped": self.skipped,
            "model": self.optimizer.model_state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "loss_scale": None
            if self.optimizer.loss_scale is None
            else self.optimizer.loss_scale.state_dict(),
            "groups": [
                {key: value for key, value in group.items() if _is_plain(value)}
                for group in self.optimizer.param_groups
                if self.optimizer.trains
            ],
            "more": more,
        }

    def load(self, folder: Path | str) -> dict[str, Any]:
        """Go on from a checkpoint, of any plan: parameters, optimizer states, learning rates, step.
        A trainer that was made with optimizer=None takes the parameters alone, and of what such a
        trainer saved any takes these. A collective.

        Args:
            folder: The checkpoint.

        Returns:
            What `save` was given as `more`.

        Raises:
            CheckpointError: The folder is missing or damaged.
            ValueError: It is of another model.
        """
        state, _ = checkpoint.load(folder, lazy=True)
        return self.load_state_dict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Go on from what `state_dict` gave, under any plan. A collective.

        Args:
            state: As `pyops.checkpoint.load` reads it; its tensors may be on the disk still.

        Returns:
            What `state_dict` was given as `more`.

        Raises:
            ValueError: It is of another model.
        """
        optimizer = self.optimizer
        optimizer.load_model_state_dict(state["model"])
        if optimizer.trains and state["groups"]:
            self._load_states(state)
        if state["loss_scale"] is not None and optimizer.loss_scale is not None:
            optimizer.loss_scale.load_state_dict(state["loss_scale"])
        self.num_steps, self.skipped = state["num_steps"], state["skipped"]
        more: dict[str, Any] = state["more"]
        return more

    def _load_states(self, state: Mapping[str, Any]) -> None:
        groups = self.optimizer.state_dict()["param_groups"]
        for own, saved in zip(groups, state["groups"], strict=True):
            own.update(saved)
        self.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})

    def save_pretrained(self, folder: Path | str) -> None:
        """Write the model as a Hugging Face folder, which `from_pretrained` of transformers reads.
        A collective.

        Args:
            folder: Where; an older folder there is replaced when the new one is whole.
        """
        with self.optimizer.whole_parameters():
            self.parts.save_folder(Path(folder))

    def export_dcp(self, folder: Path | str, *, optimizer: str | None = None) -> None:
        """Write {"model": state_dict of the uncut model} for torch.distributed.checkpoint.load, in
        plain torch or FSDP2. A collective.

        Args:
            folder: Where; an older such folder there is replaced when the new one is whole.
            optimizer: The name under which the optimizer's states are written beside the model:
                "optim" for {"optim": {"state": {name of a parameter: states}}}, as
                torch.distributed.checkpoint.state_dict has them. None: weights alone.
        """
        from pyops.hub.pretrained.torch_checkpoints import export_dcp  # torch's take long to import

        states = None if optimizer is None else {optimizer: self.optimizer.state_dict()["state"]}
        with self.optimizer.whole_parameters():
            export_dcp(self.model, folder, mesh=self.mesh, states=states)

    def import_dcp(
        self, folder: Path | str, *, key: str | None = None, optimizer: str | None = None
    ) -> None:
        """Take the weights that torch.distributed.checkpoint.save wrote of a model's state_dict(),
        from any layout of ranks. A collective.

        Args:
            folder: Of torch's.
            key: The path of the model's state in what was saved, "model" for {"model": ...}; "" for
                the whole. None: whichever of these two has the model's names.
            optimizer: The path of the optimizer's state_dict in what was saved, such as "optim":
                its states are taken, too, and learning rates stay as they are. None: the states
                stay as they are.

        Raises:
            CheckpointError, HubError: On every rank, for a folder that can't be read, or of another
                model.
            ValueError: optimizer= of a trainer that was made with optimizer=None.
        """
        from pyops.hub.pretrained.torch_checkpoints import stored_states, stored_weights

        if optimizer is not None and not self.optimizer.trains:
            raise ValueError(
                f"import_dcp: optimizer is {optimizer!r}, but this trainer was made with "
                "optimizer=None and has no states; leave it out"
            )
        found, states = stored_weights(self.model, folder, key=key, mesh=self.mesh), None
        if optimizer is not None:
            states = stored_states(self.model, folder, key=optimizer, mesh=self.mesh)
        self.optimizer.load_model_state_dict(found)
        if states is not None:
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": states, "param_groups": groups})


def _num_rows(batch: Mapping[str, Any]) -> int:
    return len(next(v for v in batch.values() if isinstance(v, Tensor) and v.dim()))


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) or (
        isinstance(value, tuple | list) and all(isinstance(each, int | float) for each in value)
    )
