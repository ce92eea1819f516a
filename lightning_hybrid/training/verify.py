"""Compares the first steps with one process, and refuses to train on if they differ."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_hybrid.batches.randomness import is_same_state, random_state, restore_random_state
from lightning_hybrid.errors import ConfigurationError, VerificationError
from lightning_hybrid.optimizer import grad_norm

__all__ = ["Verify"]

_log = logging.getLogger(__name__)


class Verify(Callback):
    """Runs the first steps on global rank 0 once more, with the whole module and all data ranks' batches.

    Before the first ``num_steps`` optimizer steps the loss and the norm of the whole gradient are compared with
    those of one process on the same weights and batches (the mean over data ranks, as with ``ddp``; with
    ``replica_sync`` every few steps: replica 0 alone, on its own batches). If they differ, all ranks raise
    :class:`~lightning_hybrid.errors.VerificationError`, and no weight has been changed by that step. Weights, random
    states and the order of data stay as they are. For one step rank 0 needs the memory of the whole module, its
    gradients and the activations of one batch, and all others wait.

    Not compared, with one line that says so: steps that draw random numbers (dropout: their masks differ), manual
    optimization, modules that rank 0 cannot hold or copy.

    Args:
        num_steps: Optimizer steps that are compared.
        tolerance: Largest relative difference; by default 1e-4 for fp32 on CPUs, 2e-3 on GPUs, 3e-2 with 16-bit
            numbers.

    Raises:
        ConfigurationError: for other values.
    """

    def __init__(self, num_steps: int = 1, *, tolerance: float | None = None) -> None:
        if type(num_steps) is not int or num_steps < 1:
            raise ConfigurationError(f"num_steps={num_steps!r} must be an integer of at least 1.")
        if tolerance is not None and (not isinstance(tolerance, float) or not 0 < tolerance < 1):
            raise ConfigurationError(f"tolerance={tolerance!r} must be a number between 0 and 1, such as 1e-4.")
        self.num_steps, self.tolerance = num_steps, tolerance
        self.compared: list[dict[str, tuple[float, float]]] = []
        """For each compared step ``loss`` and ``grad_norm``: of this run, and of one process."""
        self._whole: LightningModule | None = None
        self.why_not = ""
        """Why nothing was compared."""
        self._batches: list[tuple[Any, int]] = []
        self._loss = 0.0
        self._left = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep a copy of the module, which is whole only before the strategy has cut it."""
        self._left, self.why_not = (self.num_steps if stage == "fit" else 0), ""
        self._batches, self._loss, self.compared = [], 0.0, []
        if self._left and trainer.is_global_zero:
            try:
                self._whole = copy.deepcopy(pl_module, {id(trainer): trainer})
            except Exception as error:
                self.why_not = f"the module cannot be copied ({type(error).__name__}: {error})"

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._left:
            self._batches.append((batch, batch_idx))

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._left:
            self._loss += float(loss.detach())

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if not self._left:
            return
        self._left -= 1
        strategy: Any = trainer.strategy
        state = getattr(strategy, "whole_state", strategy.lightning_module_state_dict)()  # on rank 0
        mine = {"loss": self._loss, "grad_norm": float(grad_norm(pl_module))}
        batches = self._of_all_data_ranks(trainer)
        told: list[Any] = [None]
        if trainer.is_global_zero:
            told = [self._compare(trainer, state, batches, mine)]
        if trainer.world_size > 1:
            dist.broadcast_object_list(told, 0)
        refusal, self.why_not = told[0]
        self._batches, self._loss = [], 0.0
        if refusal or self.why_not or not self._left:
            self._whole, self._left = None, 0
        if refusal:
            raise VerificationError(refusal)
        if not self._left and not self.why_not and trainer.is_global_zero:
            self._say_equal(trainer.strategy)
        if self.why_not and trainer.is_global_zero:
            _log.warning("Verify has compared nothing: %s.", self.why_not)

    def _say_equal(self, strategy: Any) -> None:
        loss, norm = (self.compared[-1][name][0] for name in ("loss", "grad_norm"))
        count, figures = len(self.compared), f"loss {loss:.6g}, gradient norm {norm:.6g}"
        steps, verb = ("optimizer step", "equals") if count == 1 else (f"{count} optimizer steps", "equal")
        settings = getattr(strategy, "settings", None)
        alone = settings is not None and not settings.replica_sync.is_every_step
        of, rest = (" of replica 0", "; the other replicas were not compared") if alone else ("", "")
        rank_zero_info(f"lightning_hybrid: verified: the first {steps}{of} {verb} one process ({figures}){rest}")

    def _of_all_data_ranks(self, trainer: Trainer) -> list[list[tuple[Any, int]]]:
        """By data rank what it has read since the last step: of those whose gradients are averaged with rank 0's.

        A collective over the world.
        """
        strategy: Any = trainer.strategy
        on_cpu = tree_map_only(Tensor, lambda tensor: tensor.cpu(), self._batches)
        if trainer.world_size == 1:
            return [on_cpu]
        at, settings = strategy.coordinate, getattr(strategy, "settings", None)
        counts = at.tensor == at.pipeline == 0
        if settings is not None and not settings.replica_sync.is_every_step:  # each replica steps by itself
            counts = counts and at.replicate == 0
        found: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(found, (at.data, on_cpu) if counts else None)
        return [batches for _, batches in sorted((one for one in found if one is not None), key=lambda one: one[0])]

    def _compare(self, trainer: Trainer, state: Any, batches: Any, mine: dict[str, float]) -> tuple[str, str]:
        """Return what is wrong, and why it could not be told."""
        if self.why_not:
            return "", self.why_not
        module: Any = self._whole
        if not module.automatic_optimization:
            return "", "it runs with manual optimization"
        before = random_state()
        try:
            module.load_state_dict(state)
            module.to(trainer.strategy.root_device).train()
            theirs = _one_process(trainer, module, batches)
            drawn = not is_same_state(before, random_state())
        except Exception as error:
            return "", f"one process cannot run the step ({type(error).__name__}: {error})"
        finally:
            restore_random_state(before)
            module.zero_grad(set_to_none=True)
            module.to("cpu")
        if drawn:
            return "", "the step draws random numbers, such as dropout's"
        self.compared.append({name: (mine[name], theirs[name]) for name in mine})
        limit = self.tolerance or _tolerance(trainer)
        wrong = [name for name in mine if not abs(mine[name] - theirs[name]) <= limit * max(abs(theirs[name]), 1e-8)]
        if not wrong:
            return "", ""
        figures = "; ".join(f"{name} {mine[name]:.8g}, in one process {theirs[name]:.8g}" for name in wrong)
        return (
            f"Optimizer step {trainer.global_step + 1} differs from one process on the same weights and batches:"
            f" {figures} (limit: {limit:g} of it). {_advice(trainer.strategy)}"
        ), ""


