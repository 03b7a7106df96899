"""Targets, roofs, rivals that fail, traces, and the step of a GPT: what a run on a GPU is judged
by, at sizes of a CPU."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as entry
from benchmarks.instruments import accuracy, harness, machine, report, rivals, trace, verdicts
from benchmarks.links import bench_codec
from benchmarks.ops.layers import bench_activation, bench_cross_entropy, bench_norm
from benchmarks.ops.machine_code import profile_kernels
from benchmarks.ops.optimizers import bench_kernels, bench_layerwise, bench_optim
from benchmarks.parallel.data import offload_device
from benchmarks.training import bench_gpt, gpt_step, profile_step
from tests.benchmarks.test_benchmarks import case

pytestmark = pytest.mark.cpu_only

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TINY = gpt_step.SIZES["GPT tiny"]


def measured(**changes):
    return harness.measure(case(**changes)[0], rounds=2, sample_seconds=1e-6)


def test_a_row_is_judged_by_each_of_its_targets():
    row = {
        "us": {"pyops": [1.0, 2000.0, 3.0]},
        "speedup": {"a": 1.2, "b": 0.9},
        "percent_of_copy": 94.9,
        "targets": {"a": 1.1, "b": 1.0, "is not there": 5.0},
        "least": {"percent_of_copy": 95.0, "is not there": 1.0},
        "most": {"ms": 2.5, "launches": 1.0},
    }
    found = [(v.target, v.met) for v in verdicts.verdicts(row)]
    assert found == [
        ("1.1x a", True),
        ("1x b", False),
        ("percent_of_copy >= 95", False),
        ("ms <= 2.5", True),
    ]
    assert [v.met for v in verdicts.verdicts(row | {"launches": 1})][-1]
    assert not [v.met for v in verdicts.verdicts(row | {"launches": 2})][-1]


def test_missed_targets_of_a_file_are_listed(tmp_path, capsys):
    row = measured(least={"percent_of_copy": 1e9}, targets={"rival": 1e-9})
    assert "BELOW percent_of_copy >= 1e+09" in harness.format_row(row)
    assert "(aim 1e+09)" in report.table([row])
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert verdicts.main([str(tmp_path / "rows.jsonl")]) == 0
    said = capsys.readouterr().out
    assert "BELOW demo: a case: percent_of_copy >= 1e+09" in said
    assert "1 targets met, 1 missed, in 1 rows" in said


def test_operations_are_set_against_a_matrix_product(monkeypatch):
    monkeypatch.setattr(machine, "matmul_flops", lambda device: 1e9)
    row = measured(flops=1000, least={"percent_of_matmul": 0.0})
    assert row["percent_of_matmul"] == pytest.approx(
        100 * 1000 / row["us"]["pyops"][1] / 1e3, rel=0.1
    )
    assert set(row["tflop_per_s"]) == {"pyops", "rival"}
    assert "% of a matrix product" in report.table([row])
    assert "of a product" in harness.format_row(row)


def test_the_matrix_product_is_measured_once(monkeypatch):
    monkeypatch.setitem(machine.MATMUL, "cpu", (64, torch.float32))
    machine.matmul_flops.cache_clear()
    assert machine.matmul_flops(CPU) == machine.matmul_flops(CPU) > 1e6
    machine.matmul_flops.cache_clear()


def test_a_copy_of_the_sources_is_told_its_commit(monkeypatch):
    def no_git(*_, **__):
        raise OSError

    monkeypatch.setattr(machine.subprocess, "run", no_git)
    monkeypatch.setenv("PYOPS_COMMIT", "0123abcdef")
    assert machine.commit.__wrapped__() == "0123abcdef"


def raises(message):
    raise RuntimeError(message)


@pytest.mark.parametrize("vetted", [False, True])
def test_a_rival_that_fails_costs_our_row_nothing(vetted, capsys):
    works = {"pyops": lambda: None, "rival": lambda: None, "third": lambda: None}
    changes = {"vet": {"rival": lambda: raises("another result")}} if vetted else {}
    if not vetted:
        works["rival"] = lambda: raises("no such kernel")
    row = measured(implementations=works, **changes)
    assert list(row["us"]) == ["pyops", "third"]
    assert list(row["speedup"]) == ["third"]
    assert (
        f"rival is left out: RuntimeError: {'another result' if vetted else 'no such kernel'}"
        in capsys.readouterr().out
    )


def test_ours_may_not_fail_and_no_rank_leaves_a_rival_out_alone():
    with pytest.raises(RuntimeError, match="ours"):
        measured(implementations={"pyops": lambda: raises("ours")})

    class Several:
        def barrier(self):
            return None

        def agree(self, value):
            return value

        def slowest(self, seconds):
            return seconds

    broken = case(implementations={"pyops": lambda: None, "rival": lambda: raises("theirs")})[0]
    with pytest.raises(RuntimeError, match="theirs"):
        harness.measure(broken, rounds=1, ranks=Several())


def test_what_is_observed_is_in_the_row_and_may_fail(capsys):
    assert measured(observe=lambda row: {"seen": len(row["us"])})["seen"] == 2
    assert "seen" not in measured(observe=lambda row: raises("no profiler"))
    assert "not observed: RuntimeError: no profiler" in capsys.readouterr().out


def test_rivals_that_are_not_installed_are_not_mentioned(capsys):
    def missing():
        raise ImportError("no module")

    found = rivals.installed({"a": missing, "b": lambda: raises("broken"), "c": lambda: 3})
    assert found == {"c": 3}
    assert capsys.readouterr().out == "b is left out: RuntimeError: broken\n"
    assert rivals.of_norm("RMS norm", 8, CPU) == rivals.of_swiglu(CPU) == {}


def test_a_rival_must_do_what_ours_does():
    x = torch.linspace(-1, 1, 8)
    accuracy.resembles(lambda: [x + 0.01, x], lambda: [x, -x])()
    with pytest.raises(AssertionError, match="off by"):
        accuracy.resembles(lambda: [-x], lambda: [x])()
    vet = bench_cross_entropy.agrees(
        lambda x, y: x.sum() * 2, lambda x, y: x.sum(), [torch.ones(2)], torch.zeros(2)
    )
    with pytest.raises(AssertionError, match="its loss is 4"):
        vet()


def test_a_wrong_layer_fails_the_comparison():
    leaves, seeds = [torch.randn(4, 8, requires_grad=True)], [torch.randn(4, 8)]
    right = accuracy.forward_backward(torch.tanh, leaves, seeds)
    assert accuracy.compare(right, torch.tanh, leaves, seeds)() < 1e-5
    wrong = accuracy.forward_backward(lambda x: torch.tanh(x) * 1.001, leaves, seeds)
    with pytest.raises(AssertionError, match="error"):
        accuracy.compare(wrong, torch.tanh, leaves, seeds)()


def test_the_shapes_of_a_gpu():
    """Every hidden size from 1024 to 16384 and every vocabulary from 32768 to 262144, in tensors of
    64 MiB and more."""
    for kind in ("residual + RMS norm", "residual + layer norm"):
        shapes = [
            (t, w) for t, w, dtype in bench_norm.shapes(kind, CUDA) if dtype == torch.bfloat16
        ]
        assert [w for _, w in shapes] == [1024, 2048, 4096, 8192, 16384]
        assert all(2 * t * w >= 64 << 20 for t, w in shapes)
    names = [name for name, _ in bench_activation.cases(CUDA)]
    for kind in bench_activation.TABLE:
        assert [name.split("h = ")[1] for name in names if name.startswith(f"{kind} b")] == [
            "1024",
            "2048",
            "4096",
            "8192",
            "16384",
        ]
    words = [
        name.split(" x ")[1].split(",")[0]
        for name, _ in bench_cross_entropy.cases(CUDA)
        if name.startswith("cross entropy bf")
    ]
    assert words == ["32768", "65536", "131072", "262144"]
    for bench in (
        bench_norm,
        bench_activation,
        bench_cross_entropy,
        bench_codec,
        bench_layerwise,
        bench_kernels,
        bench_optim,
    ):
        names = [name for name, _ in bench.cases(CUDA)]
        assert len(set(names)) == len(names) > 1
    for name in (
        "AdamW fp32, GPT-2 XL",
        "AdamW bf16 + fp32 master and moments, 1000 tensors of 64 Ki",
    ):
        assert name in [name for name, _ in bench_optim.cases(CUDA)]
    assert bench_optim.aims(64 << 20, CUDA)["least"] == {"percent_of_copy": 95.0}
    assert bench_optim.aims((64 << 20) - 1, CUDA)["least"] == {}


def test_kernels_to_be_counted_are_cases_of_their_benches():
    for device in (CPU, CUDA):
        found = [name for name, _ in profile_kernels.chosen(device)]
        assert len(found) == len(set(found)) == len(profile_kernels.CHOSEN)


def event(name, start=0.0, end=1.0, *, cuda=False, annotation=False):
    kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(
        name=name,
        device_type=kind,
        time_range=span,
        self_cpu_time_total=end - start,
        is_user_annotation=annotation,
    )


STEP = [
    event("Memcpy DtoH (Device -> Pinned)", 0, 10, cuda=True),
    event("Memcpy DtoH (Device -> Pinned)", 10, 20, cuda=True),
    event("Memcpy HtoD (Pinned -> Device)", 30, 40, cuda=True),
    event("pyops::adam_from_table_", 5, 15),
    event("Memset (Device)", 0, 100, cuda=True),
    event("adam_kernel", 0, 3, cuda=True),
    event("adam_kernel", 5, 7, cuda=True),
    event("Optimizer.step#AdamW.step", 0, 50, cuda=True, annotation=True),
    event(trace.CALL, 0, 50),
    event(trace.CALL, 0, 55, cuda=True, annotation=True),
    event("cudaStreamSynchronize", 40, 41),
    event("cudaDeviceSynchronize", 50, 60),
    event("aten::add", 1, 2),
]


def test_what_a_trace_says():
    assert trace.kernels(STEP) == Counter({"adam_kernel": 2})
    assert trace.waits(STEP) == Counter({"cudaStreamSynchronize": 1})
    assert trace.covered([(0, 10), (5, 20), (30, 40)], [(8, 12), (11, 13), (35, 50)]) == (30, 10)
    assert trace.covered([], [(0, 1)]) == (0, 0)
    assert offload_device.hidden(STEP) == {
        "down_ms": 0.02,
        "up_ms": 0.01,
        "percent_of_copies_hidden": 33.3,
    }
    with pytest.raises(RuntimeError, match="no copies"):
        offload_device.hidden(STEP[3:])
    table = profile_step.longest(STEP, device=True, most=1).splitlines()
    assert table[1].split()[-3:] == ["1", "Memset", "(Device)"]
    assert table[-1].endswith("6  all 4")


def test_a_call_is_profiled(tmp_path):
    found = trace.profiled(lambda: torch.ones(3).sum().item(), CPU)
    assert trace.waits(found.events()) == Counter({"aten::_local_scalar_dense": 1})
    assert len(trace.spans(found.events(), "aten::sum", device=False)) == 1
    trace.export(found, tmp_path / "new" / "trace.json.gz")
    assert (tmp_path / "new" / "trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert trace.launched(lambda: None, CPU)({}) == {}


def test_a_step_of_a_gpt_is_that_of_plain_torch():
    made = bench_gpt.case("tiny", TINY, device=CPU, compiled=False, autocast=True)
    assert list(made.implementations) == ["pyops", "plain", "plain, autocast"]
    assert made.check() < 0.005
    assert made.flops == TINY.flops


def test_another_model_fails_the_check():
    ours = gpt_step.PyopsStep(TINY, CPU)
    other = gpt_step.PlainStep(TINY, CPU, ours.start)
    with torch.no_grad():
        other.model.blocks[0].down.weight.mul_(3.0)
        for master, p in zip(other.masters, other.parameters, strict=True):
            master.copy_(p)
    with pytest.raises(AssertionError, match="gradient's norm are"):
        bench_gpt.check_losses(partial(ours, compiled=False), partial(other, compiled=False))
    with pytest.raises(AssertionError, match="does not fall"):
        bench_gpt.check_losses(lambda: (1.0, 1.0), lambda: (1.0, 1.0))


def test_parameters_and_operations_are_counted():
    model = gpt_step.PyopsStep(TINY, CPU).model
    assert sum(p.numel() for p in model.parameters()) == TINY.parameters + TINY.length * TINY.width
    assert sum(offload_device.parameters_of(TINY)) == TINY.parameters + TINY.length * TINY.width
    tokens, d, n = 4 * 32, 64, TINY.parameters
    assert TINY.flops == tokens * (6 * n + 12 * 2 * d * 32)
    assert 1.23e8 < gpt_step.SIZES["GPT 125M"].parameters < 1.26e8
    assert 1.29e9 < gpt_step.SIZES["GPT 1.3B"].parameters < 1.33e9


def test_the_better_of_ours_is_set_against_the_best_of_the_others():
    row = {
        "us": {
            "pyops": [0, 8, 0],
            "pyops + torch.compile": [0, 4, 0],
            "plain": [0, 6, 0],
            "plain, autocast": [0, 5, 0],
        }
    }
    found = bench_gpt.observe(100, row)
    assert found["best_speedup"] == 1.25
    assert found["tokens_per_s"]["pyops + torch.compile"] == 25_000_000
    assert "best_speedup" not in bench_gpt.observe(100, {"us": {"pyops": [0, 8, 0]}})


def test_an_offloaded_step_beside_its_copies_and_its_adam(monkeypatch):
    made, end = offload_device.case("tiny", offload_device.parameters_of(TINY), CPU)
    row = harness.measure(made, rounds=2, sample_seconds=1e-4)
    end()
    step, *parts = (us[1] for us in row["us"].values())
    assert row["times_the_slower"] == pytest.approx(step / max(parts), abs=1e-3)
    assert "times_the_slower" not in offload_device.slower(
        {"us": {"pyops": [1, 2, 3], "copies alone": [1, 2, 3]}}
    )
    monkeypatch.setattr(offload_device.Offloaded, "step", lambda self: None)
    with pytest.raises(AssertionError, match="differ"):
        made.check()


def test_copies_alone_copy_everything():
    params, _ = offload_device.with_masters(
        [5, offload_device.TILE // offload_device.STATES + 7], CPU
    )
    copies = offload_device.Copies(params)
    with torch.no_grad():
        for p in params:
            p.fill_(-2.0)
    copies()
    assert all(bool((p == 1).all()) for p in params)
    assert sum(values.numel() for values, _ in copies.pairs) == sum(p.numel() for p in params)


def test_the_profile_of_a_step_names_what_ran(capsys):
    assert profile_step.main(["--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "a training step of GPT tiny on cpu" in said
    assert "aten::mm" in said
    assert "pyops::adam_from_table_" in said


def test_the_script_names_benches_that_there_are():
    script = (report.ROOT / "benchmarks" / "gpu.sh").read_text()
    named = {*re.findall(r"\[(\w+)\]=\d+", script), *re.findall(r"timed \d+ (\w+)", script)}
    for line in re.findall(r'benches\+?="([^"]+)"', script):
        named |= set(line.split())
    assert (
        {"kernels", "optim", "cross_entropy", "zero", "gpt", "offload"}
        <= named
        <= set(entry.names())
    )
    called = re.findall(r"-m (benchmarks\.[\w.]*\w)", script)
    assert called
    for module in called:
        assert (report.ROOT / f"{module.replace('.', '/')}.py").exists(), module


def test_each_call_of_the_script_fits_into_its_budget():
    """What docs/gpu.md says to call, with the limits of its parts added up. The build has a time of
    its own in the first call alone, and what its limit leaves is more than a build takes."""
    script = (report.ROOT / "benchmarks" / "gpu.sh").read_text()
    budget = int(re.search(r"BUDGET=\$\{BUDGET:-(\d+)\}", script)[1])
    of_bench = {name: int(limit) for name, limit in re.findall(r"\[(\w+)\]=(\d+)", script)}
    limits, inside = dict[str, int](), ""
    for line in script.splitlines():
        if found := re.match(r"if wants (\w+); then", line):
            inside = found[1]
        times = 2 if inside == "sanitize" else 1  # both tools
        if inside and (found := re.match(r" +.*\b(?:part|timed|profiled) (\d+) ", line)):
            limits[inside] = limits.get(inside, 0) + times * int(found[1])
        if line == "fi":
            inside = ""
    assert limits.keys() == {"kernels", "others", "sanitize", "train", "profile"}
    calls = re.findall(
        r'^PARTS="?([\w ]+?)"?(?: BENCHES="([\w ]+)")? OUT=',
        (report.ROOT / "docs" / "gpu.md").read_text(),
        re.MULTILINE,
    )
    ran, timed = [], []
    for parts, benches in calls:
        timed += benches.split()
        ran += parts.split()
        seconds = sum(limits[part] for part in parts.split() if part != "bench")
        seconds += sum(of_bench[name] for name in benches.split())
        assert seconds <= budget - 10, f"PARTS={parts}: {seconds} s"
        assert f"PARTS={parts if ' ' not in parts else chr(34) + parts + chr(34)}" in script
    assert sorted({*ran}) == sorted({*limits, "bench"})
    assert sorted(timed) == sorted(of_bench)
