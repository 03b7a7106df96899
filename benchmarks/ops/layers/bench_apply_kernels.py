"""Models of transformers with the kernels that `pyops.hf.apply_kernels` gives them, and without.

Steps are forward and backward with labels, of a small Llama, GPT-2 and BERT; parts are the modules
that are swapped one at a time, which is what its table WORTH_IT goes by. `peak_bytes`: what a
step of a Llama with a vocabulary of 32,000 takes at most, in a process of its own.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.__main__ import Options
from benchmarks.instruments.harness import Case, Row, run_cases
from pyops.hf import apply_kernels
from pyops.hf.kernels import LOSS, OPS

__all__ = ["cases", "run"]

ALL = tuple(kind for kind in OPS if kind != LOSS)
WIDTH, LAYERS, WORDS = 512, 8, 32_000
ROWS, LENGTH = 2, 256
PEAK_TIMES = 4  # as many tokens where memory is measured
ROOT = Path(__file__).resolve().parents[3]
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def language_model(name: str) -> Any:
    """A model of transformers of 8 layers of width 512, in training, without dropout."""
    import transformers

    torch.manual_seed(0)
    options = {
        "Llama": {**SIZES, "intermediate_size": 1376},
        "GPT2": {
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": 8,
            "vocab_size": WORDS,
            "loss_type": "ForCausalLM",
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        },
        "Bert": {
            **SIZES,
            "intermediate_size": 4 * WIDTH,
            **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        },
    }[name]
    head = {"Llama": "ForCausalLM", "GPT2": "LMHeadModel", "Bert": "ForMaskedLM"}[name]
    config = getattr(transformers, f"{name}Config")(**options)
    return getattr(transformers, name + head)(config).train()


def ids_of(rows: int) -> Tensor:
    """Words [rows, LENGTH]."""
    return torch.randint(1, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def step(model: Any, ids: Tensor) -> float:
    """Forward and backward; the loss."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach())


def step_case(name: str, model_name: str, dtype: torch.dtype, fused_loss: bool) -> Case:
    """A step with kernels beside one without."""
    plain = language_model(model_name).to(dtype)
    fused = copy.deepcopy(plain)
    report = apply_kernels(fused, fused_loss=fused_loss)
    ids = ids_of(ROWS)

    def check() -> float:
        error = abs(step(fused, ids) - step(plain, ids))
        if error > (0.05 if dtype == torch.bfloat16 else 1e-4):
            raise AssertionError(f"{name}: losses are {error} apart")
        return error

    done = [each for each in report.values() if not each.startswith("left: ")]
    facts: dict[str, Any] = {
        "swapped": {kind: done.count(kind) for kind in sorted(set(done))},
        "tokens": ids.numel(),
    }
    if model_name == "Llama":
        ways = {"pyops": fused_loss, "transformers": None}
        facts["peak_bytes"] = {way: peak(model_name, dtype, how) for way, how in ways.items()}
        facts["peak_tokens"] = PEAK_TIMES * ids.numel()
    return Case(
        "apply_kernels",
        name,
        {"pyops": partial(step, fused, ids), "transformers": partial(step, plain, ids)},
        check=check,
        targets={"transformers": 1.0},
        facts=facts,
    )


def peak(model_name: str, dtype: torch.dtype, fused_loss: bool | None) -> int:
    """`peak_of`, in a process of its own."""
    arguments = (model_name, str(dtype).removeprefix("torch."), fused_loss)
    code = (
        "from benchmarks.ops.layers.bench_apply_kernels import peak_of; "
        f"print(peak_of(*{arguments!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        raise AssertionError(f"measuring memory ended with\n{done.stderr[-2000:]}")
    return int(done.stdout.splitlines()[-1])


def peak_of(model_name: str, dtype: str, fused_loss: bool | None) -> int:
    """Bytes that a step takes at most beyond what is there before it, the gradients included.

    Args:
        model_name: As `language_model` takes it.
        dtype: Of the parameters.
        fused_loss: As `apply_kernels` takes it; None: without any kernels.
    """
    model = language_model(model_name).to(getattr(torch, dtype))
    if fused_loss is not None:
        apply_kernels(model, fused_loss=fused_loss)
    step(model, torch.ones(1, 2, dtype=torch.int64))  # libraries are loaded, threads started
    model.zero_grad()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _status("VmRSS")
    step(model, ids_of(ROWS * PEAK_TIMES))
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) << 10


def parts() -> dict[str, tuple[Callable[[], nn.Module], int]]:
    """Modules that one kind of swap is about, and the width of what they are given."""
    from transformers import LlamaConfig, Phi3Config
    from transformers.activations import ACT2FN
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
    from transformers.models.phi3.modeling_phi3 import Phi3MLP

    return {
        "LlamaRMSNorm": (lambda: LlamaRMSNorm(WIDTH), WIDTH),
        "LayerNorm": (lambda: nn.LayerNorm(WIDTH), WIDTH),
        "LlamaMLP": (lambda: LlamaMLP(LlamaConfig(**SIZES, intermediate_size=1376)), WIDTH),
        "Phi3MLP": (lambda: Phi3MLP(Phi3Config(**SIZES, intermediate_size=1376)), WIDTH),
        **{
            f"activation {name}": (partial(ACT2FN.__getitem__, name), 4 * WIDTH)
            for name in ("gelu", "gelu_new", "gelu_pytorch_tanh", "silu")
        },
    }


def part_case(name: str, make: Callable[[], nn.Module], width: int, dtype: torch.dtype) -> Case:
    """Forward and backward of one module with a kernel beside itself without."""
    torch.manual_seed(0)
    plain = make().to(dtype)
    fused = copy.deepcopy(plain)
    report = apply_kernels(fused, kinds=ALL)
    x, seed = (torch.randn(8, LENGTH, width).to(dtype) for _ in range(2))
    x.requires_grad_()

    def call(module: nn.Module) -> Tensor:
        y: Tensor = module(x)
        y.backward(seed[..., : y.shape[-1]])
        return y.detach()

    def check() -> float:
        error = float((call(fused) - call(plain)).abs().max())
        if not error < (0.1 if dtype == torch.bfloat16 else 1e-4):
            raise AssertionError(f"{name}: outputs are {error} apart")
        return error

    return Case(
        "apply_kernels",
        name,
        {"pyops": partial(call, fused), "transformers": partial(call, plain)},
        check=check,
        targets={"transformers": 1.0},
        facts={"kind": report[""]},
    )


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names of the cases and how to make each."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    for dtype_name, dtype in dtypes.items():
        for part, (make, width) in parts().items():
            name = f"{part} {dtype_name}, {8 * LENGTH} tokens, width {width}"
            yield name, partial(part_case, name, make, width, dtype)
    for dtype_name, dtype in dtypes.items():
        for model in ("Llama", "GPT2", "Bert"):
            name = f"{model} step {dtype_name}, {ROWS * LENGTH} tokens"
            yield name, partial(step_case, name, model, dtype, False)
            if model != "Bert":
                fused = f"{name}, fused loss"
                yield fused, partial(step_case, fused, model, dtype, True)


def run(options: Options) -> list[Row]:
    """All cases whose name contains `options.only`; on the CPU alone."""
    if options.device.type != "cpu":
        print("apply_kernels is measured on the CPU alone")
        return []
    return run_cases(
        [make for name, make in cases() if (options.only or "") in name], rounds=options.rounds
    )
