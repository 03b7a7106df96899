"""Every op of the library: it has a sample, passes opcheck, and a kernel that agrees with its
reference on the sample."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import pyops.ops
from pyops.ops import library
from tests.grids import full
from tests.ops.samples import OPCHECKS, SAMPLES, UNTRACEABLE

STEMS = (
    "table",
    "optim",
    "sgd",
    "lion",
    "adagrad",
    "frozen_adam",
    "lamb",
    "lars",
    "adafactor",
    "grad_norm",
    "reduce",
    "symmetric",
    "symmetric_step",
    "random",
    "onebit",
    "quantize",
    "activation",
    "dropout",
    "fake_quantize",
    "rotary",
    "norm",
    "depthwise",
    "batch_norm",
    "scaled",
    "code_rows",
    "few_rows",
    "token_attention",
    "token_blocks",
    "cross_entropy",
    "attention",
    "nm_mask",
    "csr_product",
    "stripe_search",
    "radix_count",
)


def of_stems(*stems: str) -> set[str]:
    return {
        op
        for stem in stems
        for op in SAMPLES
        if hasattr(getattr(pyops.ops, stem), f"{op.removesuffix('_')}_reference")
    }


# Kernels for CUDA in Triton: there wherever triton is.
OF_CODES = of_stems("scaled", "code_rows") - {"decode_rows"}
IN_TRITON = OF_CODES | of_stems(
    "activation",
    "dropout",
    "fake_quantize",
    "rotary",
    "norm",
    "cross_entropy",
    "attention",
    "nm_mask",
)
# Those that torch's own kernels, or the CPU's, answer for on CUDA.
BY_TORCH = {"decode_rows"} | of_stems(
    "depthwise",
    "batch_norm",
    "few_rows",
    "token_attention",
    "token_blocks",
    "csr_product",
    "radix_count",
    "stripe_search",
)
DIFFERENTIABLE = {  # with a derivative
    op
    for op in (IN_TRITON | of_stems("depthwise")) - OF_CODES - of_stems("nm_mask")
    if not op.endswith(("_backward", "_"))
}


def ops() -> list[str]:
    """Names of all ops of the library, asked of the dispatcher."""
    importlib.import_module("pyops.ops")
    return sorted(
        {
            n.removeprefix("pyops::").split(".")[0]
            for n in torch._C._dispatch_get_all_op_names()
            if n.startswith("pyops::")
        }
    )


def reference_of(op: str):
    name = f"{op.removesuffix('_')}_reference"
    modules = [getattr(pyops.ops, stem) for stem in STEMS]
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def test_every_op_has_a_sample():
    assert len(ops()) >= 11
    assert set(ops()) == set(SAMPLES), "write a sample in tests/ops/samples.py"


# torch's checks of an op. The last traces it forward and backward, which takes most of their time:
# the suite has it for ops with a derivative.
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
ALL_CHECKS = [(op, len(CHECKS)) for op in sorted(SAMPLES)]


@pytest.mark.parametrize(
    ("op", "count"),
    [
        *((op, count if op in DIFFERENTIABLE else count - 1) for op, count in ALL_CHECKS),
        *(full(op, count) for op, count in ALL_CHECKS if op not in DIFFERENTIABLE),
    ],
)
def test_opcheck(op: str, count: int, device: torch.device):
    args, kwargs = SAMPLES[op](device)
    packet = getattr(torch.ops.pyops, op).default
    if op in DIFFERENTIABLE:
        args = tuple(
            a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
            for a in args
        )
    checks = tuple(each for each in OPCHECKS.get(op, CHECKS) if each in CHECKS[:count])
    if op == "symmetric_sum_" and device.type != "cpu":
        checks = ("test_autograd_registration",)  # the others copy pinned memory to where it is not
    torch.library.opcheck(packet, args, kwargs, test_utils=checks)


@pytest.mark.parametrize("op", sorted(set(SAMPLES) - {"optimizer_table"}))
def test_kernel_agrees_with_reference_on_the_sample(op: str, device: torch.device, isa: str):
    """Pairwise different scalars: a swapped pair in a signature shows here."""
    if op in UNTRACEABLE and device.type != "cpu":
        pytest.skip("the reference reads a table on the CPU only")
    results = []
    for call in (getattr(torch.ops.pyops, op).default, reference_of(op)):
        torch.manual_seed(5)
        args, kwargs = SAMPLES[op](device)
        out = call(*args, **kwargs)
        lists = args[0].keep_alive if op in UNTRACEABLE else [a for a in args if a is not None]
        results.append(
            [
                t
                for a in ([out] if out is not None else []) + list(lists)
                for t in (a if isinstance(a, list) else [a])
                if isinstance(t, torch.Tensor)
            ]
        )
    if op == "symmetric_sum_" and device.type != "cpu":
        # Its pads, of int64, are how ranks of a GPU meet.
        results = [[t for t in kept if t.dtype != torch.int64] for kept in results]
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=2**-7 if actual.dtype == torch.bfloat16 else 1e-3, atol=1e-6
        )


# Of the samples: 2 B H T S K for each of attention's products.
PRODUCT = 2 * 2 * 4 * 6 * 9 * 8
CONVOLUTION = 2 * 9 * 2 * 3 * 4 * 18  # N H W C of its result, and nine taps
COUNTED = {
    "attention_forward": 2 * PRODUCT,
    "attention_backward": 5 * PRODUCT,
    "depthwise_conv2d": CONVOLUTION,
    "depthwise_conv2d_backward": 2 * CONVOLUTION,
    "code_rows_product": 2 * 3 * 24 * 5,
    "few_rows_linear": 2 * 2 * 3 * 21 * 5,  # rows, width, outputs
    "csr_product": 2 * 3 * 5,  # three values, five columns
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("op", sorted(SAMPLES))
def test_counted_flops(op: str):
    args, kwargs = SAMPLES[op](torch.device("cpu"))
    call = getattr(torch.ops.pyops, op)
    assert call in flop_registry
    with FlopCounterMode(display=False) as counter:
        call.default(*args, **kwargs)
    assert counter.get_flop_counts()["Global"] == {call: COUNTED.get(op, 0)}


def test_table_agrees_with_reference_but_for_pointers(device: torch.device):
    args, kwargs = SAMPLES["optimizer_table"](device)
    table = torch.ops.pyops.optimizer_table.default(*args, **kwargs)
    assert table.device.type == device.type
    assert torch.equal(table.cpu(), reference_of("optimizer_table")(*args, **kwargs).cpu())


@pytest.mark.parametrize("op", UNTRACEABLE)
def test_what_hides_behind_pointers_refuses_to_be_traced(op: str, device: torch.device):
    args, kwargs = SAMPLES[op](device)
    with pytest.raises(Exception, match=r"can't be traced; call pyops\.ops"):
        torch.compile(
            lambda *a: getattr(torch.ops.pyops, op)(*a, **kwargs), backend="eager", fullgraph=True
        )(*args)


@pytest.mark.real_device
def test_has_kernel(device: torch.device):
    built = library.build_info()["extension"]
    assert all(pyops.has_kernel(op, "cpu") == built for op in ops())
    assert {"bias_activation", "rotary"} <= IN_TRITON
    for op in ops():
        expected = library.has_triton() if op in IN_TRITON else library.build_info()["cuda"]
        expected = expected or op in BY_TORCH
        assert pyops.has_kernel(op, "cuda") == (built and expected), op
    assert not pyops.has_kernel("adam_", "xpu")
    if built:
        with pytest.raises(ValueError, match="no op 'adamm_'"):
            pyops.has_kernel("adamm_", "cpu")


def test_a_missing_kernel_names_the_build_option():
    refuse = library._missing_kernel("adam_")
    with pytest.raises(
        RuntimeError, match=r"pyops::adam_ has no kernel for cpu tensors.*PYOPS_NO_EXT=1"
    ):
        refuse([torch.zeros(1)])


@pytest.mark.cpu_only
def test_use_isa_refuses_an_unknown_name():
    with pytest.raises(ValueError, match="'sse9' is not among"), library.use_isa("sse9"):
        pass
    assert library.isa() in [*library.isas(), "none"]


@pytest.mark.cpu_only
def test_memory_that_torch_does_not_have_is_said_by_name():
    """A result, or a copy of an operand, of 2^50 bytes."""
    row = torch.ones(1, 8)
    with pytest.raises(RuntimeError, match=r"pyops::few_rows_linear.*memory"):
        torch.ops.pyops.few_rows_linear.default(row, row.expand(1 << 45, 8), None)
