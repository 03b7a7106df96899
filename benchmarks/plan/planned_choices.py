"""Which layout the planner chooses for some models and clusters: the tables of docs/choosing.md.

python -m benchmarks.plan.planned_choices      write them, and the picture of docs/planner.md, anew
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.plan.published_runs import gpt, llama
from pyops.plan import Cluster, ModelShape, Options, Plan, PlanError, best, draw, load_cluster

__all__ = ["CHOICES", "Choice", "fill"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "choosing.md"
PICTURE = PAGE.parent / "plan.png"
MARKED = re.compile(r"(<!-- choices:(\w+) -->\n).*?(<!-- /choices -->)", re.DOTALL)
GBIT = 1e9 / 8


@dataclass(frozen=True)
class Choice:
    """A model, a cluster and a batch."""

    name: str
    """Of the row."""
    shape: ModelShape
    """The model."""
    cluster: Cluster
    """The devices and links."""
    batch: int
    """Rows of a step."""
    fixed: tuple[tuple[str, object], ...] = ()
    """Fields of the layout that must have a value."""

    def plan(self) -> Plan:
        """What the planner chooses.

        Raises:
            PlanError: Nothing fits.
        """
        return best(self.shape, self.cluster, Options(batch=self.batch, fixed=dict(self.fixed)))


def network(cluster: Cluster, gbit: float) -> Cluster:
    """The same with a network of so many Gbit/s for each device."""
    link = replace(cluster.network, bandwidth=gbit * GBIT)
    return replace(cluster, network=link)


H100 = load_cluster("h100")
SMALL = replace(gpt(24, 1024, 16, vocab=50304), name="GPT 0.35B")
SHAPES = {
    "8B": llama(32, 4096, 32, 14336),
    "70B": llama(80, 8192, 64, 28672),
    "405B": llama(126, 16384, 128, 53248),
}


def _one_device() -> list[Choice]:
    found = [Choice("GPT 0.35B", SMALL, H100.with_devices(n), 64) for n in (1, 8)]
    llama_8b = SHAPES["8B"]
    found += [Choice("Llama 8B", llama_8b, H100.with_devices(n), 64) for n in (1, 2, 4, 8)]
    return found


def _nodes() -> list[Choice]:
    rows = (("8B", 64, 512), ("70B", 64, 256), ("70B", 512, 1024), ("405B", 1024, 1024))
    found = [Choice(f"Llama {m}", SHAPES[m], H100.with_devices(n), b) for m, n, b in rows]
    found.append(Choice("Llama 405B", SHAPES["405B"], H100.with_devices(16384), 2048))
    return found


def _links() -> list[Choice]:
    speeds = (400.0, 100.0, 25.0, 10.0, 1.0)
    found = []
    for model, batch in (("8B", 256), ("70B", 256)):
        for gbit in speeds:
            cluster = network(H100.with_devices(32 if model == "8B" else 64), gbit)
            found.append(Choice(f"Llama {model}, {gbit:g} Gbit/s", SHAPES[model], cluster, batch))
    return found


CHOICES: dict[str, Sequence[Choice]] = {
    "device": _one_device(),
    "nodes": _nodes(),
    "links": _links(),
}


def row(choice: Choice) -> str:
    """Of a table."""
    number = choice.cluster.num_devices
    lead = f"| {choice.name} | {number:,} | {choice.batch:,} |"
    try:
        plan = choice.plan()
    except PlanError as error:
        short = re.search(r"the least is ([\d.]+ GiB)", str(error))
        return f"{lead} nothing fits: {short[1] if short else ''} at the least | | | | |"
    layout = plan.layout
    schedule = f", {layout.schedule}" if layout.pp > 1 else ""
    schedule += f" v {layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""
    schedule += f", {layout.cp_method}" if layout.cp > 1 else ""
    schedule += ", states in host memory" if layout.offload != "none" else ""
    again = ", blocks recomputed" if layout.recompute == "block" else ""
    sequence = ", sequence parallel" if layout.sequence_parallel else ""
    simple = dict(plan.reasons)
    alone = [name for name in ("ZeRO 1 alone", "ZeRO 3 alone", "tp alone") if name in simple]
    others = next((f"{name}: {simple[name]}" for name in alone if "slower" in simple[name]), "")
    return (
        f"{lead} {layout}, ZeRO {layout.zero}{schedule}{sequence}{again} | "
        f"{plan.best.memory.gib:.0f} | {plan.tokens_per_second():,.0f} | {plan.mfu():.0%} | "
        f"{others.partition(':')[0]} {_slower(others)}".rstrip()
        + " |"
    )


def _slower(reason: str) -> str:
    found = re.search(r"(\d+%) slower", reason)
    return f"{found[1]} slower" if found else ""


def text(name: str) -> str:
    """A table of docs/choosing.md."""
    head = "| model | devices | rows a step | layout | GiB | tokens/s each | MFU | simpler |"
    return "\n".join([head, "|---|---:|---:|---|---:|---:|---:|---|", *map(row, CHOICES[name])])


def fill(page: str) -> str:
    """The page with its tables made anew."""
    return MARKED.sub(lambda found: f"{found[1]}{text(found[2])}\n{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
    drawn = CHOICES["nodes"][0].plan()
    draw(replace(drawn, shape=replace(drawn.shape, name=CHOICES["nodes"][0].name)), PICTURE)
