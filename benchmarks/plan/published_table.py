"""A table of published runs: each beside what `pyops.plan` predicts for it, and the errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyops.plan import MEGATRON, Case, Layout, ModelShape, Software, load_cluster, step_time

__all__ = ["Run", "Table", "blind", "mean_error", "text", "worst_error"]


@dataclass(frozen=True)
class Run:
    """A run, and what was published of it."""

    name: str
    """For the table."""
    shape: ModelShape
    """The model."""
    layout: Layout
    """How it was shared out."""
    published: float
    """In the unit of the table."""
    cluster: str = "a100"
    """Of `pyops.plan.cluster_names()`."""
    software: Software = MEGATRON
    """What trained it."""
    fitted: bool = False
    """Whether a constant was fitted to it."""

    @property
    def seconds(self) -> float:
        """Of a step, predicted."""
        cluster = load_cluster(self.cluster).with_devices(self.layout.num_ranks)
        return step_time(Case(self.shape, cluster, self.software), self.layout).total

    @property
    def tokens(self) -> float:
        """Tokens of a second and device, predicted."""
        rows = self.layout.batch / self.layout.num_ranks
        return rows * self.shape.sequence_length / self.seconds


@dataclass(frozen=True)
class Table:
    """Rows of one source."""

    title: str
    """What they are."""
    source: str
    """Where they stand."""
    unit: str
    """Of a row."""
    runs: tuple[Run, ...]
    """The rows."""
    fitted: str
    """Which constants were fitted to which rows; else it says that the table is blind."""
    bound: float
    """Within which rows that nothing was fitted to are predicted."""
    assumed: str = ""
    """What the source does not say."""

    def predicted(self, run: Run) -> float:
        """In the unit of the table."""
        if self.unit == "s":
            return run.seconds
        if self.unit == "tokens/s":
            return run.tokens
        if self.unit == "TFLOP/s, all that is computed":
            shape, s = run.shape, run.shape.sequence_length
            l, h = shape.num_layers, shape.dim  # noqa: E741
            all_of_it = 96.0 * s * l * h * h * (1 + s / (6 * h) + shape.vocab_size / (16 * l * h))
            return run.layout.batch * all_of_it / run.layout.num_ranks / run.seconds / 1e12
        return run.tokens * run.shape.operations() / 1e12

    def error(self, run: Run) -> float:
        """Predicted over published, less 1."""
        return self.predicted(run) / run.published - 1.0


def blind(table: Table) -> list[Run]:
    """The rows that nothing was fitted to."""
    return [run for run in table.runs if not run.fitted]


def worst_error(table: Table, runs: Iterable[Run]) -> float:
    """The largest error of some rows of a table."""
    return max(abs(table.error(run)) for run in runs)


def mean_error(table: Table, runs: Sequence[Run]) -> float:
    """The mean error, without signs, of some rows of a table."""
    return sum(abs(table.error(run)) for run in runs) / len(runs)


def text(table: Table) -> str:
    """A table of docs/planner.md."""
    lines = [
        f"{table.source}. Fitted: {table.fitted}."
        + (f" Assumed: {table.assumed}." if table.assumed else ""),
        "",
        f"| run | published, {table.unit} | predicted | |",
        "|---|---:|---:|---:|",
    ]
    for run in table.runs:
        mark = ", fitted" if run.fitted else ""
        value = table.predicted(run)
        shown = f"{value:.2f}" if table.unit == "s" else f"{value:,.0f}"
        known = f"{run.published:g}" if table.unit == "s" else f"{run.published:,.0f}"
        lines.append(f"| {run.name} | {known} | {shown} | {table.error(run):+.1%}{mark} |")
    for what, rows in (
        ("fitted", [run for run in table.runs if run.fitted]),
        ("blind", blind(table)),
    ):
        if rows:
            lines += [
                "",
                f"{len(rows)} {what} rows: {mean_error(table, rows):.1%} off on average, "
                f"{worst_error(table, rows):.1%} at most.",
            ]
    return "\n".join(lines)
