"""1-bit LAMB: LAMB until the variance is stable, then momenta of one bit per element, and trust
ratios that are kept.

    warm-up        gradients --exact mean--> LAMB
                   ratio = running mean of each layer's ||p|| / ||u||
    the switch     v, m corrected and kept as by OneBitAdam; each layer's ratio is kept too
    compressed     w = beta1 w + (1 - beta1) g / (sqrt(v) + eps)
                   w --1 bit, error feedback--> w on all ranks, in one message
                   p = p - lr ratio factor (w + wd p)

factor: of the layer, from the momentum that came back (layer_ratios.py).
Li et al., arXiv:2104.06069, algorithm 1; there the bias correction is left out, and m travels,
times a number per layer that makes the layers' sizes equal. In units of sqrt(v) + eps they are of
like size already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from pyops.comm.buckets.grad_norm import squares_of_each
from pyops.onebit.config import LocalOptions, OneBitLAMBConfig, checked_config, with_limit
from pyops.onebit.steps.deepspeed_step import Rows, step_uncorrected
from pyops.onebit.steps.frozen_variance_step import step_frozen
from pyops.onebit.steps.layer_ratios import (
    COLUMNS,
    FACTOR,
    WEIGHT,
    LayerTrustRatios,
    layer_slices,
)
from pyops.onebit.steps.state_slots import StateSlots
from pyops.onebit.two_phases import TwoPhases
from pyops.optim.fused.table_plan import TablePlan
from pyops.optim.fused.table_rows import PARAM, TableRows
from pyops.optim.lamb import LAMB
from pyops.optim.one_bit import COMPRESSED
from pyops.protocols import ParamGroup

__all__ = ["OneBitLAMB"]


class OneBitLAMB(TwoPhases, LAMB):
    """1-bit LAMB. Each rank gives the gradients of its own part of the batch; step() averages what
    is needed.

    `fresh` squares decay by the larger of beta2 and frozen_beta2, as the variance that they are
    compared with. state_dict() is LAMB's, with "exp_avg_sq_fresh" in the compressed phase; ratios
    and factors are in "communication", by layer name. What becomes of bad gradients: see
    OneBitAdam.

    Args:
        params: a parameter is a layer, and so is each tensor of a `FlatBuffer.parameter`. A group's
            `trust_ratio` False leaves its parameters to 1-bit Adam's step.
        lr, betas, eps, weight_decay: as LAMB's.
        config: options of communication, of the two phases, and of the trust ratio.
        options: max_grad_norm, zero_grad, master_weights: as LAMB's.

    Raises:
        ValueError, TypeError, DisagreementError: as OneBitAdam.
    """

    _needs_last = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        config: OneBitLAMBConfig | None = None,
        **options: Unpack[LocalOptions],
    ) -> None:
        who = type(self).__name__
        with self._ranks_agree(config):
            config = checked_config(who, config, OneBitLAMBConfig, options)
            config.check_coefficients(who)
            LAMB.__init__(
                self,
                params,
                lr,
                betas,
                eps,
                weight_decay,
                min_ratio=config.min_coeff,
                max_ratio=config.max_coeff,
                **with_limit(options),
            )
            self._begin(config, beta2=float(betas[1]))
        self.coeff_beta = config.coeff_beta
        self.factor_bounds = (config.factor_min, config.factor_max, config.factor_threshold)
        self._agree_on_options(config)
        self._tables: dict[Tensor, Tensor] = {}
        self._seen: list[tuple[list[Tensor], Tensor]] = []
        self._frozen: LayerTrustRatios | None = None
        self._start()

    # --------------------------------------------------------------------------------------------
    # warm-up

    def _layer_step(
        self,
        group: ParamGroup,
        work: Tensor | list[list[Tensor]],
        norms: Tensor,
        *args: Tensor | None,
        **options: Any,
    ) -> None:
        super()._layer_step(group, work, norms, *args, **options)
        if group["trust_ratio"]:
            self._norms = norms

    def _run(
        self,
        group: ParamGroup,
        work: TablePlan | TableRows,
        factor: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        super()._run(group, work, factor, skip)
        if not group["trust_ratio"]:
            return
        if isinstance(work, TablePlan):
            assert work.table is not None
            params = work.written[: work.table.shape[0]]
        else:
            real = {
                id(each.stand_in): each.tensor for each in work.exchanges if each.column == PARAM
            }
            params = [real.get(id(p), p) for p in work.columns[PARAM]]
        self._seen.append((params, self._norms))

    def _exact_step(self) -> bool:
        self._seen.clear()
        taken = super()._exact_step()
        if taken:
            self._average_ratios()
        return taken

    def _uncorrected_step(self) -> bool:
        self._seen.clear()
        taken = step_uncorrected(self, self._move_uncorrected)
        if taken:
            self._average_ratios()
        return taken

    def _move_uncorrected(self, group: ParamGroup, rows: Rows) -> None:
        """p = p - lr ratio (m / (sqrt(v) + eps) + wd p), layer by layer."""
        moves = []
        for p, m, v, state in rows:
            master = state.get("master", p.detach()).float()
            update = torch.add(m / v.sqrt().add_(group["eps"]), master * group["weight_decay"])
            if group["trust_ratio"]:
                flat, weights = (
                    update.as_strided((p.numel(),), (1,)),
                    torch.empty_like(update).copy_(master),
                )
                slices = layer_slices(p)
                parts = [flat[part] for part in slices]
                sizes = squares_of_each(
                    [weights.as_strided((p.numel(),), (1,))[part] for part in slices]
                )
                norms = torch.stack([sizes, squares_of_each(parts)], dim=1)
                for part, ratio in zip(parts, self._ratios(group, norms).float(), strict=True):
                    part.mul_(ratio)
                self._seen.append(([p], norms))
            moves.append((p, update, torch.ones_like(update), state))
        step_frozen(group, moves, eps=0.0, lr=group["lr"], weight_decay=0.0)

    def _ratios(self, group: ParamGroup, norms: Tensor) -> Tensor:
        """float64 [layers]: LAMB's trust ratio of ||p||^2 and ||u||^2."""
        ratio = (norms[:, 0] / norms[:, 1]).sqrt().clamp(group["min_ratio"], group["max_ratio"])
        return torch.where(norms.amin(dim=1) > 0, ratio, 1.0)

    def _table(self, parameter: Tensor) -> Tensor:
        """float64 [layers, COLUMNS]: RATIO and WEIGHT: sums whose quotient is the mean of ratios;
        FACTOR: the last; SCALE."""
        if parameter not in self._tables:
            made = torch.zeros(
                len(layer_slices(parameter)), COLUMNS, dtype=torch.float64, device=parameter.device
            )
            made[:, FACTOR] = 1.0
            self._tables[parameter] = made
        return self._tables[parameter]

    def _average_ratios(self) -> None:
        """Take this step's ratios into their means."""
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        for params, norms in self._seen:
            tables = [self._table(p) for p in params]
            ratios = self._ratios(group_of[params[0]], norms)
            counted = norms.amin(dim=1) > 0 if self.compat is None else ratios != 1.0
            whole = torch.cat(tables)[:, : WEIGHT + 1]
            new = torch.stack([ratios, torch.ones_like(ratios)], dim=1)
            mean = self.coeff_beta * whole + (1 - self.coeff_beta) * new
            mean = torch.where(counted[:, None], mean, whole)
            for table, part in zip(
                tables, mean.split([len(table) for table in tables]), strict=True
            ):
                table[:, : WEIGHT + 1] = part
        self._seen.clear()

    # --------------------------------------------------------------------------------------------
    # compressed

    def _weigh(self, slots: StateSlots) -> Tensor | None:
        for slot in slots:
            self._table(slot.parameter)
        self._frozen = LayerTrustRatios(
            slots,
            self.param_groups,
            self.state,
            self._tables,
            self._flat,
            precondition=self.precondition,
            corrected=self.compat is None,
        )
        return self._frozen.roots

    def _linked(self, slots: StateSlots) -> bool:
        assert self._frozen is not None
        fresh = [self.state[slot.parameter]["exp_avg_sq_fresh"] for slot in slots]
        return super()._linked(slots) and slots.lie_in(self._frozen.fresh, fresh)

    def _apply(self, slots: StateSlots, betas: list[float], before: Tensor | None) -> None:
        assert self._frozen is not None
        assert before is not None
        decays = [
            max(float(self.param_groups[slot.group]["betas"][1]), self.frozen_beta2)
            for slot in slots
        ]
        self._frozen.step(
            self._flat, before, self.state, betas=betas, decays=decays, bounds=self.factor_bounds
        )

    # --------------------------------------------------------------------------------------------
    # saving

    def _tabled(self) -> StateSlots:
        return StateSlots(self.param_groups, moved={p for p, state in self.state.items() if state})

    def _communication_state(self) -> dict[str, Any]:
        slots = self._tabled()
        tables = [self._table(slot.parameter) for slot in slots]
        table = (
            torch.cat(tables)
            if tables
            else torch.zeros(0, COLUMNS, dtype=torch.float64, device="cpu")
        )
        return {
            **super()._communication_state(),
            "layers": list(slots.layout.names),
            "trust": table,
        }

    def _first_state(self) -> dict[str, Any]:
        return {
            **super()._first_state(),
            "layers": [],
            "trust": torch.zeros(0, COLUMNS, dtype=torch.float64, device="cpu"),
        }

    def _load_communication(self, state: dict[str, Any]) -> None:
        rows = dict(zip(state["layers"], state["trust"], strict=True))
        slots = self._tabled()
        if self.phase == COMPRESSED and (
            missing := [name for name in slots.layout.names if name not in rows]
        ):
            raise ValueError(
                f"{type(self).__name__}: the state has no trust ratio of {missing[:3]}; "
                f"it has those of {list(rows)[:3]} ...: "
                "name the parameters as they were named when it was saved"
            )
        self._tables, names = {}, iter(slots.layout.names)
        for slot in slots:
            for row in self._table(slot.parameter):
                name = next(names)
                if name in rows:
                    row.copy_(rows[name])
        super()._load_communication(state)
