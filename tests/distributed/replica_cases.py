"""What replicas should do, written down in plain PyTorch; and what they do."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid import Hybrid3DStrategy
from tests.distributed.equality import QUIET, by_name
from tests.distributed.zoo import Lit, generator

VOCABULARY, WIDTH, NUM_REPLICAS, BATCH = 19, 8, 2, 4
ROWS = torch.randint(0, VOCABULARY, (80, 6), generator=generator())
State = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LitReplica(Lit):
    """The head is the embedding; ``scale`` is frozen; ``mean`` and ``count`` are statistics."""

    adaptive = False

    def __init__(self) -> None:
        super().__init__(nn.Module())
        torch.manual_seed(5)
        self.embedding, self.final = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=False)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        x = self.final(x) * self.scale
        return F.cross_entropy(F.linear(x, self.embedding.weight)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        assert isinstance(self.mean, Tensor) and isinstance(self.count, Tensor)
        self.note(batch)

    def note(self, batch: Tensor) -> None:
        self.mean.lerp_(batch[0].float().mean(), 0.1)  # of the first shard's samples, as with ddp
        self.count += 1

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=0.01) if self.adaptive else torch.optim.SGD(trained, lr=0.1)


class LitAdaptive(LitReplica):
    adaptive = True


@dataclass
class Seen:
    """Weights of one replica after each step (buffers as the next step finds them), and at the end."""

    steps: list[State] = field(default_factory=list)
    after: State = field(default_factory=dict)
    val_losses: list[float] = field(default_factory=list)


class Watch(L.Callback):
    """Notes weights after each batch, before hooks of the module."""

    def __init__(self) -> None:
        self.seen = Seen()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.steps.append(state_of(pl_module))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.after = state_of(pl_module)
        self.seen.val_losses = [float(v) for k, v in trainer.callback_metrics.items() if k == "val_loss"]


def state_of(module: Any) -> State:
    return by_name(module, {**dict(module.named_parameters()), **dict(module.named_buffers())})


def train(make: Any, degrees: dict[str, Any], sync: Any, **options: Any) -> Seen:
    """One rank of a run of ``NUM_REPLICAS`` replicas on one half of the rows each, in order."""
    L.seed_everything(0, verbose=False)
    sizes = {"data_parallel_size": NUM_REPLICAS, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, **degrees}
    strategy = Hybrid3DStrategy(**sizes, replicate_size=NUM_REPLICAS, replica_sync=sync, archive=None)
    watch = Watch()
    callbacks = [watch, *options.pop("callbacks", [])]
    fit = {key: options.pop(key) for key in ("ckpt_path",) if key in options}
    trainer = L.Trainer(
        devices=sizes["data_parallel_size"] * sizes["tensor_parallel_size"] * sizes["pipeline_parallel_size"],
        strategy=strategy,
        callbacks=callbacks,
        use_distributed_sampler=False,
        **{**QUIET, "max_epochs": 1, "max_steps": 10, **options},
    )
    trainer.fit(make(), loader(strategy.coordinate.data, sizes["data_parallel_size"]), **fit)
    return watch.seen


def loader(data_rank: int, num_data: int, num_replicas: int = NUM_REPLICAS) -> DataLoader[Tensor]:
    """Rows of a data rank: those of one replica together have what the simulation's replica has."""
    shards = num_data // num_replicas
    replica, shard = divmod(data_rank, shards)
    return DataLoader(ROWS[replica::num_replicas][shard::shards], batch_size=BATCH // shards)  # type: ignore[arg-type]


@dataclass
class Outer:
    lr: float = 0.7
    momentum: float = 0.9


def simulate(
    make: Any, interval: int, *, outer: Outer | None = None, num_steps: int = 10, sign: float = 1.0, clip: float = 0.0
) -> list[Seen]:
    """The same in plain PyTorch: independent models, and at each exchange a mean, or DiLoCo's outer step."""
    modules = [make() for _ in range(NUM_REPLICAS)]
    optimizers = [module.configure_optimizers() for module in modules]
    batches = [list(loader(r, NUM_REPLICAS)) for r in range(NUM_REPLICAS)]
    names = [name for name, p in modules[0].named_parameters() if p.requires_grad]
    common = {name: modules[0].get_parameter(name).detach().clone() for name in names}
    momentum = {name: torch.zeros_like(value) for name, value in common.items()}
    seen = [Seen() for _ in modules]
    for step in range(1, num_steps + 1):
        for module, optimizer, data in zip(modules, optimizers, batches, strict=True):
            optimizer.zero_grad()
            module.loss(data[step - 1]).backward()
            if clip:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
        if step % interval == 0:
            exchange(modules, names, common, momentum, outer, sign)
        for module, one, data in zip(modules, seen, batches, strict=True):
            one.steps.append(copy.deepcopy(dict(module.state_dict())))
            module.note(data[step - 1])
    if num_steps % interval:
        exchange(modules, names, common, momentum, outer, sign)
    for module, one in zip(modules, seen, strict=True):
        one.after = dict(module.state_dict())
    return seen


@torch.no_grad()
def exchange(
    modules: list[Any], names: list[str], common: State, momentum: State, outer: Outer | None, sign: float
) -> None:
    for name in names:
        mean = torch.stack([module.get_parameter(name) for module in modules]).mean(0)
        if outer is None:
            common[name] = mean
        else:
            gradient = sign * (common[name] - mean)
            momentum[name] = outer.momentum * momentum[name] + gradient
            common[name] = common[name] - outer.lr * (gradient + outer.momentum * momentum[name])
        for module in modules:
            module.get_parameter(name).copy_(common[name])
    mean = torch.stack([module.mean for module in modules]).mean()
    for module in modules:
        module.mean.copy_(mean)
