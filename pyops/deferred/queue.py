"""Weight gradients: at once, in fp32 beside the weight, or put off until a pipeline has nothing
better to do.

    I  with queue.collecting():           dy --> dx = dy W --> ...          dy, x --> queue
           torch.autograd.backward(loss)
    W  queue.take().accumulate()          dW = dy^T x, db = sum of dy --> .grad or main_grad, hooks

A layer asks `weight_gradient` for the gradients of its weight and bias; whether a parameter carries
a queue (`deferred`) or an fp32 sum (`main_grad`) is no business of the layer's. Linear layers do:
those of pyops.tensor_parallel, and torch.nn.Linear after `linears(module)`. A norm's weight
gradient comes with that of its input for nothing, and a convolution's, an embedding's or any other
module's is autograd's: they are not put off.

I then W has the bits of one backward pass. (The split: Qi et al., "Zero Bubble Pipeline
Parallelism", 2024, section 2.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.torch_private import post_accumulate_grad_hooks, tensor_hooks

__all__ = [
    "Deferred",
    "Pieces",
    "accumulate_weight_gradient",
    "is_marked",
    "linear",
    "linears",
    "remove",
    "weight_gradient",
]

BLOCK_BYTES = 8 << 20  # of widened operands


class Deferred:
    """A queue of weight gradients, carried by these parameters as their attribute `deferred`.

    Nothing is put off but within `collecting()`. Where several queues have a parameter in common,
    that of the latest one to collect takes it.

    Raises:
        ValueError: For a tensor that is no leaf of autograd's graph: it has no gradient to put off.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        for p in self._parameters:
            if not p.is_leaf:
                raise ValueError(
                    f"a tensor {tuple(p.shape)} was computed from others; give a model's "
                    "own parameters"
                )
        self._passes: list[_Pass] = []
        self._now: _Pass | None = None
        self._mark()

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """The weight gradients of a backward pass within this are put off; if it raises, what it
        put off is dropped.

        Gradients and hooks of a parameter stay as they are until `accumulate`. One that another
        module uses as well (a tied embedding) gets its whole gradient within this instead, when the
        other's share of it is there.
        """
        if self._now is not None:
            raise RuntimeError(
                "this queue is collecting already; end that backward pass before the next one"
            )
        self._mark()
        now: _Pass = {}
        self._now = now
        try:
            yield
            self._passes.append(now)
        finally:
            self._now = None
            for waiting in now.values():
                waiting.show_hooks()

    def take(self) -> Pieces:
        """What was put off since the last take."""
        taken, self._passes = self._passes, []
        return Pieces(taken)

    def put(self, parameter: Tensor, dy: Tensor, x: Tensor | None) -> bool:
        """Put off dy^T x, or the sum of dy, if this queue is collecting; whether it is.

        Args:
            parameter: A weight [out, in], or a bias [out].
            dy: The gradient of the output, [rows, out].
            x: The input, [rows, in]; None for a bias.

        Returns:
            Whether this queue is collecting, and so has put it off.
        """
        if self._now is None:
            return False
        if id(parameter) not in self._now:
            self._now[id(parameter)] = _Waiting(parameter)
        self._now[id(parameter)].keep(dy, x)
        return True

    def release(self) -> None:
        """Take the mark off the parameters, and drop what was put off."""
        self._passes = []
        for p in self._parameters:
            if getattr(p, "deferred", None) is self:
                del p.deferred  # type: ignore[attr-defined]

    def _mark(self) -> None:
        for p in self._parameters:
            p.deferred = self  # type: ignore[attr-defined]


