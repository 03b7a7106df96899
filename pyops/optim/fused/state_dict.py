"""Saving and loading of an optimizer: state_dict, pickle and copy, both ways with torch.optim.

    torch's state_dict()  ->  our load_state_dict()      moments cast to state_dtype, step moved to
                                                         the parameter's device
    our state_dict()      ->  torch's load_state_dict()  moments cast to the parameter's dtype,
                                                         `master` ignored

torch's own load casts every floating state to the parameter's dtype, which would throw away what
float32 moments and masters of 16-bit parameters are for; hence one of our own, with the same hooks.
"""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from pyops.optim.fused.kinds import check_kind
from pyops.optim.fused.param_state import cast_entry, check_placed
from pyops.torch_private import disable_dynamo

__all__ = ["Loading"]

# Set by the caller for this process (another one has other shards), and never part of a checkpoint.
NOT_SAVED = ("copies", "offsets")
SHAPED_AS_PARAMETER = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "sum",
    "master",
)


class Loading(torch.optim.Optimizer):
    """The part of FusedOptimizer that saves and loads."""

    state_dtype: torch.dtype
    master_weights: bool
    _reads_communication = (
        False  # whether a state of momenta that travelled compressed means something here
    )

    def _forget(self) -> None:
        """Drop what can be remade from the state; FusedOptimizer says what that is."""

    @disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """As torch.optim: {"state": {index: {...}}, "param_groups": [...]}, tensors by reference.

        Without `copies` and `offsets`, which load_state_dict leaves as they are.
        """
        saved: dict[str, Any] = super().state_dict()
        saved["param_groups"] = [
            {key: value for key, value in group.items() if key not in NOT_SAVED}
            for group in saved["param_groups"]
        ]
        return saved

    def _checked(self, state_dict: dict[str, Any]) -> dict[Any, Tensor]:
        """Which parameter each saved id belongs to; ValueError when the state_dict is not one of
        such an optimizer."""
        who, groups, saved = type(self).__name__, self.param_groups, state_dict["param_groups"]
        sizes, saved_sizes = [len(g["params"]) for g in groups], [len(g["params"]) for g in saved]
        if sizes != saved_sizes:
            raise ValueError(
                f"{who}: the state_dict has param groups of {saved_sizes} parameters, "
                f"this optimizer of {sizes}; build "
                "the optimizer with the same groups as the one that was saved"
            )
        check_kind(self.defaults, state_dict, who=who)
        communication = state_dict.get("communication")
        if (
            not self._reads_communication
            and isinstance(communication, dict)
            and communication.get("phase") != "warmup"
        ):
            raise ValueError(
                f"{who}: the state_dict is that of {communication.get('optimizer')} in "
                f"phase {communication.get('phase')!r}, "
                "whose 'exp_avg' is another quantity; build that optimizer, or begin "
                "anew without the state"
            )
        params = {
            key: param
            for s, g in zip(saved, groups, strict=True)
            for key, param in zip(s["params"], g["params"], strict=True)
        }
        for key, state in state_dict["state"].items():
            if key not in params:
                continue
            for entry in SHAPED_AS_PARAMETER:
                value = state.get(entry)
                if isinstance(value, Tensor) and value.shape != params[key].shape:
                    raise ValueError(
                        f"{who}: state {entry!r} of saved parameter {key} has shape "
                        f"{tuple(value.shape)}, the "
                        f"parameter {tuple(params[key].shape)}; is this the state of another model?"
                    )
                if isinstance(value, Tensor):
                    check_placed(
                        value,
                        params[key],
                        what=f"state {entry!r} of saved parameter {key}",
                        who=who,
                    )
        return params

    @disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what state_dict() of this class or of torch's optimizer of the same name returned.

        Hyper-parameters of the groups come from the state_dict; state_dtype and master_weights stay
        those of this optimizer: moments are cast, a missing master is made from the parameter at
        the next step, one that isn't wanted is dropped. Raises ValueError, and changes nothing,
        when groups or shapes differ, or when the state_dict is known to be that of another
        optimizer.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            if (changed := pre_hook(self, state_dict)) is not None:
                state_dict = changed
        params = self._checked(state_dict)
        state: defaultdict[Any, Any] = defaultdict(dict)
        for key, entries in state_dict["state"].items():
            param = params.get(key)
            if param is None:
                state[key] = entries
                continue
            masters = self.master_weights and param.dtype != torch.float32
            state[param] = {
                entry: cast_entry(entry, value, param, state_dtype=self.state_dtype)
                for entry, value in entries.items()
                if entry != "master" or masters
            }
        groups = []
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            loaded = deepcopy(
                {key: value for key, value in saved.items() if key not in ("params", *NOT_SAVED)}
            )
            kept = {
                key: group[key]
                for key in ("params", "param_names", *NOT_SAVED)
                if key in group and key not in loaded
            }
            groups.append({**loaded, **kept})
        self.__setstate__({"state": state, "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: settings, groups and state; not hooks, `reduce_squared_norm`, or
        what can be remade."""
        names = (
            "master_weights",
            "state_dtype",
            "stochastic_rounding",
            "max_grad_norm",
            "zeroes_gradients",
            "_measured",
        )
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("reduce_squared_norm", None)
        self._forget()
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
