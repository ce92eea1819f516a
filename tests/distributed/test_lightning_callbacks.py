"""Lightning's own callbacks at data, tensor and pipeline 2: equal to one process, or refused by name."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

import lightning_hybrid.strategy
import lightning_hybrid.training.averages
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.errors import UnsupportedError
from tests.distributed.equality import ONE_PROCESS, QUIET, Trace, assert_equal, must_differ, trace
from tests.distributed.test_optimizers import DEGREES, ROWS, WIDTH, Block
from tests.distributed.zoo import VOCABULARY
from tests.distributed.zoo import Lit as Zoo
from tests.ranks import run_ranks

PLACES = ("dp2", "tp2", "pp2", "2x2x2")
#: What decides, averages and schedules, at all degrees at once.
TOGETHER = ("ema", "one_cycle", "early_stopping", "checkpoints")


class Lit(Zoo):
    """Validates on all rows on each rank, so that what decides is alike everywhere."""

    def __init__(self, norm: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__(nn.Module())
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.lr = norm(), 0.01
        self.register_buffer("scale", torch.tensor(1.0))

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x) * self.scale)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def val_dataloader(self) -> Any:
        return DataLoader(ROWS[:8], batch_size=8)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-3)


class Plateau(Lit):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, threshold=10.0, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class OneCycle(Lit):
    """By step, over as many as Lightning says there will be."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=int(total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Shown(Lit):
    """Has inputs for the summary."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = ROWS[:2]

    def forward(self, batch: Tensor) -> Tensor:
        return self.loss(batch)


class Counted(ModelSummary):
    """Keeps what it would print."""

    found: ClassVar[list[Any]] = []

    @staticmethod
    def summarize(summary_data: Any, total_parameters: int, trainable_parameters: int, *_: Any, **__: Any) -> None:
        rows = {title: list(column) for title, column in summary_data}
        Counted.found[:] = [total_parameters, trainable_parameters, *rows["Name"], *rows["Params"]]


def kept(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "kept", "{epoch}-{val_loss:.3f}", monitor="val_loss", save_top_k=2, save_last=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    callbacks: Callable[[Path], list[Any]] = lambda folder: []
    make: Callable[[], L.LightningModule] = Lit
    options: Any = None
    facts: Callable[[list[Any], Path], Any] = lambda callbacks, folder: None
    """What rank 0 finds, to be compared with one process."""


def saved_averages(callbacks: list[Any], folder: Path) -> dict[str, Tensor]:
    checkpoint = torch.load(folder / "kept" / "last.ckpt", weights_only=True)
    if "current_model_state" in checkpoint:
        states = {"average": checkpoint["state_dict"], "current": checkpoint["current_model_state"]}
    else:
        (state,) = [s for s in checkpoint["callbacks"].values() if "average_model_state" in s]
        states = {"average": state["average_model_state"], "current": checkpoint["state_dict"]}
    return {f"{kind}.{name}": value for kind, state in states.items() for name, value in state.items()}


def averaging(callback: Callable[[], Any]) -> Case:
    return Case(
        callbacks=lambda folder: [callback(), kept(folder)],
        options={"max_epochs": 3, "enable_checkpointing": True},
        facts=saved_averages,
    )


def learning_rates(callbacks: list[Any], folder: Path) -> list[float]:
    with open(folder / "csv" / "version_0" / "metrics.csv") as file:
        return [float(row["lr-AdamW"]) for row in csv.DictReader(file) if row["lr-AdamW"]]


CASES: dict[str, Case] = {
    "swa": averaging(lambda: StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=1)),
    "average": averaging(WeightAveraging),
    "ema": averaging(lambda: EMAWeightAveraging(decay=0.5, use_buffers=False)),
    "ema_of_lists": averaging(lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.5))),
    "accumulation_scheduler": Case(
        callbacks=lambda folder: [GradientAccumulationScheduler({0: 1, 1: 2})], options={"max_epochs": 3}
    ),
    "lr_finder": Case(
        callbacks=lambda folder: [LearningRateFinder(1e-4, 0.1, num_training_steps=16, early_stop_threshold=None)],
        options={"max_epochs": 6},
        facts=lambda callbacks, folder: [*callbacks[0].optimal_lr.results["lr"], callbacks[0].optimal_lr.suggestion()],
    ),
    "plateau": Case(
        make=Plateau,
        callbacks=lambda folder: [LearningRateMonitor()],
        options={"max_epochs": 3, "logger": True},
        facts=learning_rates,
    ),
    "one_cycle": Case(
        make=OneCycle,
        callbacks=lambda folder: [LearningRateMonitor("step")],
        options={"max_epochs": 2, "logger": True, "accumulate_grad_batches": 2},
        facts=learning_rates,
    ),
    "early_stopping": Case(
        callbacks=lambda folder: [EarlyStopping("val_loss", min_delta=1.5, patience=1), Timer("00:01:00:00")],
        options={"max_epochs": 6},
        facts=lambda callbacks, folder: [callbacks[0].stopped_epoch, float(callbacks[0].best_score)],
    ),
    "checkpoints": Case(
        callbacks=lambda folder: [kept(folder)],
        options={"max_epochs": 4, "enable_checkpointing": True},
        facts=lambda callbacks, folder: sorted(path.name for path in (folder / "kept").iterdir()),
    ),
    "summary": Case(
        callbacks=lambda folder: [Counted(2)],
        facts=lambda callbacks, folder: list(Counted.found),
    ),
    "bars": Case(
        make=Shown,
        callbacks=lambda folder: [TQDMProgressBar(), RichModelSummary()],
        options={"enable_progress_bar": True},
    ),
    "rich_bar": Case(
        callbacks=lambda folder: [RichProgressBar(), DeviceStatsMonitor(cpu_stats=False)],
        options={"enable_progress_bar": True, "logger": True, "profiler": "simple"},
    ),
    "profiler": Case(options={"profiler": "advanced"}),
    "torch_profiler": Case(options={"profiler": "torch"}),  # its hooks on modules cannot be copied
    "clip_by_value": Case(options={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "partial_window": Case(options={"max_epochs": 2, "accumulate_grad_batches": 2}),  # 3 batches an epoch
}


PROFILERS: dict[str, Any] = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "torch": PyTorchProfiler}


def run_case(rank: int, case: Case, degrees: dict[str, Any], folder: Path) -> tuple[Trace, Any]:
    options = {**(case.options or {}), "default_root_dir": folder, "log_every_n_steps": 1}
    if options.get("logger"):
        options["logger"] = CSVLogger(folder, name="csv", version=0)
    if name := options.get("profiler"):
        options["profiler"] = PROFILERS[name](dirpath=folder, filename=name)
    callbacks = case.callbacks(folder)
    found = trace(rank, case.make, ROWS, degrees, callbacks=callbacks, **options)
    return found, case.facts(callbacks, folder) if rank == 0 else None


def run_all(rank: int, names: tuple[str, ...], degrees: dict[str, Any], folder: Path, sabotage: Any = None) -> Any:
    if sabotage is not None:
        sabotage()
    return {name: run_case(rank, CASES[name], degrees, folder / name) for name in names}


def check(name: str, expected: Any, found: list[Any]) -> None:
    right, facts = expected[name]
    assert_equal(right, [ranks[name][0] for ranks in found], tolerance=2e-5)
    for key in right.metrics:
        if key != "train_loss":  # of a rank's own samples
            values = [ranks[name][0].metrics[key] for ranks in found]
            assert values == pytest.approx([right.metrics[key]] * len(values), rel=1e-5), key
    if isinstance(facts, dict):
        torch.testing.assert_close(found[0][name][1], facts, rtol=1e-4, atol=1e-5)
    elif facts is not None:
        near = [fact if isinstance(fact, str) else pytest.approx(fact, rel=1e-5) for fact in facts]
        assert found[0][name][1] == near, name


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(1, run_all, tuple(CASES), ONE_PROCESS, tmp_path_factory.mktemp("one"), timeout=120)[0]


@pytest.mark.parametrize("place", PLACES)
def test_equal_one_process(place: str, expected: Any, tmp_path: Path) -> None:
    names = tuple(name for name in CASES if (place, name) != ("dp2", "lr_finder"))  # by rank 0's samples, as with ddp
    names, num_ranks = (TOGETHER, 8) if place == "2x2x2" else (names, 2)
    found = run_ranks(num_ranks, run_all, names, DEGREES[place], tmp_path, timeout=240)
    for name in names:
        check(name, expected, found)


def do_not_adapt() -> None:
    lightning_hybrid.strategy.adapt_callbacks = lambda strategy, module: None


def test_wrong_variant_a_stage_that_is_summed_up_as_the_model_is_seen(expected: Any, tmp_path: Path) -> None:
    found = run_ranks(2, run_all, ("summary",), DEGREES["pp2"], tmp_path, do_not_adapt)
    with must_differ():
        check("summary", expected, found)


# ---- averages: resumed, evaluated after the fit, fitted again --------------------------------------------------------

AVERAGES: dict[str, Callable[[], Any]] = {
    "ema": lambda: EMAWeightAveraging(decay=0.5),
    "swa": lambda: StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=1),
}


def build(degrees: dict[str, Any], callbacks: list[Any], folder: Path, **options: Any) -> tuple[L.Trainer, Any]:
    """A Trainer and rows in one process's order."""
    full = {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, **degrees}
    strategy: Any = full.pop("strategy", None) or (Hybrid3DStrategy(archive=None, **full) if degrees else "auto")
    num_devices = 2 if strategy == "ddp" else math.prod(v for n, v in full.items() if n.endswith("parallel_size"))
    trainer = L.Trainer(
        devices=num_devices,
        strategy=strategy,
        callbacks=callbacks,
        use_distributed_sampler=False,
        default_root_dir=folder,
        **{**QUIET, **options},
    )
    where = trainer.strategy.distributed_sampler_kwargs if degrees else {"num_replicas": 1, "rank": 0}
    sampler = DistributedSampler(ROWS, **where, shuffle=False)
    return trainer, DataLoader(ROWS, batch_size=8 // where["num_replicas"], sampler=sampler)


def go_on(rank: int, degrees: dict[str, Any], start: dict[str, Any], folder: Path) -> list[float]:
    """Fit, validate and fit on with one Trainer; then resume with another one. ``start``: the first one's degrees."""
    values = []
    for name, kind in AVERAGES.items():
        L.seed_everything(0, verbose=False)
        trainer, rows = build(start, [kind(), kept(folder / name)], folder, max_epochs=2, enable_checkpointing=True)
        module = Lit()
        trainer.fit(module, rows)
        values += [trainer.validate(module, verbose=False)[0]["val_loss"]]
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, rows)
        values += [trainer.validate(module, verbose=False)[0]["val_loss"]]
        trainer, rows = build(degrees, [kind()], folder, max_epochs=5)
        module = Lit()
        trainer.fit(module, rows, ckpt_path=folder / name / "kept" / "last.ckpt")
        values += [float(trainer.callback_metrics["val_loss"]), trainer.validate(module, verbose=False)[0]["val_loss"]]
    return values


