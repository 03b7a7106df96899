"""What README.md and docs/*.md call by name is there: imports, attributes, options, configuration
keys, flags and files.

Checked is what can be known for a name of pyops or of the repository: text in backticks, and all
Python blocks, whole programs or not. Names of other libraries are looked up in torch, or stand in
ELSEWHERE.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib
import inspect
import re
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import transformers

import pyops
from pyops.config import Config
from tests.project.documents import blocks, pages
from tests.workers import ROOT

pytestmark = pytest.mark.cpu_only

ELSEWHERE = {
    # other libraries, in docs/migrate.md
    "DeepSpeedPlugin",
    "FullyShardedDataParallelPlugin",
    "OneBitLamb",
    "ParallelismConfig",
    "PipelineModule",
    "tp_plan",
    "powerSGD_hook",
    "ZeroRedundancyOptimizer",
    "bucket_cap_mb=25",
    "get_model_state_dict",
    "add_adapter",
    "reshard_after_forward=False",
    # transformers, accelerate
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "BertForPreTraining",
    "BertForMaskedLM",
    "RoFormerForMaskedLM",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
    "LayerNorm.gamma",
    "Trainer",
    "Accelerator",
    "TrainingArguments",
    "snapshot_download",
    # options of torch's, attributes that a caller sets or that another library's model has
    "inplace=True",
    "is_decoder=True",
    "use_reentrant=False",
    "optimizer.reduce_norms",
    "model._init_weights",
}
FOREIGN_FLAGS = {
    # torchrun
    "--max-restarts",
    "--rdzv-id",
    "--rdzv-endpoint",
    "--rdzv-conf",
    "--nproc-per-node",
    "--standalone",
    "--no-build-isolation",
    "--index-url",  # pip
    # Megatron-LM
    "--bf16",
    "--clip-grad",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--fp16",
    "--global-batch-size",
    "--load",
    "--micro-batch-size",
    "--num-layers-per-virtual-pipeline-stage",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--pipeline-model-parallel-size",
    "--recompute-granularity",
    "--sequence-parallel",
    "--tensor-model-parallel-size",
    "--use-distributed-optimizer",
}
TORCH = (
    torch,
    torch.nn,
    torch.optim,
    torch.optim.lr_scheduler,
    torch.distributed,
    torch.distributed.fsdp,
    torch.distributed.tensor,
    torch.distributed.tensor.parallel,
    torch.nn.parallel,
    torch.amp,
    torch.Tensor,
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.distributed.ProcessGroup,
    torch.distributed.pipelining,
    torch.cuda,
    torch.nn.functional,
    builtins,
)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
CAMEL = re.compile(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*|LAMB|LARS|SGD|GPT|BERT|BF16|FP8|T5")
FILE = re.compile(r"(?:pyops|tests|benchmarks|csrc|docs|examples|\.ci)/[\w./*{},]+")
SECTIONS = {field.name for field in dataclasses.fields(Config)}


@functools.cache
def defined() -> dict[str, set[str]]:
    """By kind, what the package's sources define: classes, functions, parameters and fields,
    attributes."""
    text = "\n".join(path.read_text() for path in (ROOT / "pyops").rglob("*.py"))
    patterns = {
        "class": r"^ *class (\w+)",
        "function": r"^ *def (\w+)",
        "option": r"\b([a-z]\w*): [\"'A-Za-z]",  # all parameters and fields have annotations
        "attribute": r"\.([a-z]\w*)(?:: [^=\n]+)? = ",
    }
    return {
        kind: set(re.findall(pattern, text, re.MULTILINE)) for kind, pattern in patterns.items()
    }


@functools.cache
def exported() -> set[str]:
    """What subpackages and modules offer: their __all__."""
    names: set[str] = set()
    for room in pyops._ROOMS:
        names |= set(getattr(importlib.import_module(f"pyops.{room}"), "__all__", ()))
    return names


def resolve(dotted: str) -> Any:
    """The object of a dotted name, of modules and what is in them. LookupError where there is
    none."""
    parts = dotted.split(".")
    value: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], start=2):
        if hasattr(value, part):
            value = getattr(value, part)
        elif inspect.ismodule(value):
            try:
                value = importlib.import_module(".".join(parts[:number]))
            except ImportError:
                raise LookupError(
                    f"{dotted}: {'.'.join(parts[: number - 1])} has no {part}"
                ) from None
        elif inspect.isclass(value) and part in defined()["attribute"] | defined()["option"]:
            return None  # an attribute of its objects
        else:
            raise LookupError(f"{dotted}: {'.'.join(parts[: number - 1])} has no {part}")
    return value


def has(section: str, key: str) -> bool:
    """Whether [section] of a configuration has this key."""
    values = [getattr(Config(), section)]
    if section == "model":  # which is the section of a folder, too
        values.append(Config().model_folder)
    return any(
        dataclasses.is_dataclass(value) and key in {f.name for f in dataclasses.fields(value)}
        for value in values
    )


def is_offered(room: str, name: str) -> bool:
    """Whether the subpackage of a section's name has this."""
    return room in pyops._ROOMS and hasattr(importlib.import_module(f"pyops.{room}"), name)


