"""Plan: what a search has chosen, as a ParallelPlan, as TOML that `pyops train` takes, as JSON.

best(shape, cluster, Options(batch=64))   -> Plan
plan.parallel_plan()                      -> ParallelPlan(tp=2, zero=ZeroConfig(stage=1))
plan.toml()                               -> [parallel] tp = 2, [zero] stage = 1
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from pyops.parallel import ParallelPlan
from pyops.plan.clusters import GIB, Cluster, cluster_of
from pyops.plan.costs.computing import Case
from pyops.plan.costs.images import ImageCase
from pyops.plan.costs.measured import MeasuredCosts, MeasuredLayers
from pyops.plan.costs.rank_memory import Memory
from pyops.plan.costs.times import StepTime
from pyops.plan.failures import Failures
from pyops.plan.laws import SyncSGD
from pyops.plan.layout import PYOPS, Layout, Software
from pyops.plan.layouts.options import Options
from pyops.plan.layouts.pricing import Priced
from pyops.plan.layouts.reasons import strategies_of
from pyops.plan.layouts.search import Found, search
from pyops.plan.settings import BLOCKS, as_python, codec_code, parallel_plan, sections, toml_text
from pyops.plan.shapes import ExpertShape, ImageShape, ModelShape, PlanError, count

__all__ = ["Plan", "best"]

RUNNERS_UP = 9
FORMAT = 2  # of to_json
# Of what shrinks with more ranks that share the same batch; the rest of a step does not.
SHRINKS = ("products", "attention", "between", "recomputed")


@dataclass(frozen=True)
class Plan:
    """The layout that was chosen, with what it takes, and the others."""

    shape: ModelShape | ImageShape
    """The model."""
    cluster: Cluster
    """The devices and links."""
    options: Options
    """What was asked for."""
    best: Priced
    """What was chosen."""
    runners_up: tuple[Priced, ...]
    """The next ones that fit."""
    num_tried: int
    """Layouts that were priced."""
    num_fitting: int
    """Of them, those that fit."""
    reasons: tuple[tuple[str, str], ...]
    """(simpler strategy, why it is not the one)."""
    software: str = PYOPS.name
    """What trains it."""
    measured: bool = False
    """Whether blocks were measured; else formulas say what they take."""

    @property
    def layout(self) -> Layout:
        """Of the best."""
        return self.best.layout

    def tokens_per_second(self, priced: Priced | None = None) -> float:
        """Tokens, or images, of a second and device.

        Args:
            priced: Another layout than the best.
        """
        priced = priced or self.best
        rows = priced.layout.batch
        return rows * self.shape.sequence_length / priced.seconds / self.cluster.num_devices

    def mfu(self, priced: Priced | None = None) -> float:
        """Model operations over the device's peak, as the shape's `convention` counts them.

        Args:
            priced: Another layout than the best.
        """
        peak = self.cluster.device.operations(self.options.precision)
        return self.tokens_per_second(priced) * self.shape.operations() / peak

    @property
    def parallel_part(self) -> float:
        """The part of a step that more ranks with the same batch would share (Amdahl's)."""
        shared = sum(float(getattr(self.best.time, name)) for name in SHRINKS)
        return shared / self.best.time.total

    @property
    def sync_sgd(self) -> SyncSGD:
        """Whether the copies of the model pay."""
        sync = self.best.time.data_messages
        return SyncSGD(self.best.time.total - sync, sync, self.layout.dp)

    def failures(self, *, save_seconds: float = 60.0, restart_seconds: float = 600.0) -> Failures:
        """How often the run is interrupted.

        Args:
            save_seconds: That a save stops the run.
            restart_seconds: From a failure to the first step.
        """
        return Failures(
            self.cluster.num_devices, self.cluster.device_hours, save_seconds, restart_seconds
        )

    def seconds_for(self, tokens: float) -> float:
        """Seconds that a training on so many tokens takes, failures apart."""
        return tokens / (self.tokens_per_second() * self.cluster.num_devices)

    def parallel_plan(self, *, blocks: str = BLOCKS) -> ParallelPlan:
        """What `pyops.parallel.parallelize` takes.

        Args:
            blocks: The names of the model's blocks, where these are computed again.
        """
        return parallel_plan(self.layout, precision=self.options.precision, blocks=blocks)

    def code(self, *, blocks: str = BLOCKS) -> str:
        """`parallel_plan` as Python, without what has its default.

        Args:
            blocks: The names of the model's blocks, where these are computed again.
        """
        if self.layout.codec != "none":
            return f"DataParallel(model, codec={codec_code(self.layout.codec)})"
        return as_python(self.parallel_plan(blocks=blocks))

    def sections(self, *, blocks: str = BLOCKS) -> dict[str, dict[str, Any]]:
        """The sections of a run's TOML file that the layout fills.

        Args:
            blocks: The names of the model's blocks, where these are computed again.
        """
        return sections(self.layout, precision=self.options.precision, blocks=blocks)

    def toml(self, *, model: Mapping[str, Any] | None = None, blocks: str = BLOCKS) -> str:
        """A file that `pyops train` takes, where [model] is given.

        Args:
            model: The section [model].
            blocks: The names of the model's blocks, where these are computed again.
        """
        found: dict[str, Mapping[str, Any]] = {**self.sections(blocks=blocks)}
        return toml_text(found if model is None else {"model": model, **found})

    def command(self, config: str = "plan.toml") -> str:
        """What starts the training.

        Args:
            config: The file that `toml` was written to.
        """
        per_node = min(self.cluster.devices_per_node, self.cluster.num_devices)
        nodes = self.cluster.num_devices // per_node
        many = (
            "--standalone"
            if nodes == 1
            else f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint $HOST:29500"
        )
        return f"torchrun {many} --nproc-per-node {per_node} -m pyops train {config}"

    def tried(self, seconds: Sequence[float]) -> Plan:
        """The same with the first layouts as they were measured, the fastest of them in front.

        Args:
            seconds: Of a step of the best, of the first runner-up, and so on.

        Raises:
            PlanError: More than there are layouts, none, or a time that is not above 0.
        """
        every = (self.best, *self.runners_up)
        if not 0 < len(seconds) <= len(every) or not all(each > 0 for each in seconds):
            raise PlanError(
                f"seconds is {list(seconds)!r}; give times above 0 of 1 to {len(every)} layouts"
            )
        tried = [replace(e, measured=s) for e, s in zip(every, seconds, strict=False)]
        tried.sort(key=lambda each: each.measured)
        own = set(strategies_of(tried[0].layout))
        return replace(
            self,
            best=tried[0],
            runners_up=(*tried[1:], *every[len(tried) :]),
            reasons=tuple(each for each in self.reasons if each[0] not in own),
        )

    def to_json(self) -> str:
        """All of it, for `from_json`."""
        tree: dict[str, Any] = {
            "format": FORMAT,
            "shape": asdict(self.shape),
            "cluster": _table_of(self.cluster),
            "num_devices": self.cluster.num_devices,
            "options": {**asdict(self.options), "fixed": dict(self.options.fixed)},
            "best": _priced(self.best),
            "runners_up": [_priced(each) for each in self.runners_up],
            "num_tried": self.num_tried,
            "num_fitting": self.num_fitting,
            "reasons": [list(each) for each in self.reasons],
            "software": self.software,
            "measured": self.measured,
            "summary": {
                "seconds": self.best.seconds,
                "gib": self.best.memory.gib,
                "tokens_per_second_and_device": self.tokens_per_second(),
                "mfu": self.mfu(),
                "mfu_convention": self.shape.convention,
            },
        }
        return json.dumps(tree, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

        Args:
            text: The JSON.

        Raises:
            PlanError: It is no JSON, or of another kind.
        """
        try:
            tree = json.loads(text)
            if tree["format"] != FORMAT:
                raise PlanError(
                    f"the plan has format {tree['format']!r}, expected {FORMAT}; make it anew with "
                    "pyops plan --json"
                )
            return cls(
                shape=_shape(tree["shape"]),
                cluster=cluster_of(tree["cluster"], where="cluster").with_devices(
                    tree["num_devices"]
                ),
                options=_options(tree["options"]),
                best=_of_priced(tree["best"]),
                runners_up=tuple(_of_priced(each) for each in tree["runners_up"]),
                num_tried=tree["num_tried"],
                num_fitting=tree["num_fitting"],
                reasons=tuple((name, why) for name, why in tree["reasons"]),
                software=tree["software"],
                measured=tree["measured"],
            )
        except PlanError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(
                f"this is no plan in JSON ({type(error).__name__}: {error}); make one with pyops "
                "plan --json"
            ) from None


def _shape(tree: Mapping[str, Any]) -> ModelShape | ImageShape:
    return (ImageShape if "config" in tree else ModelShape).of_numbers(tree)


def _options(tree: Mapping[str, Any]) -> Options:
    lists = {name: tuple(tree[name]) for name in ("recompute", "codecs")}
    return Options(**{**tree, **lists})


def _priced(each: Priced) -> dict[str, Any]:
    return {
        "layout": asdict(each.layout),
        "memory": asdict(each.memory),
        "time": asdict(each.time),
        "measured": each.measured,
    }


def _of_priced(tree: Mapping[str, Any]) -> Priced:
    return Priced(
        Layout(**tree["layout"]),
        Memory(**tree["memory"]),
        StepTime(**tree["time"]),
        tree["measured"],
    )


def _table_of(cluster: Cluster) -> dict[str, Any]:
    """The table of TOML that describes a cluster."""
    return {
        "name": cluster.name,
        "device": asdict(cluster.device),
        "node": {
            "num_devices": cluster.devices_per_node,
            **({"processors": cluster.processors} if cluster.processors else {}),
            **asdict(cluster.node),
        },
        "network": asdict(cluster.network),
        "failures": {"device_hours": cluster.device_hours},
        **({} if cluster.host is None else {"host": asdict(cluster.host)}),
        "sources": dict(cluster.sources),
    }


def best(
    shape: ModelShape | ImageShape | ExpertShape,
    cluster: Cluster,
    options: Options | None = None,
    *,
    software: Software = PYOPS,
    measured: MeasuredCosts | MeasuredLayers | None = None,
) -> Plan:
    """The layout whose steps are fastest, of those that fit.

    Args:
        shape: Of the model; one with experts is refused.
        cluster: The devices and links.
        options: The batch, the precision, what is fixed.
        software: What trains it.
        measured: What the model's blocks, or the layers of a model of images, were measured to
            take; None: formulas say it.

    Raises:
        PlanError: Nothing fits, naming the nearest and what is missing; or options that make no
            sense.
    """
    if isinstance(shape, ExpertShape):
        raise shape.refusal()
    options = options or Options()
    options.validate()
    case = _case(shape, cluster, software, options, measured)
    cluster.device.operations(options.precision)
    found = search(case, options)
    if not found.fitting:
        raise PlanError(_nothing_fits(case, options, found))
    return Plan(
        shape=shape,
        cluster=cluster,
        options=replace(options, batch=found.fitting[0].layout.batch),
        best=found.fitting[0],
        runners_up=found.fitting[1 : 1 + RUNNERS_UP],
        num_tried=found.num_tried,
        num_fitting=len(found.fitting),
        reasons=found.reasons,
        software=software.name,
        measured=measured is not None,
    )


def _case(
    shape: ModelShape | ImageShape,
    cluster: Cluster,
    software: Software,
    options: Options,
    measured: MeasuredCosts | MeasuredLayers | None,
) -> Case | ImageCase:
    if isinstance(shape, ModelShape):
        if isinstance(measured, MeasuredLayers):
            raise PlanError(
                f"measured has layers of images, but {shape.name} is a decoder; measure its blocks "
                "by measure_blocks"
            )
        return Case(shape, cluster, software, options.precision, measured)
    if isinstance(measured, MeasuredCosts):
        raise PlanError(
            f"measured has blocks of a decoder, but {shape.name} is a model of images; measure its "
            "layers by measure_layers"
        )
    if options.codecs:
        raise PlanError(
            f"codecs is {options.codecs!r}, which are not counted for models of images; leave them "
            "out"
        )
    return ImageCase(shape, cluster, software, options.precision, measured)


def _nothing_fits(case: Case | ImageCase, options: Options, found: Found) -> str:
    """What is missing, and how many devices would have it."""
    room = options.memory_part * case.cluster.device.memory_gib
    nearest, short = found.smallest, found.smallest.memory.gib - room
    parts = {f.name: getattr(nearest.memory, f.name) / GIB for f in fields(Memory)}
    most = max(parts, key=lambda name: parts[name])
    more = 2 * case.cluster.num_devices
    fix = (
        ("shorter rows" if isinstance(case, Case) else "smaller images") + ", or a smaller model"
        if most in ("activations", "recomputed", "logits")
        else f"{more} devices"
    )
    return (
        f"{case.shape.name} of {count(case.shape.num_parameters)} parameters fits on no "
        f"layout of {case.cluster.num_devices} x {case.cluster.device.name}: the least is "
        f"{nearest.memory.gib:.1f} GiB ({nearest.layout}, ZeRO {nearest.layout.zero}), {short:.1f} "
        f"more than the {room:.1f} that may be used, most of it {most} ({parts[most]:.1f} GiB); "
        f"take {fix}, or devices with more memory"
    )