def forgetful(rank: int, *args: Any) -> list[float]:
    """Weights are resumed without their average."""
    lightning_hybrid.training.averages.Average._load_from_state_dict = lambda *_: None  # type: ignore[method-assign]
    return go_on(rank, *args)


def test_averages_go_on(tmp_path: Path) -> None:
    (right,) = run_ranks(1, go_on, ONE_PROCESS, ONE_PROCESS, tmp_path / "one")
    for place in ("dp2", "pp2"):
        for found in run_ranks(2, go_on, DEGREES[place], DEGREES[place], tmp_path / place, timeout=120):
            assert found == pytest.approx(right, rel=1e-5), place
    assert run_ranks(2, forgetful, DEGREES["pp2"], DEGREES["pp2"], tmp_path / "wrong")[0] != pytest.approx(
        right, rel=1e-3
    )


# ---- throughput: each sample counts once ----------------------------------------------------------------------------


def throughputs(rank: int, degrees: dict[str, Any], folder: Path, sabotage: Any = None) -> list[dict[str, float]]:
    if sabotage is not None:
        sabotage()
    monitor = ThroughputMonitor(batch_size_fn=len, window_size=2)
    logger = CSVLogger(folder, name="csv", version=0)
    options = {"max_epochs": 2, "logger": logger, "log_every_n_steps": 1, "limit_val_batches": 0}
    trace(rank, Lit, ROWS, degrees, callbacks=[monitor], default_root_dir=folder, **options)
    if rank > 0:
        return []
    with open(folder / "csv" / "version_0" / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["train/device/samples_per_sec"]]
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


