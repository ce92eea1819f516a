"""Devices, and exchanges between them."""

from __future__ import annotations

import json

import pytest

from lightning_hybrid.errors import ConfigurationError
from lightning_hybrid.planner import Cluster
from lightning_hybrid.planner.collectives import Group, ring
from lightning_hybrid.planner.constants import FITTED
from lightning_hybrid.planner.gpus import GPUS, find_gpu


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("H100", "H100-SXM-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("A100 (DGX-A100)", "A100-SXM-80GB"),
        ("h100 pcie", "H100-PCIe-80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX4090-24GB"),
        ("V100-SXM3 (DGX-2)", "V100-SXM3-32GB"),
        ("AMD Instinct MI250", "MI250X-GCD-64GB"),
        ("GB200", "GB200-186GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA H100 NVL", "H100-NVL-94GB"),
        ("H100 SXM5 80G", "H100-SXM-80GB"),
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe-32GB"),
        ("Tesla T4", "T4-16GB"),
        ("NVIDIA RTX A6000", "A6000-48GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada-48GB"),
        ("NVIDIA A10G", "A10G-24GB"),
        ("NVIDIA L40", "L40-48GB"),
        ("NVIDIA L40S", "L40S-48GB"),
        ("8xA100-40GB", "A100-SXM-40GB"),
        ("8 x H800", "H800-SXM-80GB"),
        ("A100s", "A100-SXM-80GB"),
        ("AMD Instinct MI300X OAM", "MI300X-192GB"),
        ("NVIDIA B200", "B200-SXM-180GB"),
    ],
)
def test_names_people_use(name: str, meant: str):
    assert find_gpu(name).name == meant


@pytest.mark.parametrize("name", ["TPU v5p", "Quadro RTX 6000", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "Gaudi2", ""])
def test_devices_without_data_are_refused_with_the_way_out(name: str):
    with pytest.raises(ConfigurationError, match=r"probe.*--peak.*JSON"):
        find_gpu(name)


def test_a_device_is_planned_by_its_rate_and_memory_alone():
    gpu = Cluster.named("X1", 8, peak=300, memory=64).gpu
    assert gpu.peak("bf16") == 300e12 and gpu.memory == 64
    with pytest.raises(ConfigurationError, match="both"):
        Cluster.named("X1", 8, peak=300)


def test_unknown_devices_are_refused_with_those_known():
    with pytest.raises(ConfigurationError, match=r"TPU-9.*H100-SXM-80GB"):
        find_gpu("TPU-9")


def test_the_table_is_plausible():
    assert len({gpu.name for gpu in GPUS}) == len(GPUS) > 20
    for gpu in GPUS:
        assert gpu.wiring in ("switch", "mesh", "cube", "bus"), gpu
        assert 45e12 < gpu.sustained("bf16") < gpu.peak("bf16"), gpu
        assert find_gpu(gpu.name) is gpu


def test_types_that_a_device_lacks_run_at_the_next_wider_one():
    assert find_gpu("A100").peak("fp8") == find_gpu("A100").peak("bf16") == 312e12
    assert find_gpu("V100").peak("bf16") == 125e12
    with pytest.raises(KeyError):
        find_gpu("A100").peak("int3")


def test_a_cluster_from_a_file_is_the_one_that_was_written(tmp_path):
    cluster = Cluster.named("A100-40GB", 32, per_node=16, link=250, network_gbits=400)
    path = tmp_path / "cluster.json"
    path.write_text(cluster.to_json())
    assert Cluster.from_json(path) == cluster
    path.write_text('{"device": "H100", "num_devices": 4}')
    assert Cluster.from_json(path) == Cluster.named("H100", 4)


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"num_devices": 4},
        {"device": "H100"},
        {"device": "H100", "num_devices": 0},
        {"device": "H100", "num_devices": 4, "speed": 1},
        {"device": {"name": "x"}, "num_devices": 4},
    ],
)
def test_files_that_describe_no_cluster_are_refused(tmp_path, document):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigurationError):
        Cluster.from_json(path)


# nccl-tests on 8 H100 (MooreThreads/SimuMax, nccl_fit.py) and 8 A100 (VIA-Research/vTrain, trace/a100): bytes, seconds.
@pytest.mark.parametrize(
    ("device", "passes", "size", "busbw"),
    [("H100", 1, 2**28, 322), ("H100", 1, 2**26, 278), ("A100", 2, 2**28, 217), ("A100", 2, 2**25, 164)],
)
def test_exchanges_within_a_node_are_near_what_was_measured(device: str, passes: int, size: int, busbw: float):
    seconds = ring(Group(8, 1), size, Cluster.named(device, 8), FITTED, passes=passes)
    measured = passes * size * 7 / 8 / (busbw * 1e9)
    assert seconds == pytest.approx(measured, rel=0.3)


def test_groups_across_nodes_share_the_network():
    cluster = Cluster.named("H100", 64)
    within, across = Group(8, 1), Group(8, 8)
    assert across.members_per_node(8) == 1 and within.members_per_node(8) == 8
    size = 2**28
    assert ring(across, size, cluster, FITTED) > 5 * ring(within, size, cluster, FITTED)
    whole = ring(Group(64, 1), size, cluster, FITTED)
    assert ring(within, size, cluster, FITTED) < whole < ring(across, size, cluster, FITTED)
    assert ring(Group(1, 1), size, cluster, FITTED) == 0
