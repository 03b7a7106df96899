"""`python -m benchmarks.ops.machine_code.profile_kernels`: a few cases of the benches, each called
once within cudaProfilerStart and Stop.

For ncu --profile-from-start off, which then sees these launches alone. Compiled and warmed up
before.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.__main__ import module_of
from benchmarks.instruments.harness import Case

__all__ = ["CHOSEN", "chosen", "main"]

# bench, beginning of the name of the case
CHOSEN = (
    ("kernels", "adam fp32, 1 x"),
    ("layerwise", "LAMB fp32"),
    ("codec", "onebit encode with error feedback"),
    ("codec", "int8 encode with error feedback"),
    ("norm", "residual + layer norm bfloat16"),
    ("activation", "bias + GELU bfloat16"),
    ("cross_entropy", "cross entropy bfloat16"),
)


def chosen(device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Name and maker of each, the middle one where a bench has several sizes."""
    for bench, beginning in CHOSEN:
        found = [
            each
            for each in importlib.import_module(module_of(bench)).cases(device)
            if each[0].startswith(beginning)
        ]
        if not found:
            raise LookupError(f"bench {bench} has no case that begins with {beginning!r}")
        yield found[len(found) // 2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Call each; returns the exit status."""
    device = torch.device("cuda")
    for name, make in chosen(device):
        call = make().implementations["pyops"]
        call()
        torch.cuda.synchronize(device)
        print(f"== {name}", flush=True)
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize(device)
        torch.cuda.profiler.stop()
        del call
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
