"""Each finding from made-up facts: what is wrong gives it, what is right does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_hybrid.cli import main
from lightning_hybrid.doctor import CHECKS, Facts, check, examine, exit_code
from lightning_hybrid.machine.doctor_facts import VARIABLES, gather_facts

GPU = {"gpus": ["NVIDIA H100"] * 2, "driver": "570.1", "cuda_build": "13.0", "cores": 64}
GPU |= {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
NODES = GPU | {"num_nodes": 2, "infiniband": ["mlx5_0"]}
TORCH = ["torch<2.15,>=2.13", 'transformers>=5.24; extra == "hf"', 'pytest>=9; extra == "test"']


def environment(**variables: str) -> dict[str, Any]:
    return {"environment": variables}


WRONG: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("malicious version", {"versions": {"lightning": "2.6.3"}}, {"versions": {"lightning": "2.6.6"}}),
    (
        "versions",
        {"requirements": TORCH, "versions": {"torch": "2.12.1+cu126", "pytest": "1"}},
        {"requirements": TORCH, "versions": {"torch": "2.13.0+cpu", "pytest": "1"}},
    ),
    (
        "versions",
        {"requirements": TORCH, "versions": {"torch": "2.13.0", "transformers": "4.57.0"}},
        {"requirements": TORCH, "versions": {"torch": "2.14.0", "transformers": "5.24.0"}},
    ),
    ("missing package", {"requirements": TORCH}, {"requirements": TORCH, "versions": {"torch": "2.13.0"}}),
    (
        "CPU build of torch",
        {"driver": "570.1", "versions": {"torch": "2.13.0+cpu"}},
        GPU | {"versions": {"torch": "2.13.0"}},
    ),
    ("no visible GPU", GPU | {"gpus": []}, GPU),
    ("unequal GPUs", GPU | {"gpus": ["NVIDIA H100", "NVIDIA A100"]}, GPU),
    ("no peer access", GPU | {"peer_access": [[True, False], [False, True]]}, GPU | {"peer_access": [[True] * 2] * 2}),
    ("slow setting", environment(NCCL_P2P_DISABLE="1"), environment(NCCL_P2P_DISABLE="0")),
    ("slow setting", environment(NCCL_IB_DISABLE="1"), environment(NCCL_IB_DISABLE="0")),
    ("slow setting", environment(NCCL_NET="Socket"), environment(NCCL_NET="IB")),
    ("no RDMA", NODES | {"infiniband": []}, NODES),
    (
        "NCCL on sockets",
        NODES | {"nccl_log": "NCCL INFO Using network Socket"},
        NODES | {"nccl_log": "Using network IB"},
    ),
    ("NCCL found no RDMA", {"nccl_log": "NET/IB : No device found."}, {"nccl_log": "NET/IB : Using [0]mlx5_0"}),
    ("NCCL on shared memory", {"nccl_log": "0[0] -> 1[1] via SHM/direct"}, {"nccl_log": "0[0] -> 1[1] via P2P/CUMEM"}),
    ("no GPUDirect RDMA", {"nccl_log": "via NET/IB/0"}, {"nccl_log": "via NET/IB/0/GDRDMA"}),
    (
        "interface",
        environment(GLOO_SOCKET_IFNAME="eth7") | {"interfaces": ["lo", "eth0"]},
        environment(GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="eth") | {"interfaces": ["lo", "eth0"]},
    ),
    ("loopback", environment(GLOO_SOCKET_IFNAME="lo") | {"num_nodes": 2}, environment(GLOO_SOCKET_IFNAME="lo")),
    ("host name", {"hostname_resolves": False}, environment(GLOO_SOCKET_IFNAME="eth0") | {"hostname_resolves": False}),
    (
        "threads",
        environment(OMP_NUM_THREADS="8") | {"cores": 8, "local_ranks": 4},
        environment(OMP_NUM_THREADS="2") | {"cores": 8, "local_ranks": 4},
    ),
    ("cores", {"cores": 2, "local_ranks": 8} | environment(OMP_NUM_THREADS="1"), {"cores": 8, "local_ranks": 1}),
    ("open files", {"open_files": 1024}, {"open_files": 65536}),
    ("locked memory", NODES | {"locked_memory": 65536}, NODES | {"locked_memory": -1}),
    ("shared memory", {"shared_memory": 64 * 2**20}, {"shared_memory": 16 * 2**30}),
    ("fork and CUDA", GPU | environment(PYTORCH_NVML_BASED_CUDA_CHECK="0"), GPU),
    ("fork on macOS", {"system": "Darwin"}, {"system": "Linux"}),
    ("allocator", GPU | environment(), GPU),
    ("W&B", environment(WANDB_MODE="offline"), environment(WANDB_MODE="online")),
    ("W&B", {"offline": True}, {"offline": False}),
    (
        "rendezvous",
        environment(MASTER_ADDR="127.0.0.1") | {"num_nodes": 2},
        environment(MASTER_ADDR="10.0.0.1") | {"num_nodes": 2},
    ),
]


@pytest.mark.parametrize(("name", "wrong", "right"), WRONG)
def test_what_is_wrong_is_found_and_what_is_right_is_not(name: str, wrong: dict[str, Any], right: dict[str, Any]):
    found = [finding for finding in examine(Facts(**wrong)) if finding.name == name]
    assert len(found) == 1 and found[0].what.endswith(".") and found[0].do
    assert name not in [finding.name for finding in examine(Facts(**right))]


def test_every_check_is_tried():
    names = {name for name, _, _ in WRONG}
    silent = [
        function.__name__
        for function in CHECKS
        if not any(finding.name in names for _, wrong, _ in WRONG for finding in function(Facts(**wrong)))
    ]
    assert not silent


def test_nothing_is_wrong_where_nothing_is_known():
    assert examine(Facts()) == []


def test_a_check_is_added_without_touching_anything_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lightning_hybrid.doctor.CHECKS", list(CHECKS))
    import lightning_hybrid.doctor as doctor

    @check
    def too_old(facts: Facts):
        yield doctor.Finding(level="error", name="age", what="It is old.", do="Buy another.")

    assert examine(Facts())[0].name == "age"


def test_exit_codes():
    warning = examine(Facts(open_files=1024))
    error = examine(Facts(versions={"lightning": "2.6.2"}, open_files=1024))
    assert [exit_code(warning), exit_code(warning, strict=True), exit_code(error)] == [0, 1, 2]
    assert [finding.level for finding in error] == ["error", "warning"]  # the worst first


def test_facts_of_this_machine_hold_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "hunter2hunter2")
    facts = gather_facts(ranks=3, nodes=2)
    assert facts.local_ranks == 3 and facts.num_nodes == 2 and facts.cores and facts.interfaces
    assert facts.versions["torch"] and set(facts.environment) <= set(VARIABLES)
    assert "hunter2" not in repr(facts)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({"facts": {"open_files": 256, "versions": {"torch": "2.13.0"}}}))
    assert main(["doctor", "--facts", str(path)]) == 0
    assert main(["doctor", "--facts", str(path), "--strict"]) == 1
    assert "ulimit -n 65536" in capsys.readouterr().out
    path.write_text(json.dumps({"versions": {"lightning": "2.6.3"}}))
    assert main(["doctor", "--facts", str(path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["findings"][0]["name"] == "malicious version"
    path.write_text('{"wheels": 4}')
    assert main(["doctor", "--facts", str(path)]) == 1
    assert "wheels" in capsys.readouterr().err
