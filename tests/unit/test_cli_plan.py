"""``lightning-hybrid plan``: sizes, a config, an import path; tables and JSON."""

from __future__ import annotations

import json
import re

import pytest
from torch import nn

from lightning_hybrid.cli import main
from lightning_hybrid.planner import Cluster, ModelProfile, plan

GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
SIZES = ["--num_layers", "8", "--hidden_size", "512", "--num_heads", "8", "--seq_length", "256", "--vocab_size", "1000"]


class TwoBlocks(nn.Module):
    """Made by import path."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128) for _ in range(2))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_config_gives_tables(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    for path in (tmp_path, tmp_path / "config.json"):
        code, out, _ = run(capsys, str(path), "--devices", "6", "--device", "A100-40GB", "--global_batch", "30")
        assert code == 0
        for words in ("gpt2: 0.1", "6 x A100-SXM-40GB", "d x t x p", "compute", "activations", "Hybrid3DStrategy("):
            assert words in out
        assert "rejected" in out and "does not divide" in out and "twice the devices (12)" in out


def test_sizes_give_json(capsys):
    code, out, _ = run(capsys, *SIZES, "--devices", "16", "--global_batch", "64", "--json", "--most", "3")
    found = json.loads(out)
    assert code == 0 and len(found["plans"]) == 3
    first = found["plans"][0]
    assert first["seconds"] == pytest.approx(sum(first["parts"].values()))
    degrees = [first["arguments"][f"{name}_parallel_size"] for name in ("data", "tensor", "pipeline")]
    assert degrees[0] * degrees[1] * degrees[2] == first["num_devices"] == 16
    assert len(first["memory"]) == degrees[2] and all(stage["total"] > 0 for stage in first["memory"])
    assert found["rejected"] and all(other["reason"] for other in found["rejected"])


def test_a_page_shows_memory_by_stage_and_step_time_by_part(tmp_path, capsys):
    page = tmp_path / "plan.html"
    arguments = [*SIZES, "--devices", "4", "--device", "V100-16GB", "--global_batch", "32", "--precision", "fp16"]
    code, out, _ = run(capsys, *arguments, "-o", str(page))
    assert code == 0 and out.startswith(f"{page}: ")
    text = page.read_text()
    best = plan(
        ModelProfile.from_sizes(num_layers=8, hidden_size=512, num_heads=8, seq_length=256, vocab_size=1000),
        Cluster.named("V100-16GB", 4), global_batch=32, precision="fp16", most=5,
    ).best  # fmt: skip
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%;flex", text.split("Where a step goes")[0])]
    drawn = sum(stage.total for stage in best.estimate.memory) / (16 * 2**30)
    assert sum(widths) / 100 == pytest.approx(drawn, rel=0.01)  # what is stacked is what is needed
    assert "left:80.00%" in text and f"{best.estimate.peak_memory / 2**30:.1f} GiB" in text
    assert "://" not in text
    for wrong, words in (
        (tmp_path / "plan.png", "unknown ending"),
        (tmp_path / "no" / "plan.html", "cannot be written"),
    ):
        code, _, error = run(capsys, *arguments, "-o", str(wrong))
        assert code == 1 and words in error


CONFIG = f"""
model: {{class_path: {__name__}.TwoBlocks}}
data: {{class_path: some.Data, init_args: {{batch_size: 4, seq_length: 32}}}}
trainer: {{devices: 2, num_nodes: 2, precision: bf16-mixed, accumulate_grad_batches: 3}}
"""


def test_a_lightning_cli_config_says_model_batch_devices_and_precision(tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    code, out, _ = run(capsys, str(path), "--json")
    found = json.loads(out)
    assert code == 0 and found["model"] == "TwoBlocks" and found["cluster"].startswith("4 x H100")
    assert found["global_batch"] == 4 * 3 * 4
    assert run(capsys, str(path), "--json", "--precision", "fp32")[1] != out
    for text, words in {
        "model: {class_path: nowhere.Model}": "nowhere",
        "model: {width: 3}": "does not say which class its model is",
        "trainer: {devices: 2}": "has no model",
        "model: [": "cannot be read as YAML",
        CONFIG.replace(", seq_length: 32", ""): "give --seq_length",
        CONFIG.replace("TwoBlocks", "TwoBlocks, init_args: {wdth: 3}"): "wdth",
    }.items():
        path.write_text(text)
        code, out, error = run(capsys, str(path))
        assert code == 1 and words in error and "Subtypes" not in error and not out, error
    path.write_text(CONFIG)
    assert run(capsys, str(path), "--devices", "0")[0] == 1
    assert run(capsys, str(path), "--json")[2] == ""
    path.write_text(CONFIG.replace("batch_size: 4, ", ""))
    code, out, error = run(capsys, str(path), "--json")
    assert code == 0 and json.loads(out)["global_batch"] == 256 and "256 samples a step are assumed" in error


def test_an_import_path_is_made_on_the_meta_device(capsys):
    path = f"{__name__}:TwoBlocks"
    code, out, _ = run(capsys, path, "--seq_length", "32", "--devices", "2", "--global_batch", "8", "--json")
    found = json.loads(out)
    assert code == 0 and found["model"] == "TwoBlocks"
    assert found["num_parameters"] == sum(p.numel() for p in TwoBlocks().parameters())


def two_blocks_and_loader():
    return TwoBlocks(), []


def test_a_factory_may_be_that_of_check(capsys):
    path = f"{__name__}:two_blocks_and_loader"
    code, out, _ = run(capsys, path, "--seq_length", "32", "--devices", "2", "--global_batch", "8", "--json")
    assert code == 0 and json.loads(out)["model"] == "TwoBlocks"


def test_brackets_of_a_message_are_no_style(capsys):
    assert "no[hf]such" in run(capsys, "no[hf]such:Model", "--seq_length", "8")[2]


def test_a_cluster_file_is_used(tmp_path, capsys):
    path = tmp_path / "cluster.json"
    path.write_text('{"device": "L40S", "num_devices": 4}')
    code, out, _ = run(capsys, *SIZES, "--cluster", str(path), "--global_batch", "16")
    assert code == 0 and "4 x L40S-48GB" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num_layers", "2"], "--hidden_size, --num_heads, --seq_length"),
        ([*SIZES, "--device", "Abacus"], "No data of a device 'Abacus'"),
        (["no.such.module:Model", "--seq_length", "8"], "cannot be made without arguments"),
        (["nothing", "--seq_length", "8"], "neither a file or folder with a config nor an import path"),
        (["json:loads", "--seq_length", "8"], "cannot be made without arguments"),
        ([f"{__name__}:TwoBlocks"], "give --seq_length"),
        ([*SIZES, "--hidden_size", "65536", "--devices", "1", "--global_batch", "1"], "GiB on a device"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert code == 1 and out == "" and words in " ".join(err.split())
