"""Plain checkpoints of spread modules, and back: equal to one process bit for bit, at every layout.

Gradients are an elementwise function of the weights, so AdamW gives the same bits however the tensors are cut; the
modules are cut by torch's own functions, so an error in our slices cannot hide behind itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Optimizer

from lightning_hybrid.checkpoint import consolidate, shares
from lightning_hybrid.checkpoint.consolidate import (
    StateKeys,
    gather_model_state,
    gather_optimizer_state,
    scatter_model_state,
    scatter_optimizer_state,
)
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.layout import Layout
from lightning_hybrid.mesh import build_mesh, data_mesh
from lightning_hybrid.pipeline.holes import placeholder

VOCABULARY, WIDTH, HIDDEN = 17, 5, 7  # nothing divides by 2 or 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)  # has persistent buffers, one of them an integer


class Toy(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def build(seed: int = 0, *, tied: bool = False) -> Toy:
    torch.manual_seed(seed)
    module = Toy(tied=tied)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = torch.randn(tensor.shape).to(tensor.dtype) + seed if tensor.ndim else torch.tensor(11 + seed)
    module.table = torch.arange(3.0)
    module.seen = 5 + seed
    return module


def adamw(module: nn.Module) -> Optimizer:
    named = dict(module.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if "norm" not in name], "weight_decay": 0.1},
        {"params": [p for name, p in named.items() if "norm" in name], "weight_decay": 0.0, "lr": 0.02},
    ]
    return AdamW(groups, lr=0.01, foreach=False)


def train(optimizer: Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach() * 0.5 + 0.1
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5  # as a scheduler does


def stage_of(name: str, num_stages: int) -> int:
    """Blocks in even parts; the embedding and what belongs to no block first, the head last."""
    if name.startswith("blocks."):
        return int(name.split(".")[1]) * num_stages // 3
    return num_stages - 1 if name.startswith("head") else 0


def spread(module: Toy, layout: Layout, rank: int, *, fsdp: bool = True) -> tuple[StateKeys, DeviceMesh]:
    """Cut a stage, split, shard: with torch's own functions."""
    mesh = build_mesh(layout, "cpu")
    num_stages = layout.pipeline_parallel_size
    stage = num_stages - 1 - layout.coordinate(rank).pipeline  # rank 0 holds the last stage
    keys = StateKeys.of(module, lambda name: stage_of(name, num_stages) == stage)
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        path, _, attribute = name.rpartition(".")
        part = module.get_submodule(path)
        if stage_of(name, num_stages) != stage:
            del part._parameters[attribute]
            part.__dict__[attribute] = placeholder(parameter)
            for buffer in part.buffers(recurse=False):
                buffer.data = torch.full_like(buffer, 99)  # another stage's buffers are stale here
    if layout.tensor_parallel_size > 1:
        styles = {"embedding": RowwiseParallel(), "head": ColwiseParallel()}
        styles |= {f"blocks.{i}.up": ColwiseParallel() for i in range(3)}
        styles |= {f"blocks.{i}.down": RowwiseParallel() for i in range(3)}
        held = {k: s for k, s in styles.items() if any(True for _ in module.get_submodule(k).parameters())}
        if module.head._parameters.get("weight") is module.embedding._parameters.get("weight") is not None:
            held.pop("head")  # tied: one tensor, split once
            parallelize_module(module, mesh["tensor_parallel"], held)
            module.head.weight = module.embedding.weight
        else:
            parallelize_module(module, mesh["tensor_parallel"], held)
    if fsdp and (shards := data_mesh(mesh)) is not None:
        for block in module.blocks:
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=shards)
        fully_shard(module, mesh=shards)
    return keys, mesh


def gather(module: nn.Module, optimizer: Optimizer, keys: StateKeys, mesh: DeviceMesh) -> dict[str, Any]:
    state = {"state_dict": gather_model_state(module, keys, mesh)}
    return {**state, "optimizer": gather_optimizer_state(optimizer, module, keys, mesh)}


