"""The model's own operations, counted in a run, and the devices' peak: what MFU needs."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hybrid.measuring.flops import count_flops
from lightning_hybrid.metrics.throughput import Throughput
from lightning_hybrid.metrics.utilization import model_flops_utilization, peak_flops_of, training_flops

__all__ = ["Utilization"]

#: Batches are alike while their tokens for each sample differ by less.
_ALIKE = 0.02


class Utilization:
    """Counts the operations of the first batch on global rank 0, and says once why there is no MFU if there is none.

    Args:
        flops_per_sample: operations that training on a sample needs; ``"auto"`` counts those of the first forward.
        peak_flops: FLOP/s of one device; ``"auto"`` asks the table of data sheets.
    """

    def __init__(self, flops_per_sample: float | str, peak_flops: float | str) -> None:
        self.flops_per_sample = None if isinstance(flops_per_sample, str) else flops_per_sample
        self.peak_flops = None if isinstance(peak_flops, str) else peak_flops
        self._counts, self._asks = self.flops_per_sample is None, self.peak_flops is None
        self._tokens_per_sample: float | None = None
        self._said = False

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """At the start of training: find the peak."""
        device = trainer.strategy.root_device
        if self._asks and device.type == "cuda":
            tf32 = torch.get_float32_matmul_precision() != "highest"
            name = torch.cuda.get_device_name(device)
            self.peak_flops = peak_flops_of(name, str(trainer.precision), tf32=tf32)
        if self.peak_flops is None:
            self._say(
                f"the peak of this device ({device.type}) at precision {trainer.precision} is not known for certain"
                " (TF32, parts of devices and unknown ones are not); give peak_flops=..., in FLOP/s of one device"
            )

    def count(self, trainer: Trainer, module: LightningModule, samples: int, tokens: int) -> None:
        """Before the first batch: have its forward counted."""
        self._counts, strategy = False, trainer.strategy
        layout: Any = getattr(strategy, "layout", None)
        if not all(parameter.requires_grad for parameter in module.parameters()):
            self._say("some weights are not trained, whose backward is cheaper; give flops_per_sample=...")
        elif layout is not None and layout.pipeline_parallel_size > 1:
            hybrid: Any = strategy
            self._take(hybrid.describe()["forward_flops_per_sample"], 1, tokens / samples)
        elif layout is not None and layout.tensor_parallel_size > 1:
            self._say("ranks of a tensor group count their shares only; give flops_per_sample=...")
        else:
            self._watch(strategy, samples, tokens)

    @property
    def is_open(self) -> bool:
        """Whether a batch is to be counted yet."""
        return self._counts and self.peak_flops is not None

    def _watch(self, strategy: Any, samples: int, tokens: int) -> None:
        step = strategy.training_step

        def counted(*args: Any, **kwargs: Any) -> Any:
            del strategy.training_step
            with count_flops() as counter:
                output = step(*args, **kwargs)
            self._take(counter.get_total_flops(), samples, tokens / samples)
            return output

        strategy.training_step = counted

    def _take(self, forward: float, samples: int, tokens_per_sample: float) -> None:
        if not forward:
            self._say("no operations were counted (compiled code, kernels of your own); give flops_per_sample=...")
            return
        self.flops_per_sample, self._tokens_per_sample = training_flops(forward) / samples, tokens_per_sample

    def values(self, recent: Throughput) -> dict[str, float]:
        """Return the MFU of some steps; nothing where it is not certain."""
        flops, peak, counted = self.flops_per_sample, self.peak_flops, self._tokens_per_sample
        if flops is None or peak is None or not recent.samples:
            return {}
        tokens = (recent.tokens or 0) / recent.samples
        if counted is not None and not math.isclose(tokens, counted, rel_tol=_ALIKE):
            self._say("sequences differ in length from those that were counted; give flops_per_sample=...")
            return {}
        done = flops * recent.samples_per_second / recent.num_devices
        mfu = model_flops_utilization(
            flops_per_sample=flops,
            samples_per_second=recent.samples_per_second,
            num_devices=recent.num_devices,
            peak_flops=peak,
        )
        return {"throughput/mfu": mfu, "throughput/tflops_per_device": done / 1e12}

    def _say(self, why: str) -> None:
        if not self._said:
            self._said = True
            rank_zero_info(f"lightning_hybrid: no throughput/mfu: {why}.")
