"""Private names of torch stand in pyops/torch_private.py, and do there what they are used for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyops import torch_private

pytestmark = pytest.mark.cpu_only

PACKAGE = Path(__file__).resolve().parents[1] / "pyops"

# Private names that may be used anywhere, each with its reason.
ALLOWED = {
    r"torch\._foreach_\w+": "what torch.optim and clip_grad_norm_ are made of, stable for years",
    r"torch\.utils\._pytree(\.\w+)?": "what torch.export and DTensor document for nested values",
    r"torch\.ops\.aten\._unsafe_view": "an op, as functions of autograd trace it",
    r"torch\.nn\.modules\.batchnorm\._(BatchNorm|NormBase)": "base classes, for isinstance alone",
}
# Attributes of tensors, modules and groups, by whatever name these are called.
ATTRIBUTES = {
    "_backward_hooks",
    "_backward_pre_hooks",
    "_cdata",
    "_execution_engine",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_get_backend",
    "_local_tensor",
    "_post_accumulate_grad_hooks",
}


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return f"{before}.{node.attr}"
    return None


def private_names(source: str) -> Iterator[str]:
    """The private names of torch that a module uses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                if re.search(r"\._[a-zA-Z]", name := f"{node.module}.{alias.name}"):
                    yield name
        elif isinstance(node, ast.Attribute):
            if not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            name = _dotted(node) or node.attr
            if name.split(".")[0] in ("torch", "dist") or node.attr in ATTRIBUTES:
                yield name


def test_no_other_file_uses_a_private_name_of_torch():
    found = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "torch_private.py"
        for name in private_names(path.read_text())
        if not any(re.fullmatch(pattern, name) for pattern in ALLOWED)
    ]
    assert found == [], "give each a function in pyops/torch_private.py"


def test_private_names_are_found():
    source = (
        "import torch\ntorch._C.x()\nt._cdata\nfrom torch.a import _b\ntorch.x.__name__\nself._y"
    )
    assert sorted(private_names(source)) == ["t._cdata", "torch._C", "torch.a._b"]


def test_the_engine_is_asked_within_backward_only():
    seen: list[object] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, dy):
            seen.append((torch_private.in_backward(), torch_private.in_autograd_node()))
            torch_private.after_backward(lambda: seen.append("over"))
            return 2 * dy

    x = torch.ones(2, requires_grad=True)
    assert torch_private.graph_task_id() == -1
    assert not torch_private.in_backward()
    assert not torch_private.in_autograd_node()
    Doubled.apply(x).sum().backward()
    assert seen == [(True, True), "over"]


def test_hooks_are_seen():
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: None)
    x.register_post_accumulate_grad_hook(lambda _: None)
    assert len(torch_private.tensor_hooks(x) or {}) == 1
    assert len(torch_private.post_accumulate_grad_hooks(x) or {}) == 1
    layer = nn.Linear(1, 1)
    assert not torch_private.has_hooks(layer)
    layer.register_full_backward_pre_hook(lambda *_: None)
    assert torch_private.has_hooks(layer)


def test_forward_pre_hooks_are_those_that_were_registered():
    layer = nn.Linear(1, 1)
    layer.register_forward_pre_hook(print)
    assert torch_private.forward_pre_hooks(layer) == [print]


def test_what_else_a_call_of_a_module_does_is_seen():
    assert not torch_private.has_global_hooks()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert torch_private.has_global_hooks()
    finally:
        handle.remove()
    layers = [nn.Linear(1, 1) for _ in range(4)]
    assert all(map(torch_private.is_called_plainly, layers))
    layers[0].register_forward_hook(lambda *_: None)
    layers[1].forward = lambda x: x  # type: ignore[method-assign]
    torch_private.call_instead(layers[2], lambda x: x)
    assert list(map(torch_private.is_called_plainly, layers)) == [False, False, False, True]


def test_a_function_calls_others_in_the_place_of_those_of_its_file():
    attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    x, called = torch.ones(1, 3, 4), []

    def drops(weights: torch.Tensor, p: float) -> torch.Tensor:
        called.append(p)
        return weights

    arguments = (
        *(x.transpose(0, 1),) * 3,
        4,
        2,
        attention.in_proj_weight,
        attention.in_proj_bias,
        None,
        None,
        False,
        0.5,
        attention.out_proj.weight,
        attention.out_proj.bias,
    )
    function = nn.functional.multi_head_attention_forward
    found, _ = torch_private.with_functions(function, dropout=drops)(*arguments)
    assert called == [0.5]
    torch.testing.assert_close(found.transpose(0, 1), attention.eval()(x, x, x)[0])
    with pytest.raises(AttributeError, match="calls no drops_out"):
        torch_private.with_functions(function, drops_out=drops)


def test_storages():
    x, y = torch.ones(4), torch.ones(4)
    before = torch_private.storage_use_count(x)
    view = x[:2]
    assert torch_private.storage_use_count(x) == before + 1
    assert torch_private.storage_address(view) == torch_private.storage_address(x)
    assert torch_private.storage_address(y) != torch_private.storage_address(x)


def test_a_changed_tensor_may_count_as_unchanged():
    x = torch.ones(2)
    version = x._version
    with torch_private.preserve_version_counter([x]):
        x.add_(1)
    assert x._version == version


def test_subclasses_are_left_alone():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("called")

    loud = torch.ones(2).as_subclass(Loud)
    with torch_private.without_torch_function():
        assert loud.numel() == 2
    assert torch_private.parse_to("meta", torch.float16)[:2] == (torch.device("meta"), torch.half)


def test_ops():
    assert torch_private.has_dispatch_kernel("aten::add.Tensor", "CPU")
    assert "aten::add.Tensor" in torch_private.all_op_names()
    assert torch_private.disable_dynamo(lambda: 3)() == 3
    gradients, found = [torch.tensor([2.0, float("inf")])], torch.zeros(1)
    torch_private.unscale_and_check_finite(gradients, found, torch.tensor([0.5]))
    assert (gradients[0][0].item(), found.item()) == (1.0, 1.0)
    with pytest.raises(RuntimeError, match="beyond"):
        torch_private.assert_async(torch.tensor(False), "beyond")


def _group(rank: int, group: dist.ProcessGroup) -> tuple[str, bool, int]:
    cpu = torch.device("cpu")
    timeout = torch_private.group_timeout(group, cpu)
    torch_private.group_store(group).set(f"private/{rank}", "here")
    assert torch_private.default_store() is not None
    dist.barrier(group)
    others = torch_private.group_store(group).get(f"private/{1 - rank}")
    return torch_private.backend_name(group, cpu), timeout is not None, len(others)


def test_groups(world):
    assert world(2).run(_group) == [("gloo", True, 4)] * 2