def in_torch(name: str) -> bool:
    return any(hasattr(place, name) for place in TORCH)


def wrong_in_span(span: str) -> str | None:
    """What is wrong with the text between two backticks; None: nothing that can be known."""
    if span in ELSEWHERE or span.split("(")[0] in ELSEWHERE:
        return None
    if found := re.match(r"pyops(?:\.\w+)+", span):
        try:
            resolve(found[0])
        except LookupError as error:
            return str(error)
        return None
    if FILE.fullmatch(span) and not list(ROOT.glob(re.sub(r"\{[^}]*\}|<[^>]*>", "*", span))):
        return "there is no such file"
    if (found := re.match(r"(\[?)(\w+)(?:\]|\.)\s?(\w+)(?: = .*)?$", span)) and found[
        2
    ] in SECTIONS:
        section, key = found[2], found[3]
        if not found[1] and (
            key in defined()["function"] | defined()["attribute"] or is_offered(section, key)
        ):
            return None  # a variable of a program, or a subpackage, of the section's name
        return None if has(section, key) else f"[{section}] has no key {key}"
    for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", span):
        if flag not in FOREIGN_FLAGS and not any(f'"{flag}"' in text for text in flag_sources()):
            return f"no command has {flag}"
    return wrong_name(span)


@functools.cache
def flag_sources() -> list[str]:
    return [
        path.read_text()
        for folder in ("pyops", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]


def wrong_name(span: str) -> str | None:
    """Of a class, a call, an attribute of a class, or an option."""
    known = defined()
    found = re.match(r"([A-Za-z_]\w*)(?:\.([a-z_]\w*))?(?:\(.*\)|=.*)?$", span)
    if found is None:
        return None
    name, attribute = found[1], found[2]
    if CAMEL.fullmatch(name):
        ours = known["class"] | exported()
        if name not in ours and not in_torch(name) and name not in dir(transformers):
            return f"there is no class {name} in pyops, torch or transformers"
        if attribute and name in known["class"]:
            anything = known["function"] | known["attribute"] | known["option"]
            if attribute not in anything:
                return f"nothing of pyops has an attribute {attribute}"
    elif (
        attribute is None
        and span.endswith(")")
        and name not in known["function"] | known["attribute"] | known["option"]
    ):
        if not in_torch(name):
            return f"there is no function {name} in pyops or torch"
    elif (
        attribute is None
        and re.match(r"[a-z]\w*=", span)
        and name not in known["option"]
        and name not in known["attribute"]
    ):
        return f"nothing of pyops takes {name}="
    return None


def chain(node: ast.AST) -> str | None:
    """a.b.c of an expression that is one."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := chain(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def keywords_of(made: Any) -> set[str] | None:
    """The options of a function or class; None: any."""
    try:
        parameters = inspect.signature(made).parameters.values()
    except (TypeError, ValueError):
        return None
    return (
        None if any(p.kind is p.VAR_KEYWORD for p in parameters) else {p.name for p in parameters}
    )


def wrong_in_block(source: str, bound: dict[str, Any]) -> list[str]:
    """What is wrong with a Python block. bound: names that it and the page's blocks before it
    import, which it adds to."""
    tree, wrong = ast.parse(source), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pyops":
            for each in node.names:
                try:
                    bound[each.asname or each.name] = resolve(f"{node.module}.{each.name}")
                except LookupError as error:
                    wrong.append(str(error))
        elif isinstance(node, ast.Import) and any(each.name == "pyops" for each in node.names):
            bound["pyops"] = pyops
        elif isinstance(node, ast.Name | ast.ClassDef | ast.FunctionDef) and not isinstance(
            getattr(node, "ctx", None), ast.Load
        ):
            bound.setdefault(node.id if isinstance(node, ast.Name) else node.name, None)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            bound |= {(each.asname or each.name).split(".")[0]: None for each in node.names}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Name)
            and CAMEL.fullmatch(node.id)
            and node.id in exported()
            and node.id not in bound
        ):
            wrong.append(f"{node.id} is imported neither here nor in a block before")
        elif (
            isinstance(node, ast.Attribute)
            and (name := chain(node)) is not None
            and name.startswith("pyops.")
        ):
            try:
                resolve(name)
            except LookupError as error:
                wrong.append(str(error))
        elif isinstance(node, ast.Call) and (name := chain(node.func)) is not None:
            wrong += wrong_keywords(name, node, bound)
    return wrong


def wrong_keywords(name: str, call: ast.Call, bound: dict[str, Any]) -> list[str]:
    """Options of a call that what is called does not have."""
    first, *rest = name.split(".")
    made = pyops if first == "pyops" else bound.get(first)
    for part in rest:
        made = getattr(made, part, None)
    options = keywords_of(made) if made is not None and callable(made) else None
    if options is None:
        return []
    return [
        f"{name} has no option {each.arg}"
        for each in call.keywords
        if each.arg is not None and each.arg not in options
    ]


def faults(text: str) -> list[str]:
    """All that is wrong in a page."""
    found, bound = [], {}
    for _, language, contents in blocks(text):
        if language == "python":
            found += wrong_in_block(contents, bound)
    prose = re.sub(
        r"^```.*?^```$|^<!-- results.*?/results -->$", "", text, flags=re.DOTALL | re.MULTILINE
    )
    for span in SPAN.findall(prose):
        if (fault := wrong_in_span(span)) is not None:
            found.append(f"`{span}`: {fault}")
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_names_are_there(page):
    assert faults(page.read_text()) == []


def test_names_in_messages_and_comments_are_there():
    """What the package's own sources call pyops.x: a message that names the fix must name one that
    exists."""
    wrong = []
    for path in sorted((ROOT / "pyops").rglob("*.py")):
        if path.name == "renamed.py":
            continue
        for name in sorted(
            set(re.findall(r"(?<![\w./:-])pyops(?:\.[A-Za-z]\w*)+", path.read_text()))
        ):
            try:
                resolve(name)
            except LookupError as error:
                wrong.append(f"{path.relative_to(ROOT)}: {error}")
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("`pyops.DataParallel`", "pyops has no DataParallel"),
        ("`pyops.optim.AdamV`", "no AdamV"),
        ("`tests/zero/test_nothing.py`", "no such file"),
        ("`parallel.mp`", "no key mp"),
        ("`[zero] stages`", "no key stages"),
        ("`--not-a-flag`", "no command has"),
        ("`Comunicator`", "no class Comunicator"),
        ("`reduce_norm_of_all(x)`", "no function"),
        ("`bucket_bites=`", "takes bucket_bites="),
        ("```python\npyops.optim.Nothing()\n```\n", "no Nothing"),
        ("```python\nfrom pyops.comm import nothing\n```\n", "no nothing"),
        ("```python\nCommunicator.of(group)\n```\n", "Communicator is imported neither"),
        ("```python\nfrom pyops.optim import LAMB\nLAMB(x, trust=1)\n```\n", "no option trust"),
    ],
)
def test_a_name_that_is_not_there_is_told(text, fault):
    (found,) = faults(text)
    assert fault in found
    rights = (
        "`pyops.zero.ZeroOptimizer` `zero.stage` `[zero] stage` `AdamW` `bucket_bytes=` "
        "`--resume` `docs/zero.md` `Shard`"
    )
    assert faults(rights) == []