def in_process_group(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(rank: int, *args: Any) -> Any:
        dist.init_process_group("gloo")
        try:
            return function(rank, *args)
        finally:
            dist.destroy_process_group()

    return run


def save_and_resume(rank: int, layout: Layout, tied: bool, plain: str, out: str) -> None:
    """Fresh -> 3 steps -> ``out`` + "fresh"; and ``plain`` -> another module -> 2 steps -> ``out`` + "resumed"."""
    module = build(tied=tied)
    keys, mesh = spread(module, layout, rank)
    optimizer = adamw(module)
    train(optimizer, 3)
    state = gather(module, optimizer, keys, mesh)
    if rank == 0:
        torch.save(state, out + "fresh")
    assert list(state["state_dict"]) == list(build(tied=tied).state_dict())
    assert rank == 0 or state["optimizer"] == {}

    module = build(seed=1, tied=tied)
    keys, mesh = spread(module, layout, rank)
    optimizer = adamw(module)
    checkpoint = torch.load(plain, mmap=True, weights_only=True)
    assert scatter_model_state(module, checkpoint["state_dict"], keys, True) == ([], [])
    scatter_optimizer_state(optimizer, checkpoint["optimizer"], module, keys, mesh)
    train(optimizer, 2)
    state = gather(module, optimizer, keys, mesh)
    if rank == 0:
        torch.save(state, out + "resumed")


def in_one_process(num_steps: int, tied: bool) -> dict[str, Any]:
    module = build(tied=tied)
    optimizer = adamw(module)
    train(optimizer, num_steps)
    return {"state_dict": module.state_dict(), "optimizer": optimizer.state_dict()}


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Paths at which two nested states differ in any bit."""
    if isinstance(one, dict):
        if one.keys() != other.keys() or ("state_dict" in path and list(one) != list(other)):
            yield f"{path} keys {list(one)} != {list(other)}"
        for key in one.keys() & other.keys():
            yield from differences(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list):
        if len(one) != len(other):
            yield f"{path} length"
        for i, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from differences(a, b, f"{path}/{i}")
    elif isinstance(one, Tensor):
        if type(other) is not type(one) or one.dtype != other.dtype or not torch.equal(one, other):
            yield path
    elif one != other:
        yield f"{path} {one!r} != {other!r}"


LAYOUTS = {
    "tp2": Layout(tensor_parallel_size=2),
    "tp4": Layout(tensor_parallel_size=4),
    "dp2": Layout(data_parallel_size=2),
    "hsdp2x2": Layout(data_parallel_size=4, replicate_size=2),
    "dp2-tp2": Layout(data_parallel_size=2, tensor_parallel_size=2),
    "dp3-tp2": Layout(data_parallel_size=3, tensor_parallel_size=2),
    "pp2": Layout(pipeline_parallel_size=2),
    "pp3": Layout(pipeline_parallel_size=3),
    "pp2-tp2": Layout(pipeline_parallel_size=2, tensor_parallel_size=2),
    "pp2-hsdp2x2-tp2": Layout(data_parallel_size=4, replicate_size=2, tensor_parallel_size=2, pipeline_parallel_size=2),
}


def run_and_compare(
    name: str, tied: bool, folder: Path, run_ranks: Callable[..., Any], files: tuple[str, ...] = ("fresh", "resumed")
) -> list[str]:
    """What differs from one process, in what was saved and in what one process makes of it."""
    layout, out, found = LAYOUTS[name], str(folder / "out-"), []
    torch.save(in_one_process(3, tied), folder / "plain")
    run_ranks(layout.world_size, in_process_group(save_and_resume), layout, tied, str(folder / "plain"), out)
    for file in files:
        saved = torch.load(out + file, weights_only=True)
        names = saved["optimizer"].pop("param_names")
        assert sorted(name for group in names for name in group) == sorted(dict(build(tied=tied).named_parameters()))
        num_steps = 3 if file == "fresh" else 5
        found += differences(in_one_process(num_steps, tied), saved, file)
        module, optimizer = plain_resume(saved, tied)
        train(optimizer, 2)
        resumed = {"state_dict": module.state_dict(), "optimizer": optimizer.state_dict()}
        found += differences(in_one_process(num_steps + 2, tied), resumed, f"{file} and on")
    return found


@pytest.mark.parametrize(
    ("name", "tied"),
    [*((name, False) for name in LAYOUTS), ("tp2", True), ("pp2", True), ("dp2-tp2", True), ("pp2-tp2", True)],
)
def test_equals_one_process(name: str, tied: bool, tmp_path: Path, run_ranks: Callable[..., Any]) -> None:
    assert run_and_compare(name, tied, tmp_path, run_ranks) == []


def test_wrong_rows_are_noticed(tmp_path: Path, run_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = consolidate.share_of
    monkeypatch.setattr(consolidate, "share_of", lambda like, whole, **how: real(like, whole.flip(0), **how))
    found = run_and_compare("dp2", False, tmp_path, run_ranks)
    assert "resumed/state_dict/head.weight" in found
    assert "resumed/optimizer/state/0/exp_avg" in found
    assert not any(path.startswith("fresh") for path in found)


def test_left_out_optimizer_state_is_noticed(
    tmp_path: Path, run_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "scatter_optimizer_state", lambda *_: None)
    found = run_and_compare("pp2", False, tmp_path, run_ranks)
    assert "resumed/state_dict/head.weight" in found
    assert "resumed/optimizer/state/0/step" in found


def test_cuts_read_from_left_to_right_are_noticed(
    tmp_path: Path, run_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shares, "_order_of_cuts", lambda t: [a for a, p in enumerate(t.placements) if hasattr(p, "dim")]
    )
    with pytest.raises(CheckpointError, match=r"'blocks\.0.*A share of shape .* leaves"):
        run_and_compare("dp3-tp2", False, tmp_path, run_ranks)


def plain_resume(checkpoint: dict[str, Any], tied: bool) -> tuple[nn.Module, Optimizer]:
    module = build(seed=2, tied=tied)
    module.load_state_dict(checkpoint["state_dict"], strict=True)
    optimizer = adamw(module)
    optimizer.load_state_dict(checkpoint["optimizer"])
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})  # names must not get into the way
    optimizer.param_groups.pop()
    return module, optimizer


def on_two_stages(function: Callable[..., Any], num_tensor: int = 2) -> Callable[..., Any]:
    """Run ``function(module, keys, mesh)`` on pipeline x tensor ranks and return what it returned or raised."""

    def run(rank: int) -> Any:
        module = build()
        keys, mesh = spread(module, Layout(pipeline_parallel_size=2, tensor_parallel_size=num_tensor), rank)
        try:
            return function(module, keys, mesh)
        except (CheckpointError, RuntimeError) as error:
            return str(error)

    return in_process_group(run)


def test_keys_are_judged_alike_on_every_rank(run_ranks: Callable[..., Any]) -> None:
    whole = build().state_dict()
    del whole["blocks.0.up.weight"], whole["head.weight"]
    whole["blocks.7.up.weight"] = torch.zeros(1)
    expected = build().load_state_dict(whole, strict=False)

    def load(module: Toy, keys: StateKeys, mesh: DeviceMesh) -> tuple[list[str], list[str]]:
        return scatter_model_state(module, whole, keys, False)

    results = run_ranks(4, on_two_stages(load))
    assert [(sorted(missing), unexpected) for missing, unexpected in results] == [
        (sorted(expected.missing_keys), expected.unexpected_keys)
    ] * 4

    def load_strictly(module: Toy, keys: StateKeys, mesh: DeviceMesh) -> tuple[list[str], list[str]]:
        return scatter_model_state(module, whole, keys, True)

    for text in run_ranks(4, on_two_stages(load_strictly)):
        assert all(key in text for key in ("Missing key(s)", "blocks.0.up.weight", "head.weight", "Unexpected key(s)"))


def test_another_shape_is_refused_on_every_rank(run_ranks: Callable[..., Any]) -> None:
    whole = build().state_dict()
    whole["head.weight"] = torch.zeros(18, WIDTH)

    def load(module: Toy, keys: StateKeys, mesh: DeviceMesh) -> tuple[list[str], list[str]]:
        return scatter_model_state(module, whole, keys, False)

    for text in run_ranks(4, on_two_stages(load)):
        assert "size mismatch for head.weight" in text
        assert f"[18, {WIDTH}]" in text
        assert f"[17, {WIDTH}]" in text


def test_hooks_of_the_module_see_the_whole(run_ranks: Callable[..., Any]) -> None:
    """A hook that renames keys of old files, and one that leaves frozen weights out of new ones."""

    def rename(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in [key for key in state_dict if key.startswith("old.")]:
            state_dict[key.removeprefix("old.")] = state_dict.pop(key)

    def without_embedding(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        del state_dict["embedding.weight"]

    old = {f"old.{key}": value for key, value in build(seed=3).state_dict().items()}

    def load_and_save(module: Toy, keys: StateKeys, mesh: DeviceMesh) -> dict[str, Any]:
        module.register_load_state_dict_pre_hook(rename)
        assert scatter_model_state(module, old, keys, True) == ([], [])
        module.register_state_dict_post_hook(without_embedding)
        return gather_model_state(module, keys, mesh)

    saved, *others = run_ranks(4, on_two_stages(load_and_save))
    expected = build(seed=3).state_dict()
    del expected["embedding.weight"]
    assert all(list(other) == list(expected) for other in others)
    assert all(value.is_meta for other in others for value in other.values() if isinstance(value, Tensor))
    assert list(differences({"state_dict": expected}, {"state_dict": saved})) == []


@pytest.mark.parametrize(
    ("make", "num_tensor"),
    [
        (lambda parameters: SGD(parameters, lr=0.1, foreach=False), 2),
        (lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, foreach=False), 2),
        (lambda parameters: AdamW(parameters, lr=0.1, amsgrad=True, foreach=False), 2),
        (lambda parameters: Adafactor(parameters, lr=0.1), 1),  # torch's does not run on DTensors
    ],
    ids=["sgd", "momentum", "amsgrad", "adafactor"],
)
def test_other_optimizers(make: Callable[..., Optimizer], num_tensor: int, run_ranks: Callable[..., Any]) -> None:
    def reference(num_steps: int) -> dict[str, Any]:
        module = build()
        optimizer = make(list(module.parameters()))
        train(optimizer, num_steps)
        return {"state_dict": module.state_dict(), "optimizer": optimizer.state_dict()}

    def resume(module: Toy, keys: StateKeys, mesh: DeviceMesh) -> dict[str, Any]:
        plain = reference(2)
        scatter_model_state(module, plain["state_dict"], keys, True)
        optimizer = make(list(module.parameters()))
        scatter_optimizer_state(optimizer, plain["optimizer"], module, keys, mesh)
        train(optimizer, 1)
        return gather(module, optimizer, keys, mesh)

    saved = run_ranks(2 * num_tensor, on_two_stages(resume, num_tensor))[0]
    assert isinstance(saved, dict), saved
    del saved["optimizer"]["param_names"]
    assert list(differences(reference(3), saved)) == []


def test_state_of_unknown_shape_is_refused_on_every_rank(run_ranks: Callable[..., Any]) -> None:
    def save(module: Toy, keys: StateKeys, mesh: DeviceMesh) -> dict[str, Any]:
        optimizer = adamw(module)
        train(optimizer, 1)
        split = [p for p in module.parameters() if isinstance(p, DTensor)]
        optimizer.state[split[0]]["sketch"] = torch.zeros(3)
        return gather_optimizer_state(optimizer, module, keys, mesh)

    for text in run_ranks(4, on_two_stages(save)):
        assert "'sketch' of 'embedding.weight'" in text or "'sketch' of 'blocks" in text
        assert "AdamW keeps a plain tensor of shape (3,)" in text


def test_state_of_its_own_shape_stays_whole(run_ranks: Callable[..., Any]) -> None:
    """State that is a DTensor says itself how it is placed."""

    def save_and_load(module: Toy, keys: StateKeys, mesh: DeviceMesh) -> dict[str, Any]:
        optimizer = adamw(module)
        train(optimizer, 1)
        for parameter in module.parameters():
            optimizer.state[parameter]["rows"] = parameter.new_full((3,), 7.0)
        box = [gather_optimizer_state(optimizer, module, keys, mesh)]
        dist.broadcast_object_list(box, src=0)
        other = adamw(module)
        scatter_optimizer_state(other, box[0], module, keys, mesh)
        assert all(type(other.state[p]["rows"]) is type(p.data) for p in module.parameters())
        return gather_optimizer_state(other, module, keys, mesh)

    saved = run_ranks(4, on_two_stages(save_and_load))[0]
    assert len(saved["state"]) == 20
    assert all(torch.equal(values["rows"], torch.full((3,), 7.0)) for values in saved["state"].values())


def test_another_optimizer_is_refused_on_every_rank(run_ranks: Callable[..., Any]) -> None:
    module = build()
    whole = AdamW(module.parameters()).state_dict()

    def load(module: Toy, keys: StateKeys, mesh: DeviceMesh) -> None:
        scatter_optimizer_state(adamw(module), whole, module, keys, mesh)

    for text in run_ranks(4, on_two_stages(load)):
        assert "has 1 groups of [20] parameters, this run's has 2 groups of [14, 6]" in text


def reversed_groups(module: Toy) -> Optimizer:
    """Names parts of the model one by one, and not in its order; keeps state from the start, as Adagrad does."""
    body = [module.blocks[1].down.weight, *module.blocks[0].parameters(), *module.blocks[2].parameters()]
    return Adagrad([{"params": [module.head.weight, module.embedding.weight]}, {"params": body[::-1]}], lr=0.1)


def test_an_optimizer_of_any_order(run_ranks: Callable[..., Any]) -> None:
    """configure_optimizers runs on the completed module, so its order is one process's, and no group is lost."""

    def reference(num_steps: int) -> dict[str, Any]:
        module = build()
        optimizer = reversed_groups(module)
        train(optimizer, num_steps)
        return {"state_dict": module.state_dict(), "optimizer": optimizer.state_dict()}

    def resume(module: Toy, keys: StateKeys, mesh: DeviceMesh) -> dict[str, Any]:
        with keys.completed(module):
            optimizer = reversed_groups(module)
        order = keys.release(optimizer, module)
        assert order[0] == ["head.weight", "embedding.weight"]
        assert len(optimizer.param_groups[0]["params"]) == 1
        assert not any(p.is_meta for p in (*optimizer.state, *module.parameters()))
        plain = reference(2)
        scatter_model_state(module, plain["state_dict"], keys, True)
        scatter_optimizer_state(optimizer, plain["optimizer"], module, keys, mesh, order)
        train(optimizer, 1)
        state = {"state_dict": gather_model_state(module, keys, mesh)}
        return {**state, "optimizer": gather_optimizer_state(optimizer, module, keys, mesh, order)}

    saved = run_ranks(2, on_two_stages(resume, 1))[0]
    assert isinstance(saved, dict), saved
    assert saved["optimizer"].pop("param_names")[1][-1] == "blocks.1.down.weight"
    assert list(differences(reference(3), saved)) == []


def test_a_key_that_no_stage_owns_is_refused(run_ranks: Callable[..., Any]) -> None:
    def save(rank: int) -> str:
        module = build()
        keys = StateKeys.of(module, lambda name: name != "head.weight")
        if rank:
            return str(len(gather_model_state(module, keys, None)))
        with pytest.raises(CheckpointError, match=r"No pipeline stage contributes \['head\.weight'\]"):
            gather_model_state(module, keys, None)
        return "refused"

    assert run_ranks(2, in_process_group(save)) == ["refused", str(len(build().state_dict()))]


def test_without_a_process_group() -> None:
    module = build()
    keys = StateKeys.of(module, lambda name: True)
    optimizer = adamw(module)
    train(optimizer, 3)
    saved = {
        "state_dict": gather_model_state(module, keys, None),
        "optimizer": gather_optimizer_state(optimizer, module, keys, None),
    }
    other = build(seed=1)
    resumed = adamw(other)
    scatter_model_state(other, saved["state_dict"], keys, True)
    scatter_optimizer_state(resumed, saved["optimizer"], other, keys, None)
    train(resumed, 2)
    found = {"state_dict": other.state_dict(), "optimizer": resumed.state_dict()}
    assert list(differences(in_one_process(5, False), found)) == []
