"""CUDA kernels in Triton, for the ops that go by rows; `library.define(triton=...)` finds them by
stem and name.

    pyops/ops/<stem>.py          schema, fake, autograd, reference;
                                 define(..., triton="<stem>")
    pyops/ops/triton/<stem>.py   a function of each op's name and arguments: checks as the reference
                                 does, allocates, launches

The modules import triton, so they are imported at an op's first call on a CUDA tensor and not
before. Rules that let one source run compiled for a GPU, compiled ahead of time without one, and
under Triton's interpreter on the CPU:

* load, widen to fp32 (float64 for float64), compute, and round once at the store;
* no libdevice, no inline assembly, no autotuning; tile sizes are constexpr, chosen by the launcher
from shapes;
* sums over rows in two launches, partial sums in a fixed order: deterministic;
* nothing waits for the device.
"""
