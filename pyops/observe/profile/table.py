"""A profile in words and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyops.observe.profile.measuring import StepProfile
from pyops.observe.profile.operations import CONVENTION, utilization
from pyops.observe.profile.parts import OUTSIDE, by_phase

__all__ = ["Peak", "module_table", "profile_text", "rank_table"]


@dataclass(frozen=True)
class Peak:
    """What a device could do."""

    operations: float
    """In a second."""
    source: str
    """Where that is from, in words."""


def module_table(profile: StepProfile, *, depth: int = 2) -> list[str]:
    """Lines of a table: each module down to a depth, with what is within it, and what is in none.

    Args:
        profile: Of a rank.
        depth: Dots in a name and one more; 0: the whole model alone.
    """
    names = [name for name in profile.parameters if name.count(".") < depth and (name or not depth)]
    if depth:
        names.insert(0, "")
    lines = [f"{'module':<28}{'parameters':>13}{'forward ms':>12}{'backward ms':>12}{'GFLOP':>10}"]
    whole = {part for part in profile.totals if part.phase}
    for name in names:
        parameters = sum(n for module, n in profile.parameters.items() if _is_within(module, name))
        times = {
            phase: sum(
                seconds
                for part, seconds in profile.totals.items()
                if part.phase == phase and part.name != OUTSIDE and _is_within(part.name, name)
            )
            for phase in ("forward", "backward")
        }
        operations = sum(
            number
            for part, number in profile.operations.items()
            if part.phase and part.name != OUTSIDE and _is_within(part.name, name)
        )
        if not any(times.values()) and not parameters:
            continue
        lines.append(
            f"{name or 'the model':<28}{parameters:>13,}{1e3 * times['forward']:>12.3f}"
            f"{1e3 * times['backward']:>12.3f}{operations / 1e9:>10.4g}"
        )
    for part in sorted(set(profile.totals) - {p for p in whole if p.name != OUTSIDE}, key=str):
        column = 24 if part.phase == "backward" else 12
        label = part.name + (f", {part.phase}" if part.phase else "")
        lines.append(f"{label:<28}{'':>13}{1e3 * profile.totals[part]:>{column}.3f}")
    return lines


def _is_within(module: str, name: str) -> bool:
    """Whether a module is the one of this name, or within it."""
    return not name or module == name or module.startswith(f"{name}.")


def rank_table(profiles: Sequence[StepProfile]) -> list[str]:
    """Lines of a table: each rank's step in five parts that sum up to it.

    Args:
        profiles: By rank.
    """
    kinds = ("forward", "backward", "optimizer", "waiting", "other")
    lines = [f"{'rank':>4}{'step ms':>10}{''.join(f'{kind:>11}' for kind in kinds)}"]
    for rank, profile in enumerate(profiles):
        parts: Mapping[str, float] = by_phase(profile.totals)
        columns = "".join(f"{1e3 * parts[kind]:>11.3f}" for kind in kinds)
        lines.append(f"{rank:>4}{1e3 * profile.profiled_seconds:>10.3f}{columns}")
    return lines


def profile_text(profiles: Sequence[StepProfile], *, peaks: Sequence[Peak], depth: int = 2) -> str:
    """The profile of a run, in lines for a person.

    Args:
        profiles: By rank.
        peaks: Of the device of rank 0.
        depth: See `module_table`.
    """
    first = profiles[0]
    operations = sum(profile.total_operations for profile in profiles)
    seconds = max(profile.seconds for profile in profiles)
    shares = [
        f"MFU {utilization(operations / len(profiles), seconds=seconds, peak=peak.operations):.1%}"
        f" of {peak.operations / 1e12:.4g} TFLOP/s ({peak.source})"
        for peak in peaks
    ]
    difference = first.profiled_seconds / first.seconds - 1
    again = sum(profile.again for profile in profiles)
    return "\n".join(
        [
            f"step {1e3 * seconds:.3f} ms without a profile, {1e3 * first.profiled_seconds:.3f} ms "
            f"in parts on rank 0 ({difference:+.1%})",
            f"{operations / 1e9:.4g} GFLOP a step, {operations / seconds / 1e12:.4g} TFLOP/s"
            + (f"; {again / 1e9:.4g} GFLOP more computed again" if again else ""),
            *shares,
            f"(MFU: {CONVENTION})",
            f"memory of rank 0: {first.peak_bytes / 2**20:.2f} MiB beyond what was there, at most, "
            f"in {first.peak_part or 'no part'}",
            "",
            *rank_table(profiles),
            "",
            *module_table(first, depth=depth),
        ]
    )
