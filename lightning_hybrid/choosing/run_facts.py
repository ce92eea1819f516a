"""What is known of a run before it has begun: the model, a data rank's batch, the devices. Nothing is left behind."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid.archive import Fingerprint, fingerprint_module
from lightning_hybrid.batches.randomness import random_state, restore_random_state
from lightning_hybrid.planner.cluster import Cluster
from lightning_hybrid.planner.gpus import find_gpu
from lightning_hybrid.planner.host import host_cluster
from lightning_hybrid.planner.profile import ModelProfile

logger = logging.getLogger(__name__)

__all__ = ["BatchFacts", "batch_facts", "cluster_here", "known_fingerprint", "profile_here", "whole_model"]

#: Taken where nothing says it.
_SAMPLES, _LENGTH = 8, 512
_LENGTH_NAMES = (
    "seq_length",
    "seq_len",
    "context_length",
    "block_size",
    "max_seq_length",
    "max_seq_len",
    "max_length",
    "max_position_embeddings",
    "n_positions",
)


@dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """A data rank's batch."""

    samples: int
    length: int
    assumed: tuple[str, ...] = ()
    """What nothing said, in words."""


def whole_model(module: Any) -> nn.Module:
    """Return the module, or what its ``configure_model`` would make of it on the meta device.

    ``module`` itself stays as it is, and so do the random states.
    """
    hook = getattr(type(module), "configure_model", None)
    has_parameters = next(iter(module.parameters()), None) is not None
    if has_parameters or hook is None or hook.__module__.startswith("lightning."):
        return module  # type: ignore[no-any-return]
    twin = copy.copy(module)  # its attributes, but registries of its own, so that nothing is registered on the module
    state = {name: copy.deepcopy(value) for name, value in module._modules.items()}
    twin.__dict__ |= {"_modules": state, "_parameters": dict(module._parameters), "_buffers": dict(module._buffers)}
    states = random_state()
    try:
        with torch.device("meta"):
            twin.configure_model()
    finally:
        restore_random_state(states)
    return twin  # type: ignore[no-any-return]


def known_fingerprint(module: Any) -> Fingerprint:
    """Return the fingerprint of the whole model, also of one that ``configure_model`` is still to build.

    Where it cannot be built beforehand (its ``configure_model`` wants its ranks) the fingerprint is that of a model
    without parameters, which matches none.
    """
    try:
        return fingerprint_module(whole_model(module))
    except Exception as error:  # user code, called where it did not expect it
        logger.debug("configure_model does not run on the meta device before the run: %s", error)
        return fingerprint_module(module)


def batch_facts(module: Any, trainer: Any) -> BatchFacts:
    """Return a data rank's batch size and sequence length, as far as the script says them. No loader is made or read.

    The size is that of a loader given to ``fit``, else a number named ``batch_size`` of data module, module or
    hyperparameters; the length that of samples in a tensor or list, else a usual name for it, or the positions' table.
    """
    loop = getattr(trainer, "fit_loop", None)
    given = getattr(getattr(loop, "_data_source", None), "instance", None)
    owners = [getattr(trainer, "datamodule", None), module]
    owners += [getattr(owner, name, None) for owner in owners for name in ("hparams", "config")]
    owners += [getattr(part, "config", None) for part in module.modules() if hasattr(part, "config")][:4]
    samples, length = None, None
    if isinstance(given, DataLoader):
        samples = given.batch_size or getattr(given.batch_sampler, "batch_size", None)
        length = _length_of(given.dataset)
    samples = samples or _number(owners, ("batch_size", "train_batch_size", "per_device_train_batch_size"))
    length = length or _number(owners, _LENGTH_NAMES) or _positions(module)
    assumed = [f"batches of {_SAMPLES}"] if samples is None else []
    assumed += [f"samples of {_LENGTH} tokens"] if length is None else []
    return BatchFacts(samples=int(samples or _SAMPLES), length=int(length or _LENGTH), assumed=tuple(assumed))


def _length_of(dataset: Any) -> int | None:
    """Tokens of a sample, where reading one runs no code of the user's."""
    if isinstance(dataset, TensorDataset):
        dataset = dataset.tensors[0]
    if isinstance(dataset, Tensor):
        return dataset.shape[1] if dataset.dim() >= 2 else None
    if not isinstance(dataset, list) or not dataset:
        return None
    sample = dataset[0]
    if isinstance(sample, Mapping):
        sample = sample.get("input_ids", next(iter(sample.values()), None))
    elif isinstance(sample, (tuple, list)) and sample and isinstance(sample[0], (Tensor, list)):
        sample = sample[0]
    if isinstance(sample, Tensor):
        return sample.shape[0] if sample.dim() else None
    return len(sample) if isinstance(sample, list) else None


def _number(owners: Iterable[Any], names: Iterable[str]) -> int | None:
    for owner in owners:
        for name in names:
            value = owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _positions(module: nn.Module) -> int | None:
    """Rows of the smaller one of two tables: words and positions."""
    tables = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    return min(tables) if len(tables) > 1 else None


def profile_here(module: nn.Module, length: int, blocks: Any) -> ModelProfile:
    """See :meth:`ModelProfile.from_module`.

    Raises:
        ConfigurationError: if there are no blocks with linear layers.
    """
    return ModelProfile.from_module(module, seq_length=length, blocks=blocks)


def cluster_here(device: torch.device, num_devices: int, num_nodes: int) -> Cluster:
    """Return the devices of this run, by their data sheet; a CPU's by two measurements of some milliseconds.

    Raises:
        ConfigurationError: if nothing is known of the device.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found = Cluster.named(find_gpu(properties.name).name, num_devices, per_node=max(1, num_devices // num_nodes))
        return found
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gflops, bandwidth = _speed()
    return host_cluster(
        num_ranks=num_devices,
        num_nodes=num_nodes,
        cores=cores,
        threads=threads,
        gflops=gflops,
        bandwidth=bandwidth,
        memory_bytes=_free_bytes(),
    )


def _speed() -> tuple[float, float]:
    """GFLOP/s of a matrix product, GB/s of a copy: the best of five each."""
    side = 512
    one, other = torch.ones(side, side), torch.ones(side, side)
    source = torch.ones(4 * 2**20)
    target = torch.empty_like(source)

    def best(run: Any) -> float:
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    with torch.no_grad():
        product = best(lambda: torch.mm(one, other))
        moved = best(lambda: target.copy_(source))
    return 2 * side**3 / product / 1e9, 2 * source.nbytes / moved / 1e9


def _free_bytes() -> float:
    """What the host's processes may use: what is free now, and the half of what there is at least."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            lines: Sized | list[str] = [line for line in file if line.startswith("MemAvailable")]
            assert isinstance(lines, list)
            return max(total / 2, float(lines[0].split()[1]) * 1024)
    except (OSError, IndexError, ValueError):
        return total
