"""Clusters: every figure has a source; what is wrong in a file is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pyops.plan import Options, PlanError, best, cluster_names, load_cluster
from pyops.plan.clusters import DATA
from tests.plan.shapes import TINY

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_is_read_and_planned_for(name: str):
    cluster = load_cluster(name)
    assert all(len(source) > 10 for source in cluster.sources.values())
    precision = next(iter(cluster.device.peak))
    plan = best(TINY, cluster.with_devices(1), Options(batch=4, precision=precision))
    assert plan.best.seconds > 0


def test_there_are_clusters_from_a_laptop_to_the_largest():
    assert {"a100", "h100", "h200", "b200", "laptop"} <= set(cluster_names())
    assert load_cluster("h100").with_devices(100_000).num_nodes == 12_500
    assert load_cluster("h100").with_devices(4).num_nodes == 1


def test_figures_are_those_of_the_sources():
    """Peaks and bandwidths, as the sources state them."""
    a100, h100, b200 = (load_cluster(name) for name in ("a100", "h100", "b200"))
    assert a100.device.operations("bf16") == 312e12
    assert h100.device.operations("bf16") == 989e12
    assert h100.device.memory_bandwidth == 3.35e12
    assert (a100.node.bandwidth, h100.node.bandwidth) == (300e9, 450e9)
    assert b200.device.operations("bf16") == 2250e12


def test_a_figure_without_a_source_is_left_out():
    """No peak in fp32 is known of a B200."""
    with pytest.raises(PlanError, match=r"precision is 'fp32', .* B200 .* has no peak; it has"):
        load_cluster("b200").device.operations("fp32")
    with pytest.raises(PlanError, match="precision is 'fp32'"):
        best(TINY, load_cluster("b200"), Options(batch=8, precision="fp32"))


def damaged(tmp_path: Path, before: str, after: str) -> Path:
    text = (DATA / "h100.toml").read_text()
    changed = re.sub(before, after, text, count=1, flags=re.MULTILINE)
    assert changed != text
    file = tmp_path / "mine.toml"
    file.write_text(changed)
    return file


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (r"^memory_gib = .*$", "", r"mine.toml lacks device.memory_gib; give a number"),
        (r"^memory_gib = .*$", "memory_gib = 0", "device.memory_gib is 0; it must be a number"),
        (r"^memory_gib = .*$", "memory_gib = '80'", "device.memory_gib is '80'; it must be"),
        (r"^memory_gib = .*$", "memory_gib = nan", "device.memory_gib is nan; it must be a number"),
        (r"^memory_gib", "memory_gb = 80\nmemory_gib", "unknown key device.memory_gb = 80; there"),
        (r"^delivered = .*$", "delivered = 1.2", "node.delivered is 1.2; .* and 1 at most"),
        (r"^latency = .*$", "latency = -1.0", r"node.latency is -1.0; it must .*, 0 or more"),
        (r"^num_devices = .*$", "num_devices = 7.5", r"num_devices is 7.5; give a whole number"),
        (r"^\[network\]$", "[net]", r"has no table \[network\]; it holds bandwidth"),
        (r"^name = .*$", "", "mine.toml has name = None; give a text"),
        (r"^bf16 = .*$", "bf16 = -1", "device.peak.bf16 is -1; it must be a number, more than 0"),
        (r'^"device.peak" = .*$', "", 'device.peak.bf16 has no source; add "device.peak.bf16" ='),
        (r"^\[device\]$", "[device", "is no TOML: .*; correct it there"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, before: str, after: str, message: str):
    with pytest.raises(PlanError, match=message):
        load_cluster(damaged(tmp_path, before, after))


def test_unknown_clusters_and_numbers_are_refused(tmp_path):
    with pytest.raises(PlanError, match=r"cluster is 'h1000'; known are a100, .*--measured"):
        load_cluster("h1000")
    with pytest.raises(PlanError, match=r"can't be read: .*; name a TOML file"):
        load_cluster(tmp_path / "none.toml")
    with pytest.raises(PlanError, match=r"devices is 12, but a node has 8, .* ask for 8 or 16"):
        load_cluster("h100").with_devices(12)
    with pytest.raises(PlanError, match="devices is 0; give a whole number, 1 or more"):
        load_cluster("h100").with_devices(0)


def test_the_files_are_part_of_the_package():
    """setup.py names them: an installed wheel has them too."""
    setup = (Path(__file__).resolve().parents[2] / "setup.py").read_text()
    assert '"pyops.plan": ["data/*.toml"]' in setup
