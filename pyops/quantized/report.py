"""What a conversion did to each layer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LayerReport", "Report"]


@dataclass(frozen=True)
class LayerReport:
    """One layer, before and after."""

    name: str
    """Of the layer within the model."""
    shape: tuple[int, ...]
    """Of its whole weight, [.., out, in]."""
    format: str
    """What its weight is made of."""
    bytes_before: int
    """Of the whole weight."""
    bytes_after: int
    """Of its codes, scales and zero points."""
    error: float
    """|W - decoded W| / |W|, each the root of the sum of squares over all ranks."""


@dataclass(frozen=True)
class Report:
    """What `pyops.quantized.convert` did; print it for a table."""

    layers: tuple[LayerReport, ...]
    """The layers that were converted."""
    left: tuple[str, ...]
    """Linear layers that stayed as they were."""

    @property
    def bytes_before(self) -> int:
        """Of the weights of the converted layers."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Of their codes, scales and zero points."""
        return sum(layer.bytes_after for layer in self.layers)

    def __str__(self) -> str:
        wide = max([len(layer.name) for layer in self.layers], default=5)
        lines = [f"{'layer':<{wide}}  {'weight':>16}  {'bytes before':>13}  {'after':>12}  error"]
        for layer in self.layers:
            shape = " x ".join(map(str, layer.shape))
            lines.append(
                f"{layer.name:<{wide}}  {shape:>16}  {layer.bytes_before:>13,}  "
                f"{layer.bytes_after:>12,}  {layer.error:.2e}"
            )
        lines.append(
            f"{'together':<{wide}}  {'':>16}  {self.bytes_before:>13,}  {self.bytes_after:>12,}"
        )
        if self.left:
            lines.append("as they were: " + ", ".join(self.left))
        return "\n".join(lines)
