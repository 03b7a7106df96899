"""CopyBatches: of the batches of all copies of a model, what one copy has, as its model takes them.

batch     rows of copy 0 | rows of copy 1      as many as each was given
padded    rows of copy 0 | rows of copy 1 + p  where the pipeline, or a copy without rows, needs it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from pyops.parallel.rows.batches import BatchShare, share_of
from pyops.parallel.rows.shared_tokens import SharedLoss
from pyops.parallel.trainer.trainer_parts import TrainerParts

__all__ = ["CopyBatches"]


class CopyBatches:
    """The batches of this rank's copy of the model.

    Args:
        parts: Of the trainer.
        accepted: Names of the arguments that the model takes.
    """

    def __init__(self, parts: TrainerParts, accepted: frozenset[str]) -> None:
        self._parts, self._accepted = parts, accepted

    def share(self, batch: Any, *, vote: bool) -> tuple[BatchShare, dict[str, Any]]:
        """What this rank has of the global batch, and its rows, padded where the pipeline, or a
        copy without rows, needs more. A collective.

        Args:
            batch: As for `Trainer.step`.
            vote: As there.

        Raises:
            ValueError: On every rank, for a batch that some rank can't use.
        """
        share = self._share_of(batch, given=True, vote=vote)
        assert share is not None
        return share, self._padded(self._with_decoder_inputs(dict(batch)), share)

    def _share_of(self, batch: Any, *, given: bool, vote: bool = False) -> BatchShare | None:
        return share_of(
            batch,
            given,
            self._parts.loss,
            self._parts.mesh,
            accepted=self._accepted,
            device=self._parts.device,
            vote=vote,
        )

    def _padded(self, batch: dict[str, Any], share: BatchShare) -> dict[str, Any]:
        """The rows, and further ones where a copy needs them. All copies look at the one that has
        the fewest, so that a loss which can't be padded is refused on every rank."""
        least, part, staged = 1, 1, self._parts.staged
        if staged is not None:
            least = self._parts.plan.microbatches
            part = least if staged.stages.equal_parts else 1
        elif self._parts.plan.zero.stage == 3:  # whose copies gather parameters part by part
            least = max(1, min(self._parts.plan.microbatches, share.most_rows))
        if share.fewest_rows >= least and not any(rows % part for rows in share.sizes):
            return batch
        rows = max(least, share.rows)
        return self._parts.loss.padded(batch, rows + -rows % part)

    def _with_decoder_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """For a model of an encoder and a decoder: the decoder's input is made of the labels."""
        make = getattr(self._parts.model, "prepare_decoder_input_ids_from_labels", None)
        lacking = "decoder_input_ids" in self._accepted and "decoder_input_ids" not in batch
        if make is None or not lacking or "labels" not in batch:
            return batch
        return {**batch, "decoder_input_ids": make(labels=batch["labels"])}

    def own_tokens(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The tokens of these rows that this rank has, where ranks share them out."""
        tokens, loss = self._parts.tokens, self._parts.loss
        if tokens is None:
            return batch
        return tokens.own(batch, loss=loss.inner if isinstance(loss, SharedLoss) else loss)

    def in_step(
        self, batches: Iterable[Mapping[str, Any]]
    ) -> Iterator[tuple[dict[str, Any], BatchShare]]:
        """The batches, as long as any copy has one: a copy whose batches have ended takes part with
        rows that do not count, for at ZeRO stage 3 the others need its parameters. A collective for
        each batch.

        Args:
            batches: As for `Trainer.evaluate`.

        Raises:
            ValueError: On every rank, for a batch that some rank can't use.
        """
        iterator, previous = iter(batches), None
        while True:
            batch = next(iterator, None)
            share = self._share_of(batch, given=batch is not None)
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
