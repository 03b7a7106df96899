"""Sparse weights: the 2:4 mask beside torch's own operations, the search for an order of columns
beside the same search in numpy, a sparse product beside torch's, and text learnt with 2:4 weights
beside dense ones.

    python -m benchmarks nm --only mask
    python -m benchmarks nm --only text            minutes

The rival in numpy evaluates all windows of a round at once; both searches make the same choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from benchmarks.__main__ import Options
from benchmarks.compress import sparse_text
from benchmarks.instruments.harness import Case, Row, run_cases
from pyops.ops.sparse.csr_product import csr_product
from pyops.ops.sparse.nm_mask import nm_mask
from pyops.ops.sparse.stripe_search import kept_magnitude, stripe_search

__all__ = ["cases", "numpy_search", "run"]

SUBSETS = np.array(list(combinations(range(8), 4)))


def eager(w: Tensor) -> Tensor:
    """2 of each 4 by reshape, topk and scatter."""
    groups = w.view(-1, 4)
    kept = groups.abs().topk(2, dim=1).indices
    mask = torch.zeros_like(groups).scatter_(1, kept, 1.0)
    return (groups * mask).view_as(w)


def mask_case(name: str, dtype: torch.dtype, device: torch.device) -> Case:
    w = torch.randn(4096, 4096, device=device).to(dtype)

    def check() -> None:
        """The same magnitudes in each group: which of two equal ones topk takes is not said."""
        ours, theirs = (x.view(-1, 4).abs().sort(1).values for x in (nm_mask(w, 2, 4)[0], eager(w)))
        assert torch.equal(ours, theirs), "the masks differ"

    return Case(
        "nm",
        name,
        {"pyops": lambda: nm_mask(w, 2, 4), "torch": lambda: eager(w)},
        check=check,
        device=device,
        bytes_moved=2 * w.numel() * w.element_size() + w.numel() // 8,
        targets={"torch": 5.0},
    )


def numpy_search(magnitudes: np.ndarray) -> np.ndarray:
    """The order of columns that the search without escapes finds: windows that may have changed by
    the hundred in one expression."""
    columns = magnitudes.shape[1]
    stripes = columns // 4
    order = np.arange(columns)
    pairs = np.array(list(combinations(range(stripes), 2)))
    gains = np.zeros(len(pairs))
    best = np.zeros(len(pairs), dtype=np.int64)
    touched = np.ones(stripes, dtype=bool)
    while touched.any():
        changed = np.flatnonzero(touched[pairs].any(axis=1))
        for some in np.array_split(changed, -(-len(changed) // 128)):  # of a few hundred MB
            windows = order.reshape(-1, 4)[pairs[some]].reshape(len(some), 8)
            values = magnitudes[:, windows][:, :, SUBSETS]
            two = np.partition(values, 2, axis=-1)[..., 2:].sum(axis=(0, 3))
            kept = two[:, :35] + two[:, :34:-1]
            best[some] = kept.argmax(axis=1)
            gains[some] = kept.max(axis=1) - kept[:, 0]
        touched[:] = False
        for p in np.lexsort((pairs[:, 1], pairs[:, 0], -gains)):
            s, t = pairs[p]
            if gains[p] <= 1e-12 or touched[s] or touched[t]:
                continue
            window = order.reshape(-1, 4)[[s, t]].ravel()
            order[4 * s : 4 * s + 4] = window[SUBSETS[best[p]]]
            order[4 * t : 4 * t + 4] = window[SUBSETS[69 - best[p]]]
            touched[[s, t]] = True
    return order


def search_case(name: str, size: int, device: torch.device) -> Case:
    draw = torch.Generator().manual_seed(0)
    scale = torch.randn(size, generator=draw, dtype=torch.float64).mul(0.7).exp()
    w = (torch.randn(size, size, generator=draw, dtype=torch.float64) * scale).abs()
    own = stripe_search(w, escapes=0)
    total = float(w.sum())

    def check() -> None:
        theirs = torch.from_numpy(numpy_search(w.numpy()))
        ours = kept_magnitude(w[:, own])
        assert abs(ours - kept_magnitude(w[:, theirs])) < 1e-3 * ours, "numpy keeps something else"
        assert ours > kept_magnitude(w), "nothing is gained"

    half = float(w.flatten().topk(w.numel() // 2).values.sum())
    return Case(
        "nm",
        name,
        {
            "pyops": lambda: stripe_search(w, escapes=0),
            "numpy": lambda: numpy_search(w.numpy()),
        },
        check=check,
        device=device,
        targets={"numpy": 50.0} if size == 256 else {},
        facts={
            "kept_share": {
                "plain 2:4": kept_magnitude(w) / total,
                "permuted": kept_magnitude(w[:, own]) / total,
                "larger half": half / total,
            }
        },
    )


def product_case(name: str, alive: float, device: torch.device) -> Case:
    draw = torch.Generator().manual_seed(0)
    w = torch.randn(1024, 1024, generator=draw)
    w = torch.where(torch.rand(1024, 1024, generator=draw) < alive, w, 0.0).to(device)
    x = torch.randn(1024, 256, generator=draw).to(device)
    csr = w.to_sparse_csr()
    parts = csr.crow_indices().long(), csr.col_indices().int(), csr.values()

    def check() -> float:
        error = (csr_product(*parts, x).double() - w.double() @ x.double()).abs().max()
        assert error < 1e-3, f"off by {error}"
        return float(error)

    return Case(
        "nm",
        name,
        {
            "pyops": lambda: csr_product(*parts, x),
            "torch CSR": lambda: csr @ x,
            "dense": lambda: w @ x,
        },
        check=check,
        device=device,
        targets={"torch CSR": 1.0} if alive == 0.05 else {},
    )


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases and how to make each."""
    for dtype in (torch.float32, torch.bfloat16):
        name = f"2:4 mask, 4096 x 4096, {str(dtype).removeprefix('torch.')}"
        yield name, partial(mask_case, name, dtype, device)
    for size in (64, 256):
        name = f"permutation search, {size} x {size}, without escapes"
        yield name, partial(search_case, name, size, device)
    for alive in (0.2, 0.05, 0.01):
        name = f"sparse product, sparsity {1 - alive:g}, 1024 x 1024 by 256"
        yield name, partial(product_case, name, alive, device)


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`."""
    only = options.only or ""
    found = run_cases(
        [make for name, make in cases(options.device) if only in name], rounds=options.rounds
    )
    return [*found, *sparse_text.rows(only)]
