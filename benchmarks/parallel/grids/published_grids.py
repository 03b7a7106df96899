"""What the papers of the grids publish beside what the cost functions say, at 64 ranks.

A step is at most as many times as fast as it receives fewer bytes, where messages are all that
takes time, and at least as fast, where products are. `share` is the part of the slower layout's
step that its messages would have to be. To write the table of docs/tensor_parallel.md anew:

    python -m benchmarks.parallel.grids.published_grids
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.instruments.report import ROOT
from pyops.tensor_parallel.grids.costs import LayerCost, cost_1d, cost_grid

__all__ = ["CLAIMS", "PAGE", "Claim", "fill", "received", "share"]

PAGE = ROOT / "docs" / "tensor_parallel.md"
MARKED = re.compile(r"(<!-- published:grids -->\n).*?(<!-- /published -->)", re.DOTALL)
RATIOS = (1, 4, 16, 64)  # tokens over the width
RANKS, WIDTH = 64, 4096
OPTIMUS = "Optimus, arXiv:2104.05343"
TESSERACT = "Tesseract, arXiv:2105.14500"
THREE = "3D, arXiv:2105.14450"


@dataclass(frozen=True)
class Claim:
    """A figure of an abstract."""

    source: str
    """Paper."""
    what: str
    """What was compared."""
    published: float
    """How many times as fast."""
    slower: str
    """ "1d" or "2d"."""
    faster: str
    """ "2d", "2.5d" or "3d"."""
    forward: bool = False
    """Whether it is of inference."""


CLAIMS = (
    Claim(OPTIMUS, "training", 1.48, "1d", "2d"),
    Claim(OPTIMUS, "inference", 1.78, "1d", "2d", forward=True),
    Claim(TESSERACT, "strong scaling", 1.38, "1d", "2.5d"),
    Claim(TESSERACT, "strong scaling", 1.53, "2d", "2.5d"),
    Claim(TESSERACT, "weak scaling, throughput, most", 3.4, "1d", "2.5d"),
    Claim(TESSERACT, "weak scaling, throughput, most", 1.7, "2d", "2.5d"),
    Claim(TESSERACT, "weak scaling, inference, most", 4.0, "1d", "2.5d", forward=True),
    Claim(TESSERACT, "weak scaling, inference, most", 1.7, "2d", "2.5d", forward=True),
    Claim(THREE, "training", 2.32, "1d", "3d"),
    Claim(THREE, "training", 1.57, "2d", "3d"),
)


def _cost(mode: str, tokens: int) -> LayerCost:
    """As published: whole activations in one dimension."""
    if mode == "1d":
        return cost_1d(tokens, WIDTH, ranks=RANKS, sequence_parallel=False)
    return cost_grid(tokens, WIDTH, ranks=RANKS, mode=mode)


def received(claim: Claim, ratio: int) -> float:
    """How many times as many bytes the slower layout receives.

    Args:
        claim: What was compared.
        ratio: Tokens over the width.
    """
    slower, faster = (_cost(mode, ratio * WIDTH) for mode in (claim.slower, claim.faster))
    return slower.forward / faster.forward if claim.forward else slower.step / faster.step


def share(claim: Claim, ratio: int) -> float | None:
    """The part of the slower layout's step that messages would be; None where the bytes alone do
    not say it.

    Args:
        claim: What was published.
        ratio: Tokens over the width.
    """
    most = received(claim, ratio)
    if most < claim.published:
        return None
    return (1 - 1 / claim.published) / (1 - 1 / most)


def table() -> str:
    """Of Markdown."""
    titles = " | ".join(f"{ratio} h" for ratio in RATIOS)
    lines = [
        f"| source | times as fast | published | {titles} |",
        "|---|---|---:|" + "---:|" * len(RATIOS),
    ]
    for claim in CLAIMS:
        cells = []
        for ratio in RATIOS:
            part = share(claim, ratio)
            of = "" if part is None else f" ({part:.0%})"
            cells.append(f"{received(claim, ratio):.2f}x{of}")
        what = f"{claim.faster} over {claim.slower}, {claim.what}"
        lines.append(f"| {claim.source} | {what} | {claim.published}x | {' | '.join(cells)} |")
    one, grid = (_cost(mode, WIDTH) for mode in ("1d", "2d"))
    kept = one.activations / grid.activations
    cells = [f"{kept:.1f}x", *("" for _ in RATIOS[1:])]
    what = "2d over 1d, largest batch: what is kept of a token"
    return "\n".join([*lines, f"| {OPTIMUS} | {what} | 8x | {' | '.join(cells)} |"]) + "\n"


def fill(text: str) -> str:
    """A page with the table written anew.

    Args:
        text: Of the page.
    """
    return MARKED.sub(lambda match: f"{match[1]}{table()}{match[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