class Pieces:
    """Weight gradients that were put off."""

    def __init__(self, passes: list[_Pass]) -> None:
        self._passes = passes

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors kept; one kept for several gradients counts once."""
        kept = {
            t.data_ptr(): t.nbytes
            for each in self._passes
            for waiting in each.values()
            for t in waiting.tensors()
        }
        return sum(kept.values())

    def accumulate(self) -> None:
        """Compute them and add them to .grad as a backward pass would, hooks and all, or to
        main_grad.

        What is kept for a parameter is let go as soon as its gradient is there; afterwards there is
        nothing left to add. The gradients of several backward passes are added one after the other.
        On CUDA: computed on the current stream, which must be behind the one of backward.

        It is one backward pass for each that was put off. DataParallel and ZeroOptimizer reduce
        gradients when a backward pass ends: run those within collecting() under their no_sync(),
        and this one, for the last of them, without.

        Raises:
            RuntimeError: Where a tensor kept was changed in place meanwhile.
        """
        while self._passes:
            waiting = [w for w in self._passes.pop(0).values() if w.operands]
            # one backward for all, as those who reduce gradients expect; begins with the last made
            with torch.enable_grad():
                kept = [_Kept.apply(w.parameter, w) for w in reversed(waiting)]  # type: ignore[no-untyped-call]
            if kept:
                torch.autograd.backward(kept)


class _Waiting:
    """What one backward pass put off for one parameter, whose hooks are hidden from autograd until
    the pass is over.

    Autograd calls the hooks of a parameter for a gradient of None, too.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.operands: list[tuple[Tensor, int, Tensor | None, int]] = []
        self.gradient_hooks = _emptied(tensor_hooks(parameter))
        self.accumulate_hooks = _emptied(post_accumulate_grad_hooks(parameter))
        self.arrival = parameter.register_hook(self._arrived) if parameter.requires_grad else None

    def keep(self, dy: Tensor, x: Tensor | None) -> None:
        # Detached: what computed them need not live on.
        x = None if x is None else x.detach()
        self.operands.append((dy.detach(), dy._version, x, 0 if x is None else x._version))

    def tensors(self) -> list[Tensor]:
        return [t for dy, _, x, _ in self.operands for t in (dy, x) if t is not None]

    def show_hooks(self) -> None:
        if self.arrival is not None:
            self.arrival.remove()
            self.arrival = None
        _refilled(tensor_hooks(self.parameter), self.gradient_hooks)
        _refilled(post_accumulate_grad_hooks(self.parameter), self.accumulate_hooks)

    def _arrived(self, gradient: Tensor | None) -> Tensor | None:
        """Another module's share, which autograd is about to add to .grad: ours goes with it, and
        the hooks run."""
        if gradient is None:
            return None
        found = self.computed()
        if found is not None:
            gradient = found + gradient
        for hook in list(self.gradient_hooks.values()):
            replaced = hook(gradient)
            gradient = gradient if replaced is None else replaced
        _refilled(post_accumulate_grad_hooks(self.parameter), self.accumulate_hooks)
        return gradient

    @torch.no_grad()
    def computed(self) -> Tensor | None:
        """The sum in the order in which they came; None where there is nothing, or main_grad has
        it."""
        total = None
        while self.operands:
            dy, dy_version, x, x_version = self.operands.pop(0)
            if dy._version != dy_version or (x is not None and x._version != x_version):
                raise RuntimeError(
                    f"the gradient of a parameter {tuple(self.parameter.shape)} was put "
                    "off, and a tensor that it needs has "
                    "been changed in place since; accumulate() before a buffer of "
                    "activations or gradients is filled again"
                )
            found = _gradient(self.parameter, dy, x)
            total = found if total is None or found is None else total.add_(found)
        return total