def _advice(strategy: Any) -> str:
    """Where to look: at the degrees that split the module, else at the step itself."""
    layout = getattr(strategy, "layout", None)
    names = ("tensor_parallel_size", "pipeline_parallel_size")
    split = [f"{name}=1" for name in names if getattr(layout, name, 1) > 1]
    if split:
        return f"Try {' and then '.join(split)} to see what changes it, and please report it with the module."
    return (
        "The module is whole on each rank: look for what depends on the rank in the step or a hook (self.global_rank,"
        " the environment, a value that only one rank has)."
    )


def _one_process(trainer: Trainer, module: Any, batches: list[list[tuple[Any, int]]]) -> dict[str, float]:
    """Run the step of each data rank's batches with the whole module; leave its gradients."""
    module.__dict__["log"] = module.__dict__["log_dict"] = lambda *args, **kwargs: None
    module.zero_grad(set_to_none=True)
    number = trainer.accumulate_grad_batches
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)  # as Lightning does
    losses = []
    for rank, of_rank in enumerate(batches):
        for batch, batch_idx in of_rank:
            batch = trainer.strategy.batch_to_device(batch, trainer.strategy.root_device)
            with torch.enable_grad(), trainer.strategy.precision_plugin.train_step_context():
                output = module.training_step(*((batch, batch_idx) if takes_index else (batch,)))
            loss = (output["loss"] if isinstance(output, dict) else output) / number
            (loss / len(batches)).backward()
            losses += [float(loss.detach())] if rank == 0 else []
    norms = [parameter.grad.float().norm() for parameter in module.parameters() if parameter.grad is not None]
    return {"loss": sum(losses), "grad_norm": float(torch.stack(norms).norm()) if norms else 0.0}


def _tolerance(trainer: Trainer) -> float:
    if "16" in str(trainer.precision) or "8" in str(trainer.precision):
        return 3e-2
    return 1e-4 if trainer.strategy.root_device.type == "cpu" else 2e-3
