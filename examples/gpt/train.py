"""Trains the example's GPT with data x tensor x pipeline parallelism; this is what ``make demo`` runs.

    python -m examples.gpt.train                # 2 x 2 x 2 on 8 CPU processes, or on all GPUs of this machine
    python -m examples.gpt.train                # again: takes its degrees from the archive of the run before
    python -m examples.gpt.train --devices 1    # one device: the baseline of the scaling efficiency

Everything that it writes lies in one folder (``--folder``): the archive, the W&B run (offline) and the timeline.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import wandb
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import WandbLogger

from examples.gpt.data import PythonTopics
from examples.gpt.module import LitGPT
from examples.gpt.report import HeldOutLoss, Report
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.archive import (
    Archive,
    choose_degrees,
    detect_hardware,
    failed_degrees,
    find_baseline,
    fingerprint_module,
)
from lightning_hybrid.callbacks import BubbleRatio, ConfigArchive, ScalingEfficiency, StepBreakdown
from lightning_hybrid.layout import Layout

ON_GPU = torch.cuda.is_available()
NUM_DEVICES = torch.cuda.device_count() if ON_GPU else 8
BATCH_SIZE = 32
CONTEXT_LENGTH = 64
TP_PLAN = {
    "blocks.*.attention.q": "colwise",  # each tensor rank has some of the heads ...
    "blocks.*.attention.k": "colwise",
    "blocks.*.attention.v": "colwise",
    "blocks.*.attention.o": "rowwise",  # ... and adds its share to the sum
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
}
"""Which matrices tensor parallelism splits, and along which side."""


def main() -> None:
    """Measure one device if that has not been done, then train on all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--devices", type=int, default=NUM_DEVICES, help="GPUs, or processes on CPU (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=80, help="optimizer steps, at most one epoch (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/gpt"), help="what is written (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.steps < 8:
        parser.error(f"--steps {arguments.steps} is too few to measure anything; use 8 or more")
    if not ON_GPU:  # one thread stands for one device, also in the processes that follow
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
    if arguments.devices > 1 and "LOCAL_RANK" not in os.environ:  # not in the ranks that Lightning starts
        measure_one_device(arguments.folder)
    train(arguments.devices, arguments.steps, arguments.folder)


def measure_one_device(folder: Path, num_steps: int = 30) -> None:
    """Leave an archive entry of a short run on one device, unless there is one: what scaling is measured against."""
    archive, hardware = Archive(folder / "archive"), detect_hardware(device_type(), num_devices=1)
    if find_baseline(archive.known(), fingerprint_module(LitGPT()), hardware) is not None:
        return
    print(f"First {num_steps} steps on one device, to compare with ...", flush=True)
    command = [sys.executable, "-m", "examples.gpt.train", "--devices", "1"]
    command += ["--steps", str(num_steps), "--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    measured = find_baseline(archive.known(), fingerprint_module(LitGPT()), hardware)
    if done.returncode or measured is None:
        sys.exit(done.stdout)
    print(f"One device: {measured.result.samples_per_second:.1f} samples/s, the mean over the run.", flush=True)


def train(num_devices: int, num_steps: int, folder: Path) -> None:
    """An ordinary Lightning script, but for the strategy and four callbacks."""
    L.seed_everything(0, verbose=False)
    module = LitGPT(context_length=CONTEXT_LENGTH)
    data = PythonTopics(batch_size=BATCH_SIZE, context_length=CONTEXT_LENGTH)
    for message in (".*does not have many workers", ".*isinstance.treespec, LeafSpec"):  # the second is Lightning's own
        warnings.filterwarnings("ignore", message)
    archive, every = str(folder / "archive"), max(4, num_steps // 4)
    held_out = HeldOutLoss()
    measurements = (
        StepBreakdown(every_n_steps=every),
        BubbleRatio(every_n_steps=every),
        ScalingEfficiency(archive if num_devices > 1 else None, every_n_steps=every),
        ConfigArchive(archive),
    )
    trainer = L.Trainer(
        accelerator="cuda" if ON_GPU else "cpu",
        devices=num_devices,
        strategy=Hybrid3DStrategy(
            **degrees_to_give(module, num_devices, archive),
            tp_plan=TP_PLAN,
            archive=archive,
            start_method="popen" if ON_GPU else "fork",  # forked processes need not import torch again
        ),
        max_epochs=1,
        limit_train_batches=num_steps,
        num_sanity_val_steps=-1,  # the held-out loss before training
        log_every_n_steps=5,
        logger=build_logger(folder) if num_devices > 1 else False,
        callbacks=[RichProgressBar(), held_out, *measurements, Report(held_out, *measurements)],
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, data)


def build_logger(folder: Path) -> WandbLogger:
    """Weights & Biases without an account: the run stays in the folder."""
    quiet = wandb.Settings(silent=True)
    return WandbLogger(project="lightning-hybrid-demo", save_dir=folder, offline=True, settings=quiet)


def degrees_to_give(module: LitGPT, num_devices: int, archive: str) -> dict[str, Any]:
    """The demo's degrees; none, which leaves them to the strategy, if the archive knows a run on as many devices.

    It starts from that run if it went well, and takes others if these degrees failed (ran out of memory, say).
    """
    hardware, fingerprint = detect_hardware(device_type(), num_devices=num_devices), fingerprint_module(module)
    entries = Archive(archive).known()
    known = choose_degrees(entries, fingerprint, hardware, num_devices)
    if known is not None and known.entry.hardware.num_devices == num_devices:
        return {}
    tensor = 2 if num_devices % 2 == 0 else 1
    pipeline = 2 if num_devices % (2 * tensor) == 0 else 1
    data = num_devices // tensor // pipeline
    degrees = {"data_parallel_size": data, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    return {} if Layout(**degrees) in failed_degrees(entries, fingerprint, hardware) else degrees


def device_type() -> str:
    """The type of device that the demo runs on."""
    return "cuda" if ON_GPU else "cpu"


if __name__ == "__main__":
    main()
