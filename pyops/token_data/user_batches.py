"""UserBatches: any iterable of batches, with or without a state, as an endless stream.

    iterable of {"tokens_BT": ..., "targets_BT": ...} or of rows [B, T + 1]
        with state_dict(), load_state_dict()     asked for its own state after each batch
        without                                  begun again, and as many batches passed over

torchdata's StatefulDataLoader, a Hugging Face IterableDataset and a generator's wrapper are such.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyops.comm.agreement import gather
from pyops.data import CorpusError
from pyops.token_data.prefetching import BatchStream

__all__ = ["RankStates", "UserBatches"]

NAMES = ("tokens_BT", "targets_BT")


class UserBatches:
    """Endless batches of an iterable, which is begun again at its end.

    Args:
        iterable: Of this rank's batches: dicts with "tokens_BT" and "targets_BT", whole numbers [B,
            T], or tensors [B, T + 1] of text.
        name: For messages.

    Raises:
        TypeError: It is no iterable, or an iterator: what can't be begun again can't be resumed.
    """

    def __init__(self, iterable: Iterable[Any], *, name: str = "the iterable") -> None:
        own = hasattr(iterable, "state_dict"), hasattr(iterable, "load_state_dict")
        if not hasattr(iterable, "__iter__"):
            raise TypeError(f"{name} is {type(iterable).__name__}, which is no iterable of batches")
        if any(own) and not all(own):
            raise TypeError(
                f"{name} has one of state_dict and load_state_dict; give it both, or neither"
            )
        if not any(own) and hasattr(iterable, "__next__"):
            raise TypeError(
                f"{name} is an iterator without a state, which can't be begun again; give an "
                "object with __iter__, or add state_dict and load_state_dict"
            )
        self._source: Any = iterable
        self._name, self._stateful = name, all(own)
        self._iterator: Iterator[Any] | None = None
        self._epoch = self._given = 0

    def next(self) -> dict[str, Tensor]:
        """The next batch of this rank.

        Raises:
            CorpusError: The iterable has no batch, or one that is none.
        """
        begun = self._iterator is None
        iterator = self._iterator = iter(self._source) if self._iterator is None else self._iterator
        found = next(iterator, None)
        if found is None:
            if begun and not self._given:
                raise CorpusError(f"{self._name} has no batch; give it some text")
            self._epoch, self._given, self._iterator = self._epoch + 1, 0, None
            return self.next()
        self._given += 1
        return self._checked(found)

    def _checked(self, batch: Any) -> dict[str, Tensor]:
        if isinstance(batch, Tensor) and batch.ndim == 2 and batch.shape[1] > 1:
            batch = {"tokens_BT": batch[:, :-1], "targets_BT": batch[:, 1:]}
        if not isinstance(batch, dict) or any(name not in batch for name in NAMES):
            raise CorpusError(
                f"{self._name} gave {type(batch).__name__}; a batch is a dict with "
                f"{' and '.join(NAMES)}, or a tensor [B, T + 1]"
            )
        for name in NAMES:
            if not isinstance(batch[name], Tensor) or batch[name].is_floating_point():
                raise CorpusError(f"{self._name} gave {name} that are no tensor of whole numbers")
        return {key: value.long() if key in NAMES else value for key, value in batch.items()}

    def state_dict(self) -> dict[str, Any]:
        """Where it is: {epoch, given}, and the iterable's own state where it has one."""
        own = copy.deepcopy(self._source.state_dict()) if self._stateful else None
        return {"epoch": self._epoch, "given": self._given, "own": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batch after which `state` was taken.

        Args:
            state: Of `state_dict`.

        Raises:
            CorpusError: It is of another kind, or the iterable has fewer batches now.
        """
        if "given" not in state or (state["own"] is not None) != self._stateful:
            raise CorpusError(
                f"the state of the data is not one of {self._name}; set [data] as it was, or give "
                "this run another name"
            )
        self._epoch, self._given, self._iterator = state["epoch"], state["given"], None
        if self._stateful:
            self._source.load_state_dict(copy.deepcopy(state["own"]))
            return
        iterator = self._iterator = iter(self._source)
        for i in range(self._given):
            if next(iterator, None) is None:
                raise CorpusError(
                    f"{self._name} ended after {i} batches, and the run had taken {self._given}; "
                    "give it the same batches as before"
                )


class RankStates:
    """A stream whose states differ between ranks: its state is that of all of them.

    Its methods for the state communicate: it goes around `Prefetched`, not into it.

    Args:
        batches: Of this rank.
        rank: Of this process among all.
    """

    def __init__(self, batches: BatchStream, *, rank: int) -> None:
        self._batches, self._rank = batches, rank

    def next(self) -> dict[str, Tensor]:
        """The next batch of this rank."""
        return self._batches.next()

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks. A collective."""
        return {"ranks": gather(self._batches.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batch after which `state` was taken.

        Args:
            state: Of `state_dict`.

        Raises:
            CorpusError: There were other ranks, and they had different states.
        """
        found = state.get("ranks")
        if found is None:
            raise CorpusError(
                'the data was not of data.kind "python", and can\'t continue where it was; set '
                "[data] as it was, or give this run another name"
            )
        now = len(gather(None))
        if len(found) != now:
            if any(not _same(each, found[0]) for each in found):
                raise CorpusError(
                    f"the data was read by {len(found)} ranks, each at a place of its own, and "
                    f"there are {now} now; use {len(found)} ranks, or an iterable whose state is "
                    "the same on all of them"
                )
            found = [found[0]] * now
        self._batches.load_state_dict(found[self._rank])


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)
