"""How far a student's next words are from a teacher's, of rows of logits whose columns lie on
several ranks: five numbers a token are exchanged.

    student z, teacher y, temperature T        q = softmax(z / T), p = softmax(y / T)

    "forward"   T^2 KL(p, q)                   d / dz = T (q - p)
    "reverse"   T^2 KL(q, p)                   d / dz = T q (ln q - ln p - KL(q, p))
    "jsd"       T^2 (b KL(p, M) + (1 - b) KL(q, M)),  M = b p + (1 - b) q
                                               d / dz = (1 - b) T q (ln(q / M) - KL(q, M))
    "squared"   1/2 sum of (z - y)^2           d / dz = z - y

The factor T^2 keeps the size of the gradient while T is tuned (Hinton et al., arXiv:1503.02531,
section 2). "jsd" is the generalized Jensen-Shannon divergence of Agarwal et al. (arXiv:2306.13649).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyops.tensor_parallel.functional.ranks import Ranks

__all__ = ["KINDS", "ChunkDivergence", "DivergenceForm"]

KINDS = ("forward", "reverse", "jsd", "squared")
NUMBERS = 5  # of each token, which a rank sends


@dataclass(frozen=True)
class DivergenceForm:
    """Which divergence, see `KINDS` and the table above."""

    kind: str
    temperature: float
    b: float

    def check(self) -> None:
        """Raises ValueError for what is no divergence."""
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; choose one of {', '.join(KINDS)}")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature is {self.temperature}; give a number above 0")
        if not 0 <= self.b <= 1:
            raise ValueError(f"b is {self.b}; it is the teacher's share of the mixture, 0 to 1")
        if self.kind == "squared" and self.temperature != 1:
            raise ValueError(
                f'kind "squared" compares logits as they are; temperature is {self.temperature}, '
                "leave it at 1"
            )


class ChunkDivergence:
    """The divergence of a chunk of tokens.

    Args:
        z: [n, c], the student's logits of this rank's words over T, in fp32 or fp64; overwritten.
        y: [n, c], the teacher's, likewise.
        form: which divergence.
    """

    def __init__(self, z: Tensor, y: Tensor, form: DivergenceForm) -> None:
        self.form = form
        if form.kind == "squared":
            self.difference = y.sub_(z)
            return
        self.max_s, self.max_t = _row_maxima(z), _row_maxima(y)
        self.exp_t = (y - self.max_t[:, None]).exp_()
        self.difference = y.sub_(z)
        self.exp_s = z.sub_(self.max_s[:, None]).exp_()

    def numbers(self) -> Tensor:
        """[n, NUMBERS], what the other ranks need of this rank's columns."""
        if self.form.kind == "squared":
            return _padded(_dots(self.difference, self.difference))
        # What weighs the difference of logits: the words that the divergence is an average over.
        weights = self.exp_t if self.form.kind == "forward" else self.exp_s
        columns = (
            self.max_s,
            self.exp_s.sum(1),
            self.max_t,
            self.exp_t.sum(1),
            _dots(weights, self.difference),
        )
        return torch.stack(columns, dim=1)

    def losses(self, parts: Tensor, ranks: Ranks) -> Tensor:
        """[n], of whole rows.

        Args:
            parts: [ranks, n, NUMBERS], the `numbers` of each rank.
            ranks: of "jsd", which needs a second exchange, of two numbers.
        """
        kind, scale = self.form.kind, self.form.temperature**2
        if kind == "squared":
            return parts[:, :, 0].sum(0) / 2
        log_s, self.share_s, by_s = _merged(parts[:, :, 0], parts[:, :, 1], self.max_s)
        log_t, self.share_t, by_t = _merged(parts[:, :, 2], parts[:, :, 3], self.max_t)
        self.log_ratio = log_s - log_t
        if kind == "forward":
            return scale * ((parts[:, :, 4] * by_t).sum(0) + self.log_ratio)
        if kind == "reverse":
            self.value = -((parts[:, :, 4] * by_s).sum(0) + self.log_ratio)
            return scale * self.value
        own = self._mixture_sums()
        sums = ranks.gather(own).wait().view(-1, *own.shape).sum(0) if ranks.size > 1 else own
        self.value = sums[:, 1]
        return scale * (self.form.b * sums[:, 0] + (1 - self.form.b) * sums[:, 1])

    def _mixture_sums(self) -> Tensor:
        """[n, 2]: this rank's summands of KL(p, M) and KL(q, M); `difference` becomes ln(q / M)."""
        b = self.form.b
        log_b, log_rest = (math.log(x) if x else -math.inf for x in (b, 1 - b))
        above = self.difference.add_(self.log_ratio[:, None])  # ln p - ln q
        log_q_m = torch.logaddexp(above + log_b, above.new_tensor(log_rest)).neg_()
        kl_p = _dots(self.exp_t, above.add_(log_q_m)) * self.share_t
        self.difference = log_q_m
        return torch.stack([kl_p, _dots(self.exp_s, log_q_m) * self.share_s], dim=1)

    def gradient(self, weights: Tensor) -> Tensor:
        """[n, c], over the student's logits z, times `weights` [n] of the rows. Call it once,
        after `losses`: it overwrites what it is computed from."""
        kind = self.form.kind
        if kind == "squared":
            return self.difference.mul_(-weights[:, None])
        by_row = weights * self.form.temperature
        q = self.exp_s.mul_((self.share_s * by_row)[:, None])
        if kind == "forward":
            return q.sub_(self.exp_t.mul_((self.share_t * by_row)[:, None]))
        if kind == "reverse":
            # ln q - ln p = (z - lse_s) - (y - lse_t) over T
            rest = -self.log_ratio - self.value
            return q.mul_(self.difference.neg_().add_(rest[:, None]))
        return q.mul_(self.difference.sub_(self.value[:, None])).mul_(1 - self.form.b)


def _row_maxima(x: Tensor) -> Tensor:
    """[n]; -inf for a rank that has no words."""
    return x.amax(1) if x.shape[1] else x.new_full((len(x),), -torch.inf)


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """[n], the products of rows, without a tensor of their size."""
    return torch.bmm(a[:, None], b[:, :, None]).flatten()


def _padded(column: Tensor) -> Tensor:
    return torch.cat([column[:, None], column.new_zeros(len(column), NUMBERS - 1)], dim=1)


def _merged(maxima: Tensor, sums: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ln of the sum of exp over all ranks' columns [n]; what this rank's exp(x - maximum) is
    multiplied with to be a probability [n]; the same of every rank [ranks, n]."""
    maximum = maxima.amax(0)
    lower = (maxima - maximum).exp()
    total = (sums * lower).sum(0)
    return maximum + total.log(), (own - maximum).exp() / total, lower / total
