"""Cluster: the devices, the nodes that hold them and the links between, read from TOML.

    node 0  d d d d d d d d      within a node: node.bandwidth of each device
            | | | | | | | |      between nodes: network.bandwidth of each device
    node 1  d d d d d d d d

Every figure of a file stands in its table [sources] too, with where it comes from. Bandwidths are
bytes a second in one direction, latencies seconds of one hop, peaks operations a second.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pyops.plan.shapes import PlanError

__all__ = ["Cluster", "Device", "Efficiency", "Host", "Link", "cluster_names", "load_cluster"]

DATA = Path(__file__).parent / "data"
GIB = float(1 << 30)


@dataclass(frozen=True)
class Efficiency:
    """Which part of its peaks a device delivers."""

    product: float
    """Of the peak, by a matrix product of endless width."""
    half_width: float
    """A product of this width on a rank delivers half of that: product x / (x + half_width)."""
    attention: float
    """Of the peak, by fused attention."""
    memory: float
    """Of the memory's bandwidth, by operations between the products."""

    def of_width(self, width: float) -> float:
        """The part of the peak that a product of this width on a rank delivers."""
        return self.product * width / (width + self.half_width)


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: As its vendor calls it.
        memory_gib: Its memory.
        reserved_gib: What the driver, the kernels and the communicators take of it.
        memory_bandwidth: Bytes a second.
        peak: {dtype: operations a second} of matrix products.
        efficiency: What it delivers.
    """

    name: str
    memory_gib: float
    reserved_gib: float
    memory_bandwidth: float
    peak: Mapping[str, float]
    efficiency: Efficiency

    def operations(self, precision: str) -> float:
        """The peak in a precision.

        Args:
            precision: "fp32", "bf16" or "fp16".

        Raises:
            PlanError: The file has none.
        """
        if precision not in self.peak:
            raise PlanError(
                f"precision is {precision!r}, for which the file of {self.name} has no peak; it "
                f"has {', '.join(self.peak)}: choose one, or add device.peak.{precision} and "
                "its source"
            )
        return self.peak[precision]


@dataclass(frozen=True)
class Link:
    """What carries messages.

    Attributes:
        bandwidth: Bytes a second of each device, in one direction.
        delivered: Which part of it a collective sees.
        latency: Seconds of a hop.
        contention: Which part of the time of hidden messages the computation is slowed down by.
    """

    bandwidth: float
    delivered: float
    latency: float
    contention: float

    @property
    def speed(self) -> float:
        """Bytes a second that a collective sees."""
        return self.bandwidth * self.delivered


@dataclass(frozen=True)
class Host:
    """What the processors of a node have for each of its devices.

    Attributes:
        memory_gib: Their memory.
        bandwidth: Bytes a second between them and the device, in one direction.
        memory_bandwidth: Bytes a second of their memory.
    """

    memory_gib: float
    bandwidth: float
    memory_bandwidth: float


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices.

    Attributes:
        name: For tables.
        device: What computes.
        devices_per_node: How many of them share the fast links.
        node: The links within a node.
        network: The links between nodes.
        num_devices: Of the whole cluster.
        device_hours: Between two failures of one device.
        sources: {figure: where it comes from}.
        host: What offloaded states lie in; None: nothing is known of it.
        processors: Of a node, where its devices are processes that take turns on them; 0: each
            device computes by itself.
    """

    name: str
    device: Device
    devices_per_node: int
    node: Link
    network: Link
    num_devices: int
    device_hours: float
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)
    host: Host | None = None
    processors: int = 0

    @property
    def num_nodes(self) -> int:
        """Nodes that its devices fill."""
        return -(-self.num_devices // self.devices_per_node)

    def with_devices(self, number: int) -> Cluster:
        """The same with another number of devices.

        Args:
            number: A part of a node, or whole nodes.

        Raises:
            PlanError: For less than one, or nodes that are not alike.
        """
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise PlanError(f"devices is {number!r}; give a whole number, 1 or more")
        per_node = self.devices_per_node
        if number > per_node and number % per_node:
            low = number // per_node * per_node
            raise PlanError(
                f"devices is {number}, but a node has {per_node}, and nodes that are not alike are "
                f"not planned for; ask for {low} or {low + per_node}"
            )
        return replace(self, num_devices=number)


def cluster_names() -> list[str]:
    """The clusters that are known by name."""
    return sorted(path.stem for path in DATA.glob("*.toml"))


def load_cluster(name: str | Path) -> Cluster:
    """The cluster of a name, or of a TOML file.

    Args:
        name: One of `cluster_names()`, or a path that ends in .toml.

    Raises:
        PlanError: An unknown name, a file that can't be read, or a figure that makes no sense.
    """
    path = Path(name)
    if path.suffix != ".toml":
        path = DATA / f"{name}.toml"
        if str(name) not in cluster_names():
            raise PlanError(
                f"cluster is {str(name)!r}; known are {', '.join(cluster_names())}. Name one, or a "
                "TOML file of yours, whose keys are those of pyops/plan/data, or measure this "
                "machine with --measured"
            )
    # Planning without a file needs no reader, which Python 3.10 has not of its own.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise PlanError(
            f"cluster {path} can't be read: {error.strerror}; name a TOML file, or one of "
            f"{', '.join(cluster_names())}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"cluster {path} is no TOML: {error}; correct it there") from None
    return cluster_of(tree, where=path.name)


NUMBERS = {
    "device": ("memory_gib", "reserved_gib", "memory_bandwidth"),
    "device.efficiency": tuple(each.name for each in fields(Efficiency)),
    "node": ("num_devices", *(each.name for each in fields(Link)), "processors"),
    "network": tuple(each.name for each in fields(Link)),
    "failures": ("device_hours",),
}
HOST = tuple(each.name for each in fields(Host))
OPTIONAL = ("processors",)
MAY_BE_ZERO = ("reserved_gib", "latency", "contention", "half_width", "processors")
PARTS = ("delivered", "contention", "product", "attention", "memory")  # at most 1


def cluster_of(tree: Mapping[str, Any], *, where: str = "cluster") -> Cluster:
    """The cluster that a table describes, as a TOML file holds it.

    Args:
        tree: The table.
        where: What messages call it.

    Raises:
        PlanError: A key is missing or unknown, or a figure has no source or makes no sense.
    """
    numbers = {**NUMBERS, **({"host": HOST} if "host" in tree else {})}
    got = {
        section: _numbers(tree, section, names, where=where) for section, names in numbers.items()
    }
    processors = got["node"].pop("processors", 0.0)
    device = tree["device"]
    peaks = device.get("peak")
    if not isinstance(peaks, Mapping) or not peaks:
        raise PlanError(f"{where} has no [device.peak]; give bf16 = 312e12, say")
    for dtype, value in peaks.items():
        _check(f"device.peak.{dtype}", value, where=where)
    sources = tree.get("sources", {})
    for figure in _figures(tree):
        if not any(figure == known or figure.startswith(f"{known}.") for known in sources):
            raise PlanError(
                f'{where}: {figure} has no source; add "{figure}" = "where it comes from" to '
                "[sources]"
            )
    return Cluster(
        name=_text(tree, "name", where=where),
        device=Device(
            name=_text(device, "name", where=f"{where}: device"),
            peak={dtype: float(value) for dtype, value in peaks.items()},
            efficiency=Efficiency(**got["device.efficiency"]),
            **got["device"],
        ),
        devices_per_node=_devices(got["node"].pop("num_devices"), where=where),
        node=Link(**got["node"]),
        network=Link(**got["network"]),
        num_devices=int(tree["node"]["num_devices"]),
        device_hours=got["failures"]["device_hours"],
        sources=dict(sources),
        host=Host(**got["host"]) if "host" in got else None,
        processors=int(processors),
    )


def _devices(value: float, *, where: str) -> int:
    if value != int(value):
        raise PlanError(f"{where}: node.num_devices is {value}; give a whole number")
    return int(value)


def _text(tree: Mapping[str, Any], key: str, *, where: str) -> str:
    found = tree.get(key)
    if not isinstance(found, str) or not found:
        raise PlanError(f'{where} has {key} = {found!r}; give a text, {key} = "H100 nodes", say')
    return found


def _numbers(
    tree: Mapping[str, Any], section: str, names: tuple[str, ...], *, where: str
) -> dict[str, float]:
    table: Any = tree
    for part in section.split("."):
        table = table.get(part) if isinstance(table, Mapping) else None
    if not isinstance(table, Mapping):
        raise PlanError(f"{where} has no table [{section}]; it holds {', '.join(names)}")
    known = {*names, "name", "peak", "efficiency"} if section == "device" else set(names)
    if strange := sorted(set(table) - known):
        raise PlanError(
            f"{where}: unknown key {section}.{strange[0]} = {table[strange[0]]!r}; there are "
            f"{', '.join(names)}"
        )
    found = {}
    for name in names:
        if name not in table and name in OPTIONAL:
            continue
        if name not in table:
            raise PlanError(f"{where} lacks {section}.{name}; give a number")
        found[name] = _check(f"{section}.{name}", table[name], where=where)
    return found


def _check(figure: str, value: Any, *, where: str) -> float:
    name = figure.rpartition(".")[2]
    least = "0 or more" if name in MAY_BE_ZERO else "more than 0"
    most = " and 1 at most" if name in PARTS else ""
    sound = type(value) in (int, float) and math.isfinite(value)
    if (
        not sound
        or value < 0
        or (not value and name not in MAY_BE_ZERO)
        or (name in PARTS and value > 1)
    ):
        raise PlanError(f"{where}: {figure} is {value!r}; it must be a number, {least}{most}")
    return float(value)


def _figures(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of all numbers of a table."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and key != "sources":
            yield from _figures(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}"
