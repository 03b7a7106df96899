"""Profile: what each layer of a model takes and keeps; Costs of any cut into stages follow from it.

    layers    0    1    2  |  3    4  |  5         boundaries [0, 3, 5, 6]
    forward   1    2    1  |  3    2  |  4         -> Costs(forward=[4, 5, 4], ...)

Times add up. Bytes do not: a tensor that two layers of a stage keep, as the output of one and the
input of the next, and a weight that they share are there once; so a profile has each layer's
storages and parameters by number.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from pyops.pipeline.schedules.simulate import Costs

__all__ = ["LayerCosts", "Profile", "layer_costs"]

Sizes = tuple[tuple[int, int], ...]  # (number of a storage or parameter, its bytes)
MEASURES = ("time", "parameters", "memory")
_OLD_FIELDS = {"put_off": "deferred_weight_grad"}


@dataclass(frozen=True)
class LayerCosts:
    """One layer, of one micro-batch. Seconds: forward; backward, in one; forward_apart,
    input_gradient and weight_gradient, forward and both parts of backward when these are computed
    apart. Bytes: activation, that travels to the next layer; kept, the storages that autograd keeps
    from forward to backward; taken, those of the layer's input; deferred_weight_grad, what is kept
    from input_gradient to weight_gradient; weights, its parameters.

    Attributes:
        parameters: How many numbers.
    """

    name: str = ""
    forward: float = 0.0
    backward: float = 0.0
    forward_apart: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    activation: int = 0
    deferred_weight_grad: int = 0
    parameters: int = 0
    kept: Sizes = ()
    taken: Sizes = ()
    weights: Sizes = ()

    @property
    def time(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Profile:
    """The layers of a model in their order; made by `pyops.pipeline.profile`, or by hand.

    Attributes:
        facts: How it was measured.
        skips: (layer, later layer, bytes) of each value that skips those between.
    """

    layers: tuple[LayerCosts, ...]
    facts: tuple[tuple[str, str], ...] = ()
    skips: tuple[tuple[int, int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.layers)

    def kept(self, first: int, end: int) -> int:
        """Bytes that layers first .. end - 1 on one stage keep of a micro-batch, and what they took
        from the stage before."""
        kept = [layer.kept for layer in self.layers[first:end]]
        return _bytes([*kept, self.layers[first].taken] if first else kept)

    def weights(self, first: int, end: int, *, optimizer_bytes: float = 8.0) -> float:
        """Bytes of the layers' weights and gradients, and optimizer_bytes for each parameter (8:
        two moments in fp32).

        Args:
            first: The first of these layers.
            end: The number behind the last one.
            optimizer_bytes: Bytes of states for each parameter; 8: two moments in float32.
        """
        several = self.layers[first:end]
        whole, once = (
            sum(_bytes([layer.weights]) for layer in several),
            _bytes(layer.weights for layer in several),
        )
        share = once / whole if whole else 0.0  # shared weights are there once
        return 2.0 * once + optimizer_bytes * share * sum(layer.parameters for layer in several)

    def costs(
        self,
        boundaries: Sequence[int],
        *,
        split: bool = False,
        step: float | Sequence[float] = 0.0,
        latency: float = 0.0,
        bandwidth: float = math.inf,
        optimizer_bytes: float = 8.0,
    ) -> Costs:
        """Costs of the stages [boundaries[s], boundaries[s + 1]), as `balance` gives them.

        Args:
            split: The schedule computes gradients of inputs and of weights apart
                (`schedule.splits_backward`); else the two add up to the whole backward. The others:
                see Costs, and `weights`.

        Raises:
            ValueError: For boundaries that leave layers out.
        """
        bounds = list(boundaries)
        if (
            len(bounds) < 2
            or bounds[0] != 0
            or bounds[-1] != len(self)
            or any(a >= b for a, b in itertools.pairwise(bounds))
        ):
            raise ValueError(
                f"boundaries are {bounds}; expected 0, rising numbers, and last "
                f"{len(self)}, the number of layers"
            )
        stages = [self.layers[a:b] for a, b in itertools.pairwise(bounds)]
        forward, inputs, weights = (
            [math.fsum(getattr(layer, part) for layer in stage) for stage in stages]
            for part in (
                "forward_apart" if split else "forward",
                "input_gradient",
                "weight_gradient",
            )
        )
        if not split:
            for s, stage in enumerate(stages):
                apart, whole = inputs[s] + weights[s], math.fsum(layer.backward for layer in stage)
                share = inputs[s] / apart if apart else 1.0
                inputs[s], weights[s] = share * whole, whole - share * whole
        return Costs(
            forward=forward,
            input_gradient=inputs,
            weight_gradient=weights,
            step=step,
            latency=latency,
            bandwidth=bandwidth,
            activation=[float(stage[-1].activation) for stage in stages],
            kept=[float(self.kept(a, b)) for a, b in itertools.pairwise(bounds)],
            kept_input=[float(_bytes([self.layers[a].taken])) if a else 0.0 for a in bounds[:-1]],
            skipped=self._skipped(bounds),
            deferred_weight_grad=[
                float(sum(layer.deferred_weight_grad for layer in stage)) for stage in stages
            ],
            weights=[
                self.weights(a, b, optimizer_bytes=optimizer_bytes)
                for a, b in itertools.pairwise(bounds)
            ],
        )

    def _skipped(self, bounds: Sequence[int]) -> dict[tuple[int, int], float]:
        """Bytes along each edge between stages that are no neighbours' activation."""
        stage_of = [
            stage for stage, (a, b) in enumerate(itertools.pairwise(bounds)) for _ in range(a, b)
        ]
        found: dict[tuple[int, int], float] = {}
        for first, last, size in self.skips:
            edge = stage_of[first], stage_of[last]
            if edge[0] != edge[1]:
                found[edge] = found.get(edge, 0.0) + size
        return found

    def save(self, path: Path | str) -> Path:
        """Write it as JSON."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {
            "layers": [asdict(layer) for layer in self.layers],
            "facts": dict(self.facts),
            "skips": self.skips,
        }
        path.write_text(json.dumps(whole, indent=1))
        return path

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        """Read what `save` wrote.

        Raises:
            ValueError: For files that hold something else.
        """
        try:
            found = json.loads(Path(path).read_text())
            return cls(
                tuple(map(_layer, found["layers"])),
                tuple(found["facts"].items()),
                tuple(map(tuple, found["skips"])),
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} is no profile ({error!r}); write one with profile(layers, "
                "inputs).save(path)"
            ) from error


def layer_costs(
    costs: Sequence[float] | Profile | Sequence[nn.Module],
    by: str | Callable[..., float] | None = None,
) -> list[float]:
    """What each layer weighs in a partition.

    Args:
        costs: Numbers, a Profile, or the layers themselves.
        by: Of a Profile "time" (the default), "parameters", "memory" (weights, gradients, Adam's
            moments and one micro-batch's activations) or a function of LayerCosts; of layers
            "parameters" (the default) or a function of a module.

    Raises:
        ValueError: For anything else.
    """
    if isinstance(costs, Profile):
        if callable(by):
            return [float(by(layer)) for layer in costs.layers]
        if by in (None, "time", "parameters"):
            return [float(getattr(layer, by or "time")) for layer in costs.layers]
        if by == "memory":
            return [costs.kept(i, i + 1) + costs.weights(i, i + 1) for i in range(len(costs))]
        raise ValueError(
            f"by is {by!r}; choose one of {', '.join(MEASURES)}, or give a function of a "
            "layer's LayerCosts"
        )
    if all(isinstance(each, nn.Module) for each in costs) and len(costs):
        modules: list[nn.Module] = list(costs)  # type: ignore[arg-type]
        if callable(by):
            return [float(by(module)) for module in modules]
        if by in (None, "parameters"):
            return [float(sum(p.numel() for p in module.parameters())) for module in modules]
        raise ValueError(
            f"by is {by!r}, which layers don't tell; measure them: "
            f"balance(profile(layers, inputs), by={by!r})"
        )
    if by is not None:
        raise ValueError(
            f"by is {by!r}, but the costs are numbers; leave it out, or give a Profile "
            "or the layers"
        )
    return [float(each) for each in costs]  # type: ignore[arg-type]


def _layer(fields: dict[str, Any]) -> LayerCosts:
    """LayerCosts from JSON, also of files that call a field by its old name."""
    given: dict[str, Any] = {
        _OLD_FIELDS.get(key, key): tuple(map(tuple, value)) if isinstance(value, list) else value
        for key, value in fields.items()
    }
    return LayerCosts(**given)


def _bytes(sizes: Iterable[Sizes]) -> int:
    return sum({number: size for several in sizes for number, size in several}.values())