def check_throughput(rows: list[dict[str, float]], num_ranks: int) -> None:
    assert len(rows) == 5
    for before, after in pairwise(rows):
        seconds = after["train/time"] - before["train/time"]
        assert after["train/device/samples_per_sec"] == pytest.approx(8 / num_ranks / seconds)
        if num_ranks > 1:
            assert after["train/samples_per_sec"] == pytest.approx(8 / seconds)
            assert after["train/batches_per_sec"] == pytest.approx(8 / after["batch"] / seconds)


def test_samples_count_once_in_the_throughput(tmp_path: Path) -> None:
    for place, num_ranks in {"dp2": 2, "tp2": 2, "pp2": 2}.items():
        rows = run_ranks(num_ranks, throughputs, DEGREES[place], tmp_path / place)[0]
        check_throughput([{**row, "batch": 4 if place == "dp2" else 8} for row in rows], num_ranks)
    rows = run_ranks(2, throughputs, DEGREES["pp2"], tmp_path / "wrong", do_not_adapt)[0]
    with must_differ():
        check_throughput([{**row, "batch": 8} for row in rows], 2)


# ---- what is refused -------------------------------------------------------------------------------------------------


class OnMeta(Lit):
    def configure_model(self) -> None:
        with torch.device("meta"):
            self.blocks = nn.ModuleList(Block() for _ in range(2))


