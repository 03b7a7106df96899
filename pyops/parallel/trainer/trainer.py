"""Trainer: a model that was shared out by a plan, trained, evaluated, saved and read back as if it
were in one place.

    step(batch)   rows of this copy of the model -> forward, backward -> gradients summed over the
                  copies, clipped -> optimizer -> the mean loss of the rows of all copies

Every rank calls the same methods in the same order. Ranks of one copy (of one "dp" coordinate) give
the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyops import checkpoint
from pyops.comm.agreement import gather, ranks_agree
from pyops.mesh import ALONE, Mesh, ProcessGroupLike
from pyops.parallel.generation import (
    CACHE_NAMES,
    GenerationOptions,
    KeptKeys,
    checked_prompt,
    decoder_start,
    generate_tokens,
)
from pyops.parallel.rows.batches import (
    accepted_names,
    sum_over_copies,
)
from pyops.parallel.trainer.copy_batches import CopyBatches
from pyops.parallel.trainer.copy_model import CopyModel
from pyops.parallel.trainer.trainer_parts import TrainerParts
from pyops.precision import LossScale
from pyops.zero import ZeroOptimizer

__all__ = ["Trainer"]


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
        self._batches = CopyBatches(parts, self._accepted)
        self._copy = CopyModel(parts, self._accepted)

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
        return self.parts.device

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
        share, batch = self._batches.share(batch, vote=vote)
        self.vote = share.vote
        if not share.count > 0:
            raise ValueError(
                f"the loss has nothing to count in the {share.all_rows} rows of this step: all "
                "labels are -100; leave such rows out"
            )
        self.model.train()
        own = self._batches.own_tokens(batch)
        total = float(self._copy.differentiate(own, share, step=self.num_steps))
        total = sum_over_copies(total, self.mesh, device=self._device)
        self._update(math.isfinite(total))
        self.num_steps += 1
        return total / share.count

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
        with self._copy.evaluating():
            for batch, share in self._batches.in_step(batches):
                total += self._copy.summed(self._batches.own_tokens(batch))
                count += share.count
        summed = sum_over_copies(float(total), self.mesh, device=self._device)
        if not count > 0:
            raise ValueError("the batches have nothing that the loss counts")
        return summed / count

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
        with self._copy.evaluating(), self.optimizer.whole_parameters(), whole:
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


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) or (
        isinstance(value, tuple | list) and all(isinstance(each, int | float) for each in value)
    )
