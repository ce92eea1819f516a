"""What replicas should do, written down in plain PyTorch; and what they do."""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
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
    """Weights of one replica at the start, after each step and at the end."""

    before: State = field(default_factory=dict)
    steps: list[State] = field(default_factory=list)
    after: State = field(default_factory=dict)


class Watch(L.Callback):
    """Notes weights after each batch, before hooks of the module."""

    def __init__(self) -> None:
        self.seen = Seen()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.before = state_of(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.steps.append(state_of(pl_module))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.after = state_of(pl_module)


def state_of(module: Any) -> State:
    return by_name(module, {**dict(module.named_parameters()), **dict(module.named_buffers())})


def train(
    make: Any, degrees: dict[str, Any], sync: Any, *, number: int = NUM_REPLICAS, loaders: bool = True, **options: Any
) -> Seen:
    """One rank of a run of ``number`` replicas on their share of the rows each, in order; or on the module's own."""
    L.seed_everything(0, verbose=False)
    sizes = {"data_parallel_size": number, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, **degrees}
    sizes["replicate_size"] = options.pop("replicate_size", number)
    strategy = Hybrid3DStrategy(**sizes, replica_sync=sync, archive=None)
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
    own = loader(strategy.coordinate.data, sizes["data_parallel_size"], number)
    trainer.fit(make(), own if loaders else None, **fit)
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


@dataclass
class Streaming:
    num_fragments: int
    delay: int
    mixing: float


def simulate_streaming(make: Any, interval: int, outer: Outer, how: Streaming, num_steps: int = 10) -> list[State]:
    """Weights of all replicas after each step (one dict for both, by replica), and after the end's closing."""
    modules = [make() for _ in range(NUM_REPLICAS)]
    optimizers = [module.configure_optimizers() for module in modules]
    batches = [list(loader(r, NUM_REPLICAS)) for r in range(NUM_REPLICAS)]
    names = [name for name, p in modules[0].named_parameters() if p.requires_grad]
    fragments: list[list[str]] = [[] for _ in range(how.num_fragments)]
    for name in names:
        in_turn = int(name.split(".")[1]) % how.num_fragments if name.startswith("blocks.") else how.num_fragments - 1
        fragments[in_turn].append(name)
    common = {name: modules[0].get_parameter(name).detach().clone() for name in names}
    momentum = {name: torch.zeros_like(value) for name, value in common.items()}
    on_the_way: dict[int, State] = {}
    states = []

    def leave(fragment: int) -> None:
        on_the_way[fragment] = {
            name: common[name] - torch.stack([m.get_parameter(name).detach() for m in modules]).mean(0)
            for name in fragments[fragment]
        }

    @torch.no_grad()
    def arrive(fragment: int, mixing: float) -> None:
        for name, gradient in on_the_way.pop(fragment).items():
            momentum[name] = outer.momentum * momentum[name] + gradient
            common[name] = common[name] - outer.lr * (gradient + outer.momentum * momentum[name])
            for module in modules:
                own = module.get_parameter(name)
                own.copy_(mixing * own + (1 - mixing) * common[name])

    for step in range(1, num_steps + 1):
        for module, optimizer, data in zip(modules, optimizers, batches, strict=True):
            optimizer.zero_grad()
            module.loss(data[step - 1]).backward()
            optimizer.step()
        for fragment in range(how.num_fragments):
            due = (fragment + 1) * interval // how.num_fragments
            if step % interval == due % interval:
                leave(fragment)
            if fragment in on_the_way and (step - how.delay) % interval == due % interval:
                arrive(fragment, how.mixing)
        states.append(
            {f"{r}.{name}": modules[r].get_parameter(name).detach().clone() for r in (0, 1) for name in names}
        )
    for fragment in sorted(on_the_way):
        arrive(fragment, how.mixing)
    for fragment in range(how.num_fragments):  # mixed weights differ, so all of them lack an exchange
        leave(fragment)
        arrive(fragment, 0.0)
    states.append({f"{r}.{name}": modules[r].get_parameter(name).detach().clone() for r in (0, 1) for name in names})
    return states


@dataclass
class Call:
    """One collective: after how many optimizer steps, its ranks and bytes (0 where they are not known)."""

    step: int
    name: str
    ranks: list[int]
    num_bytes: int


TENSORS = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "isend", "irecv")
OBJECTS = ("barrier", "all_gather_object", "broadcast_object_list", "gather_object")


class Calls(L.Callback):
    """Notes every collective that is called while training goes on from batch to batch."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.is_on, self.step = False, 0
        for name in (*TENSORS, *OBJECTS):
            setattr(dist, name, self.noting(name, getattr(dist, name)))

    def noting(self, name: str, right: Any) -> Any:
        signature = inspect.signature(right)

        @functools.wraps(right)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if self.is_on:
                given = signature.bind(*args, **kwargs).arguments
                ranks = dist.get_process_group_ranks(given.get("group") or dist.group.WORLD)
                tensors = [value for value in given.values() if isinstance(value, Tensor)]
                num_bytes = max((tensor.nbytes for tensor in tensors), default=0) if name in TENSORS else 0
                self.calls.append(Call(self.step, name, ranks, num_bytes))
            return right(*args, **kwargs)

        return noted

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.is_on, self.step = batch_idx > 0, trainer.global_step  # the first batch also finds its order of units

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.is_on = self.is_on and trainer.global_step < trainer.max_steps
