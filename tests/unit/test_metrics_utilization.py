"""MFU by hand, and only where operations and peak are certain."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_hybrid.callbacks.utilization import Utilization
from lightning_hybrid.measuring.flops import count_flops
from lightning_hybrid.metrics.throughput import Throughput
from lightning_hybrid.metrics.utilization import model_flops_utilization, peak_flops_of, training_flops


def test_by_hand() -> None:
    """PaLM's way: 6 N a token. 1 B weights, 1000 tokens a sample, 26 samples/s on 2 devices of 156 TFLOP/s: a half."""
    mfu = model_flops_utilization(flops_per_sample=6e9 * 1000, samples_per_second=26, num_devices=2, peak_flops=156e12)
    assert mfu == pytest.approx(0.5)
    with pytest.raises(ValueError, match="must be positive"):
        model_flops_utilization(flops_per_sample=1, samples_per_second=1, num_devices=1, peak_flops=0)


def test_operations_of_a_block_by_hand() -> None:
    """Projections 4 x 2 T W^2, attention 2 x 2 T^2 W as if nothing were masked; the backward needs twice as many."""
    length, width, heads = 8, 16, 4
    weights = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
    x = torch.randn(3, length, width)
    with count_flops() as counter:
        q, k, v = (w(x).unflatten(-1, (heads, -1)).transpose(1, 2) for w in weights[:3])
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        out = weights[3](mixed)
    forward = 3 * (4 * 2 * length * width**2 + 4 * length**2 * width)
    assert counter.get_total_flops() == forward
    linear = 3 * 4 * 2 * length * width**2
    x.requires_grad_()
    with count_flops() as counter:
        q = weights[0](x)
        weights[3](q).sum().backward()
    assert counter.get_total_flops() == training_flops(linear / 2)
    assert out.shape == x.shape


@pytest.mark.parametrize(
    ("device", "precision", "tf32", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", False, 312),
        ("NVIDIA H100 80GB HBM3", "bf16-true", True, 989.4),
        ("NVIDIA H100 PCIe", "16-mixed", False, 756),
        ("NVIDIA A100-SXM4-40GB", "32-true", False, 19.5),
        ("NVIDIA A100-SXM4-40GB", "32-true", True, None),  # TF32 has a rate of its own
        ("NVIDIA A100-SXM4-40GB", "64-true", False, None),
        ("NVIDIA H100 NVL", "bf16-mixed", False, None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16-mixed", False, None),
        ("NVIDIA A10G", "bf16-mixed", False, 70),  # not an A10
        ("NVIDIA L40", "bf16-mixed", False, 181),  # not an L40S
        ("NVIDIA L40G", "bf16-mixed", False, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16-mixed", False, None),
        ("Tesla V100-SXM2-32GB", "bf16-mixed", False, None),  # has no bf16
        ("Intel(R) Xeon(R) Processor", "32-true", False, None),
    ],
)
def test_a_peak_is_of_that_device_or_absent(device: str, precision: str, tf32: bool, tera: float | None) -> None:
    assert peak_flops_of(device, precision, tf32=tf32) == (None if tera is None else pytest.approx(tera * 1e12))


def test_other_lengths_than_counted_have_no_utilization() -> None:
    found = Utilization("auto", 1e9)
    found._take(forward=4e6, samples=4, tokens_per_sample=10)
    steps = Throughput(num_devices=2, seconds=2.0, num_steps=2, samples=8, tokens=80)
    assert found.values(steps) == pytest.approx({"throughput/mfu": 0.006, "throughput/tflops_per_device": 6e-6})
    assert found.values(Throughput(num_devices=2, seconds=2.0, num_steps=2, samples=8, tokens=96)) == {}
    assert Utilization("auto", 1e9).values(steps) == Utilization(1e6, "auto").values(steps) == {}