class _Kept(torch.autograd.Function):
    """A number whose backward is the gradient that was put off: computed there, it becomes .grad
    without a copy."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, waiting: _Waiting) -> Tensor:
        ctx.waiting = waiting
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return ctx.waiting.computed(), None


_Pass = dict[int, _Waiting]


def _emptied(hooks: dict[int, Callable[..., Any]] | None) -> dict[int, Callable[..., Any]]:
    held = dict(hooks or {})
    if hooks:
        hooks.clear()
    return held


def _refilled(
    hooks: dict[int, Callable[..., Any]] | None, held: dict[int, Callable[..., Any]]
) -> None:
    if hooks is not None:
        hooks.update(held)
    held.clear()


def is_marked(parameter: Tensor | None) -> bool:
    """Whether its gradient may go elsewhere than to .grad at once: autograd's own product doesn't
    know."""
    return hasattr(parameter, "deferred") or hasattr(parameter, "main_grad")


def weight_gradient(parameter: Tensor, dy: Tensor, x: Tensor | None) -> Tensor | None:
    """The gradient of a linear layer's weight, dy^T x, or of its bias, the sum of dy (x None),
    shaped as the parameter.

    None where it was put off, or added to the weight's `main_grad`, [..., in] of fp32 or float64 (a
    bias has none).
    dy [rows, out], x [rows, in], of one dtype; parameter [.., in] or [..] with out elements in its
    leading dims.

    Args:
        parameter: A weight [.., in], or a bias [..], with out elements in its leading dims.
        dy: The gradient of the output, [rows, out].
        x: The input, [rows, in], of the dtype of dy; None for a bias.
    """
    queue = getattr(parameter, "deferred", None)
    if queue is not None and queue.put(parameter, dy, x):
        return None
    return _gradient(parameter, dy, x)


def _gradient(parameter: Tensor, dy: Tensor, x: Tensor | None) -> Tensor | None:
    if x is None:
        return dy.sum(0).view(parameter.shape).to(parameter.dtype)
    main = getattr(parameter, "main_grad", None)
    if main is None:
        return (dy.t() @ x).view(parameter.shape).to(parameter.dtype)
    accumulate_weight_gradient(main.view(-1, main.shape[-1]), dy, x)
    return None


def accumulate_weight_gradient(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """main_grad += dy^T x, in place, in the dtype of main_grad: no 16-bit sum over micro-batches or
    chunks.

    main_grad [out, in], float32 or float64; dy [rows, out] and x [rows, in] of one dtype, no wider.

    Moves 8 bytes per weight, where a product in 16 bits and an addition move 12, and rounds once
    less. On CUDA it is one product of cuBLAS that takes 16-bit operands and accumulates in fp32; on
    the CPU, whose libraries have none, a block of operands at a time is widened to fp32.

    Args:
        main_grad: [out, in], float32 or float64.
        dy: The gradient of the output, [rows, out].
        x: The input, [rows, in], of the dtype of dy, no wider than main_grad.

    Raises:
        ValueError: Otherwise.
    """
    if main_grad.shape != (dy.shape[1], x.shape[1]) or len(dy) != len(x):
        raise ValueError(
            f"main_grad {tuple(main_grad.shape)} must be [out, in] for dy [rows, out] "
            "and x [rows, in]; got dy "
            f"{tuple(dy.shape)} and x {tuple(x.shape)}"
        )
    if main_grad.dtype not in (torch.float32, torch.float64) or dy.dtype != x.dtype:
        raise ValueError(
            "main_grad must be float32 or float64, dy and x of one dtype; got "
            f"{main_grad.dtype}, {dy.dtype} and {x.dtype}"
        )
    if dy.dtype == main_grad.dtype:
        main_grad.addmm_(dy.t(), x)
    elif main_grad.dtype == torch.float64 or not main_grad.is_cuda:
        wide = x.to(main_grad.dtype)
        each = max(1, BLOCK_BYTES // (max(1, len(dy)) * main_grad.element_size()))
        for start in range(0, dy.shape[1], each):
            block = dy[:, start : start + each].to(main_grad.dtype)
            main_grad[start : start + each].addmm_(block.t(), wide)
    else:
        torch.ops.aten.addmm.dtype_out(main_grad, dy.t(), x, torch.float32, out=main_grad)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's linear, x W^T + b, whose weight and bias may carry a queue; the weight an fp32
    `main_grad`, too.

    x [..., in], weight [out, in], bias [out]. Under autocast in its dtype. A compiled region puts
    nothing off.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out], or None.
    """
    if not is_marked(weight) or torch.compiler.is_compiling():
        return functional.linear(x, weight, bias)
    device = x.device.type
    autocast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if autocast else None
    y: Tensor = _Linear.apply(x, weight, bias, dtype)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.parameters, ctx.dtype = (
            (weight, bias),
            dtype,
        )  # those that carry the marks; what is unpacked may be aliases
        x = x if dtype is None else x.to(dtype)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        w, b = (t if t is None or dtype is None else t.to(dtype) for t in (weight, bias))
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x, w, b)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, saved = ctx.saved_tensors
        weight, bias = ctx.parameters
        need_x, need_w, need_b, _ = ctx.needs_input_grad
        dx = dy @ (saved if ctx.dtype is None else saved.to(ctx.dtype)) if need_x else None
        rows = dy.reshape(-1, dy.shape[-1])
        dw = weight_gradient(weight, rows, x.reshape(-1, x.shape[-1])) if need_w else None
        return dx, dw, weight_gradient(bias, rows, None) if need_b else None, None


class _Forward:
    """Stands in for the forward of a torch.nn.Linear."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    def __call__(self, input: Tensor) -> Tensor:
        return linear(input, self.module.weight, self.module.bias)


def linears(module: nn.Module) -> list[str]:
    """Let every torch.nn.Linear in `module` ask `weight_gradient`; returns their names.

    Their `forward` is replaced on the instance: names, parameters, state_dict and hooks stay.
    Subclasses, and layers whose forward somebody else has replaced, are left as they are.
    """
    names = []
    for name, layer in module.named_modules():
        if type(layer) is nn.Linear and "forward" not in layer.__dict__:
            layer.forward = _Forward(layer)  # type: ignore[method-assign]
            names.append(name)
    return names


def remove(module: nn.Module) -> list[str]:
    """Undo `linears`; returns the layers' names."""
    found = [
        (name, layer)
        for name, layer in module.named_modules()
        if isinstance(layer.__dict__.get("forward"), _Forward)
    ]
    for _, layer in found:
        del layer.forward
    return [name for name, _ in found]
