"""The picture of a compression: accuracy and loss over the bytes on disk, and bars of latency."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pyops.compress.report import CompressReport
from pyops.config import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_picture", "draw"]


def check_picture() -> None:
    """Refuse a picture where nothing can draw it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "measure.picture is true, but matplotlib is not installed: pip install matplotlib, or "
            "set it to false"
        )


def draw(report: CompressReport, path: Path | str) -> None:
    """Write the picture.

    Args:
        report: What was found.
        path: The file, .svg or what else matplotlib writes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = report.stages[0].token_ms is not None
    figure, several = pyplot.subplots(1, 4 if timed else 2, figsize=(18 if timed else 10, 4.2))
    _over_bytes(several[0], report, "accuracy, %", [100 * s.accuracy for s in report.stages])
    _over_bytes(several[1], report, "loss, nats a token", [s.loss for s in report.stages])
    if timed:
        _bars(several[2], report, "one row, ms a token", "token_ms")
        _bars(
            several[3],
            report,
            "forward of {} x {} tokens, ms".format(*report.batch_shape),
            "batch_ms",
        )
        several[3].set_yticklabels([])
    figure.suptitle(f"{report.folder} -> {report.output}")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None)
    pyplot.close(figure)


def _over_bytes(axes: Axes, report: CompressReport, what: str, values: list[float]) -> None:
    """A point for each stage, joined in order."""
    sizes = [stage.file_bytes / 1e6 for stage in report.stages]
    axes.plot(sizes, values, color="0.7", zorder=1)
    for number, (size, value) in enumerate(zip(sizes, values, strict=True)):
        axes.scatter([size], [value], color=f"C{number % 10}", zorder=2)
        axes.annotate(
            report.stages[number].name,
            (size, value),
            textcoords="offset points",
            xytext=(4, 4),
            fontsize=7,
        )
    axes.set_xlim(0, 1.25 * max(sizes))
    axes.set_xlabel("MB on disk")
    axes.set_title(what)


def _bars(axes: Axes, report: CompressReport, title: str, name: str) -> None:
    """A bar for each stage, the first at the top, and within what most rounds lay."""
    for number, stage in enumerate(report.stages):
        spread = getattr(stage, name)
        around = [[spread.median - spread.low], [spread.high - spread.median]]
        axes.barh(number, spread.median, xerr=around, color=f"C{number % 10}", capsize=3)
    axes.set_yticks(range(len(report.stages)))
    axes.set_yticklabels([stage.name for stage in report.stages], fontsize=7)
    axes.invert_yaxis()
    axes.set_title(title)
