"""state_dict and load_state_dict of optimizers that communicate: torch's, and the communication's
own part beside it.

    {"state": {...}, "param_groups": [...],                  as AdamW's
     "communication": {"phase": "compressed", "steps": 700,  this rank's
                       "codec": "...", "errors": {...}, ...}}

The errors are by parameter name and differ from rank to rank: every rank saves its own state_dict.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from pyops.comm.agreement import ranks_agree
from pyops.flat import Shard
from pyops.onebit.communicating import Communicating
from pyops.torch_private import disable_dynamo

__all__ = ["CommunicationState"]

torch.serialization.add_safe_globals(
    [Shard]
)  # errors are Shards; torch.load refuses classes that it was not told of


class CommunicationState(Communicating):
    """The part that saves and loads."""

    _reads_communication = True

    @abstractmethod
    def _communication_state(self) -> dict[str, Any]:
        """What must be saved besides phase, steps and codec."""

    @abstractmethod
    def _load_communication(self, state: dict[str, Any]) -> None:
        """Continue as `state` says; phase, steps and the parameters' states are there already."""

    @disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """As torch.optim, and "communication": what continues this rank mid-phase. Tensors by
        reference."""
        saved = super().state_dict()
        saved["communication"] = {
            "optimizer": type(self).__name__,
            "phase": self.phase,
            "steps": self.steps,
            "codec": self.codec.name,
            **self._communication_state(),
        }
        return saved

    @disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what state_dict() returned; called by every rank of the group, each with
        its own rank's.

        Saved by another number of ranks: give every rank the errors of all ranks, merged by
        pyops.comm.compression.error_feedback.merge or by a checkpoint of pyops.checkpoint; they are
        divided among the ranks anew and their sum stays. A state_dict of AdamW begins the warm-up
        where AdamW was.

        Raises:
            ValueError: On every rank, and changes nothing, for another codec once anything was
                compressed, for another optimizer, other groups or shapes, and for ranks that bring
                different phases.
        """
        with ranks_agree(self.group):
            self._check_communication(state_dict)
        before = self.state_dict()
        try:
            with ranks_agree(self.group):
                super().load_state_dict(state_dict)
                self._continue(state_dict)
            self._exchange(None, (0.0, 0.0))
        except (
            TypeError,
            ValueError,
        ):  # on whatever rank: those that could have gone on go back too
            super().load_state_dict(before)
            self._continue(before)
            raise

    def _continue(self, state_dict: dict[str, Any]) -> None:
        steps = max((int(s["step"]) for s in self.state.values() if "step" in s), default=0)
        begin = {"phase": self._phases()[0], "steps": steps, **self._first_state()}
        saved = state_dict.get("communication", begin)
        self.phase, self.steps = saved["phase"], int(saved["steps"])
        self._load_communication(saved)

    @abstractmethod
    def _first_state(self) -> dict[str, Any]:
        """`_communication_state` of a run that begins."""

    def _check_communication(self, state_dict: dict[str, Any]) -> None:
        who, saved = type(self).__name__, state_dict.get("communication")
        if saved is None:
            return
        if not isinstance(saved, dict) or (
            lacking := {"phase", "steps", "codec", "errors"} - set(saved)
        ):
            lacks = f"lacks {sorted(lacking)}" if isinstance(saved, dict) else f"is {saved!r}"
            raise ValueError(
                f'{who}: the state\'s "communication" {lacks}; pass what state_dict() of '
                f"a {who} returned"
            )
        if saved.get("optimizer", who) != who:
            raise ValueError(
                f"{who}: the state is that of a {saved['optimizer']}; build that "
                "optimizer, or begin anew"
            )
        if saved["phase"] not in self._phases():
            raise ValueError(
                f"{who}: the state is of phase {saved['phase']!r}; expected one of {self._phases()}"
            )
        if saved["errors"] and saved["codec"] != self.codec.name:
            raise ValueError(
                f"{who}: the state's errors were made by codec {saved['codec']}, this "
                f"optimizer has {self.codec.name}; "
                "build it with the same codec"
            )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"a {type(self).__name__} holds a process group and can't be pickled or "
            "copied; save its state_dict() instead"
        )
