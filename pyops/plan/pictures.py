"""The picture of a plan: memory of a rank and time of a step, by layout and by what takes them, and
what more ranks would bring.

    draw(plan, "plan.svg")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyops.plan.clusters import GIB
from pyops.plan.costs.rank_memory import Memory
from pyops.plan.costs.times import StepTime
from pyops.plan.laws import amdahl, gustafson
from pyops.plan.layouts.pricing import Priced
from pyops.plan.result import Plan
from pyops.plan.shapes import PlanError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw", "picture_path", "scaling"]

ENDINGS = (".svg", ".png", ".pdf")
SHOWN = 6  # layouts
DOUBLED = 8  # times
ROOM = 1.4  # for the legend, beside the bars
SMALL = 0.01  # parts of a bar below this are not drawn


def scaling(plan: Plan) -> dict[str, list[tuple[int, float]]]:
    """{law: (ranks, speed beside the plan's)}: of the plan's batch (Amdahl), of one that grows with
    the ranks (Gustafson), and of copies that exchange gradients (synchronous SGD).

    Args:
        plan: Whose ranks are doubled, and doubled again.
    """
    q, law = plan.parallel_part, plan.sync_sgd
    ranks = [plan.cluster.num_devices * 2**i for i in range(DOUBLED)]
    times = [2**i for i in range(DOUBLED)]
    return {
        "the same batch (Amdahl)": [
            (n, amdahl(k, parallel=q)) for n, k in zip(ranks, times, strict=True)
        ],
        "a batch that grows (Gustafson)": [
            (n, gustafson(k, parallel=q)) for n, k in zip(ranks, times, strict=True)
        ],
        "copies (synchronous SGD)": [
            (n, k * law.efficiency) for n, k in zip(ranks, times, strict=True)
        ],
    }


def picture_path(path: str | Path) -> Path:
    """The path of a picture that can be drawn.

    Args:
        path: The file; its ending is .svg, .png or .pdf.

    Raises:
        PlanError: For another ending, a folder that is not there, or where matplotlib is not
            installed.
    """
    path = Path(path)
    if path.suffix not in ENDINGS:
        raise PlanError(f"{path} should be a picture; give it one of {', '.join(ENDINGS)}")
    if not path.parent.is_dir():
        raise PlanError(f"{path} is in a folder that is not there; name another, or make it")
    if find_spec("matplotlib") is None:
        raise PlanError(f"{path} needs matplotlib, which is not installed: pip install matplotlib")
    return path


def draw(plan: Plan, path: str | Path) -> Path:
    """Write the picture of a plan.

    Args:
        plan: What was found.
        path: The file; its ending is .svg, .png or .pdf.

    Returns:
        The path.

    Raises:
        PlanError: As `picture_path`.
    """
    path = picture_path(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    several = (plan.best, *plan.runners_up)[:SHOWN]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.5))
    _bars(
        left,
        several,
        [_parts(each.memory, Memory, GIB) for each in several],
        f"memory of a rank, GiB of {plan.cluster.device.memory_gib:g}",
    )
    left.axvline(plan.cluster.device.memory_gib, color="black", linestyle=":")
    _bars(
        middle,
        several,
        [_parts(each.time, StepTime, 1.0) for each in several],
        "a step, seconds",
    )
    middle.set_yticklabels([])
    for number, each in enumerate(several):
        if each.measured:
            middle.plot(each.measured, number, marker="D", color="black")
    _scaling(right, plan)
    figure.suptitle(f"{plan.shape.name} on {plan.cluster.num_devices} x {plan.cluster.device.name}")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return path


def _parts(found: Any, kind: Any, scale: float) -> dict[str, float]:
    parts = {field.name: getattr(found, field.name) / scale for field in fields(kind)}
    total = sum(parts.values())
    return {name: value for name, value in parts.items() if value > SMALL * total}


def _bars(
    axes: Axes, several: Sequence[Priced], parts: Sequence[Mapping[str, float]], title: str
) -> None:
    """A bar for each layout, the best at the top, cut into its parts."""
    names = list(dict.fromkeys(name for each in parts for name in each))
    for number, each in enumerate(parts):
        start = 0.0
        for name, width in each.items():
            axes.barh(number, width, left=start, color=f"C{names.index(name) % 10}")
            start += width
    for index, name in enumerate(names):
        axes.barh(0, 0, color=f"C{index % 10}", label=name.replace("_", " "))
    axes.set_yticks(range(len(several)))
    axes.set_yticklabels([f"{each.layout}, ZeRO {each.layout.zero}" for each in several])
    axes.invert_yaxis()
    axes.set_title(title)
    axes.set_xlim(0, ROOM * axes.get_xlim()[1])
    axes.legend(fontsize=7, loc="center right")


def _scaling(axes: Axes, plan: Plan) -> None:
    for name, points in scaling(plan).items():
        axes.plot(*zip(*points, strict=True), marker=".", label=name)
    rows = plan.layout.batch
    axes.axvline(rows * plan.cluster.num_devices / plan.layout.dp, color="black", linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel(f"ranks; dotted: a copy has one of the {rows:,} rows of a step")
    axes.set_title("speed, times the plan's")
    axes.legend(fontsize=7)
