"""What one rank of a run would hold, found in one process without any device: THE recipe, on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils.data import DataLoader

from lightning_hybrid.choosing.choose import check_run
from lightning_hybrid.errors import ConfigurationError, UnsupportedError
from lightning_hybrid.mesh import build_mesh
from lightning_hybrid.parallelize import parallelize
from lightning_hybrid.strategy import Hybrid3DStrategy
from lightning_hybrid.tensor_parallel.plan import build_tp_plan
from lightning_hybrid.training.setup_pipeline import PipelineSetup

__all__ = ["describe_rank"]


def describe_rank(
    strategy: Hybrid3DStrategy,
    module: L.LightningModule,
    batch: Any,
    *,
    num_devices: int,
    rank: int = 0,
    precision: Any = None,
) -> dict[str, Any]:
    """Return what ``strategy.describe()`` would say on one rank of a run, in this process and without its devices.

    The module becomes that rank's part by the recipe of a real run, on the meta device: its weights take no memory if
    it was built under ``torch.device("meta")`` (or builds itself in ``configure_model``). Module and strategy are used
    up; make new ones for another rank.

    Args:
        strategy: With the degrees and options of the run. ``schedule="auto"`` counts as 1F1B, because schedules are
            timed on the device; no archive is asked, and nothing is tried (``sequence_parallel`` changes no figure).
        module: The module that would be trained.
        batch: A batch of one data rank, on the CPU. Activations are counted for its micro-batches; what the step
            computes outside of the blocks (logits, the loss) takes memory here.
        num_devices: Of the whole run.
        rank: Global rank, from 0.
        precision: As the Trainer's.

    Returns:
        Degrees, schedule, the rank's blocks and parameters, and ``memory``: bytes by kind, see
        :class:`~lightning_hybrid.describing.memory.Memory`.

    Raises:
        ConfigurationError: if the degrees do not fit the model or the devices, or this process is in a run.
        PipelineError: if the step cannot be cut.
        UnsupportedError: if a block would be split by trying, which needs all tensor ranks.
    """
    if not 0 <= rank < num_devices:
        raise ConfigurationError(f"rank={rank} is none of {num_devices} devices; use 0 to {num_devices - 1}.")
    with _process_group(rank, num_devices):
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=1,
            precision=precision,
            logger=False,
            enable_checkpointing=False,
        )
        trainer.state.fn = TrainerFn.FITTING
        strategy.connect(module)
        module.trainer = trainer
        trainer._data_connector.attach_data(module, train_dataloaders=DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
        strategy.cluster_environment = _Standing(rank)
        choice = strategy.choice
        choice.layout, choice.chooses_schedule = choice.resolve(num_devices), False
        check_run(choice, module, strategy.precision_plugin)
        strategy._mesh = module._device_mesh = build_mesh(choice.layout, "cpu")
        with strategy.tensor_init_context(empty_init=True):
            module.configure_model()
        strategy.precision_plugin.convert_module(module)
        setup = _FirstStep(strategy, trainer)
        strategy._part = parallelize(
            module,
            layout=choice.layout,
            mesh=strategy._mesh,
            device=torch.device("meta"),
            settings=strategy.settings,
            first_step=setup,
            seed=0,
        )
        strategy._pipeline = setup if strategy._part.cut is not None else None
        strategy.setup_optimizers(trainer)
        return strategy.describe()


class _Standing(LightningEnvironment):
    """Says that this process is a certain rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def global_rank(self) -> int:
        return self._rank

    def local_rank(self) -> int:
        return 0


class _FirstStep(PipelineSetup):
    """The first step where no tensor ranks are there to try a plan on."""

    def record(self, blocks: list[str]) -> dict[str, Any]:
        """Refuse blocks for which a plan would be found by trying; a given plan is taken as it is."""
        strategy = self._strategy
        plan = build_tp_plan(self._module, strategy.settings.tp_plan, strategy.layout.tensor_parallel_size)
        for name in blocks:
            if all(entry.source == "none" for entry in plan.within(name).entries):
                raise UnsupportedError(
                    f"No plan says how {name} is split over {plan.tensor_parallel_size} ranks. A run finds out by"
                    " trying, for which all of them must be there; pass tp_plan (a run's table at set-up shows what it"
                    " found), or use tensor_parallel_size=1."
                )
        return {}


@contextmanager
def _process_group(rank: int, num_devices: int) -> Iterator[None]:
    """For a while be one rank among many that are not there. Collectives return at once and mean nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    if dist.is_initialized():
        raise ConfigurationError(
            "describe_rank makes a process group of its own, but this process is in one already; call it in a process"
            " that trains nothing, or use strategy.describe() in a run."
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_devices)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it keeps meshes, which a later run's are equal to, with groups that are gone