@pytest.mark.parametrize(
    ("make", "callback", "words"),
    [
        (Lit, BatchSizeFinder, r"BatchSizeFinder tries batch sizes.*Leave it out"),
        (Lit, lambda: ModelPruning("l1_unstructured"), r"ModelPruning replaces parameters.*Prune in one process"),
        (
            lambda: Lit(lambda: nn.BatchNorm1d(8)),
            lambda: StochasticWeightAveraging(0.1),
            r"StochasticWeightAveraging ends with .* statistics of norm .*Use WeightAveraging",
        ),
        (Lit, BackboneFinetuning, r"BackboneFinetuning adds groups.*requires_grad_\(True\) in on_train_epoch_start"),
        (OnMeta, WeightAveraging, r"average of the weights cannot be taken from a checkpoint.*on the CPU"),
    ],
)
def test_refused_by_name(make: Any, callback: Any, words: str, tmp_path: Path) -> None:
    def train(rank: int) -> None:
        degrees = DEGREES["pp2" if callback is BackboneFinetuning else "dp2"]
        trainer, rows = build(degrees, [callback()], tmp_path, max_epochs=1)
        trainer.fit(make(), rows, ckpt_path=path if make is OnMeta else None)

    path = tmp_path / "start.ckpt"
    if make is OnMeta:
        trainer, rows = build(ONE_PROCESS, [], tmp_path, max_steps=1, limit_val_batches=0)
        trainer.fit(Lit(), rows)
        trainer.save_checkpoint(path)
    with pytest.raises(UnsupportedError, match=words):
        run_ranks(2, train)


# ---- decisions of ranks that see different values, as with ddp -------------------------------------------------------


class Diverges(Lit):
    """Each data rank logs a value of its own, falling on rank 0 and from the third epoch on another one on rank 1."""

    def __init__(self, other: float) -> None:
        super().__init__()
        self.other = other

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loss(batch)
        epoch, is_first = float(self.trainer.current_epoch), DATA_RANK == 0
        self.log("value", 10 - epoch if is_first or epoch < 2 else self.other)


DATA_RANK = 0
OTHERS = (20.0, float("nan"))
"""What the other rank's value becomes."""


def decide(rank: int, degrees: dict[str, Any], folder: Path, others: tuple[float, ...] = OTHERS) -> list[Any]:
    """Which checkpoints are kept, which is best for this rank, when training stops, and which rate is found."""
    global DATA_RANK
    found: list[Any] = []
    for other in others:
        keep = ModelCheckpoint(folder / str(other), "{epoch}", monitor="value", save_top_k=2, save_last=True)
        stop = EarlyStopping("value", patience=1)
        find = LearningRateFinder(1e-4, 0.1, num_training_steps=16, early_stop_threshold=None)
        for callbacks in ([keep], [stop], [find]) if other == 20.0 else ([keep], [stop]):
            options = {"max_epochs": 6, "num_sanity_val_steps": 0, "enable_checkpointing": callbacks == [keep]}
            trainer, rows = build(degrees, callbacks, folder, **options)
            L.seed_everything(0, verbose=False)
            DATA_RANK = trainer.strategy.distributed_sampler_kwargs["rank"]
            trainer.fit(Diverges(other), rows)
            found.append(trainer.current_epoch)
        names = sorted(path.name for path in (folder / str(other)).iterdir())
        found += [names, Path(keep.best_model_path).name, stop.stopped_epoch]
        found += [find.optimal_lr.suggestion()] if find.optimal_lr else []
    return found


def test_decisions_are_those_of_ddp(tmp_path: Path) -> None:
    """Also when one rank's value makes it want to stop, or to keep something else, and with all axes at once."""
    first, second = run_ranks(2, decide, {"strategy": "ddp"}, tmp_path / "ddp", timeout=120)
    assert first[0] == 6 and first[1] < 6  # a rank that diverges stops all of them
    assert run_ranks(2, decide, DEGREES["dp2"], tmp_path / "dp2", timeout=120) == [first, second]
    in_order = [first, first, second, second] * 2  # tensor ranks are neighbours, and stages are furthest apart
    found = run_ranks(8, decide, DEGREES["2x2x2"], tmp_path / "2x2x2", OTHERS[:1], timeout=240)
    assert found == [rank[: len(found[0])] for rank in in_order]
    assert len(found[0]) == 7
