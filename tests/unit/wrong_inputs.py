"""Wrong inputs and what must be said of each: a table. To add one, add a line.

An input is (group, what is given, what the message must contain). What is given is an argument, a text of a file, or a
command line; :data:`GROUPS` says how a group's inputs are used. Every message must name what was given and what would
be right, so there are at least two words for each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_hybrid import Hybrid3DStrategy, ReplicaSync
from lightning_hybrid.archive import Archive, Entry
from lightning_hybrid.batches.microbatches import BatchSplitter
from lightning_hybrid.callbacks import BubbleRatio, ConfigArchive, FiniteGradients, ScalingEfficiency, StepBreakdown
from lightning_hybrid.checkpoint.files import read_checkpoint
from lightning_hybrid.layout import Layout, resolve_layout
from lightning_hybrid.machine.rank_variables import check_rank_variables
from lightning_hybrid.optimizer import global_grad_norm
from lightning_hybrid.pipeline.schedule import find_schedule
from lightning_hybrid.planner import Cluster, ModelProfile, plan
from tests.unit.archive_entries import make_entry

__all__ = ["COMMANDS", "GROUPS", "WRONG", "YAML"]


def _changed(changes: dict[str, Any]) -> Entry:
    """Read an archive entry in which fields were changed; ``"a.b"`` names a field of a field."""
    document = json.loads(make_entry().to_json())
    for path, value in changes.items():
        *outer, name = path.split(".")
        target = document
        for key in outer:
            target = target[key]
        if value is _GONE:
            del target[name]
        else:
            target[name] = value
    return Entry.from_json(json.dumps(document))


_GONE = object()


def _written(read: Callable[[Path], Any], name: str) -> Callable[[Any, Path], Any]:
    def use(text: Any, folder: Path) -> Any:
        path = folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read(path)

    return use


def _profile(sizes: dict[str, Any]) -> ModelProfile:
    usual = {"num_layers": 8, "hidden_size": 256, "num_heads": 8, "seq_length": 128, "vocab_size": 1000}
    return ModelProfile.from_sizes(**{**usual, **sizes})


def _plan(arguments: dict[str, Any]) -> Any:
    usual = {"global_batch": 64, "precision": "bf16"}
    return plan(_profile({}), Cluster.named("H100", 8), **{**usual, **arguments})


def _split(batch: Any, unbatched: Any = None, samples: int | None = None) -> Any:
    return BatchSplitter(unbatched).split(batch, 2)


def _ranks(variables: dict[str, str], num_nodes: int = 1) -> None:
    """As each of two processes on each node does."""
    usual = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": str(2 * num_nodes), "MASTER_ADDR": "127.0.0.1"}
    usual |= {"MASTER_PORT": "29500", "NODE_RANK": "0"}
    with mock.patch.dict(os.environ, {**usual, **variables}):
        check_rank_variables(LightningEnvironment(), num_devices=2, num_nodes=num_nodes)


_SIZES = ("--num_layers", "4", "--hidden_size", "64", "--num_heads", "4", "--seq_length", "128")

#: Group -> how its inputs are used.
GROUPS: dict[str, Callable[[Any, Path], Any]] = {
    "strategy": lambda given, _: Hybrid3DStrategy(**given),
    "replica sync": lambda given, _: ReplicaSync(**given),
    "devices": lambda given, _: resolve_layout(given[0], **given[1]),
    "layout": lambda given, _: Layout(**given),
    "rank": lambda given, _: Layout(data_parallel_size=2).coordinate(given),
    "StepBreakdown": lambda given, _: StepBreakdown(**given),
    "BubbleRatio": lambda given, _: BubbleRatio(**given),
    "ScalingEfficiency": lambda given, _: ScalingEfficiency(**given),
    "ConfigArchive": lambda given, _: ConfigArchive(**given),
    "FiniteGradients": lambda given, _: FiniteGradients(**given),
    "schedule": lambda given, _: find_schedule(given),
    "schedule file": _written(find_schedule, "mine.csv"),
    "entry": lambda given, _: Entry.from_json(given),
    "entry's field": lambda given, _: _changed(given),
    "archive": lambda given, folder: Archive(folder / "archive").get(given),
    "cluster": lambda given, _: Cluster.named(**given),
    "cluster file": _written(Cluster.from_json, "cluster.json"),
    "model": lambda given, _: _profile(given),
    "plan": lambda given, _: _plan(given),
    "checkpoint": _written(lambda path: read_checkpoint(path, TorchCheckpointIO()), "broken.ckpt"),
    "norm": lambda given, _: global_grad_norm([], mesh=None, norm_type=given),
    "batch": lambda given, _: _split(given),
    "environment": lambda given, _: _ranks(*given),
}

Input = tuple[str, Any, tuple[str, ...]]


def _each(group: str, name: str, values: list[Any], *words: str) -> list[Input]:
    """One input for each value of an argument; its name and value must be said."""
    return [(group, {name: value}, (name, repr(value), *words)) for value in values]


_DEGREES = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "replicate_size")

_STRATEGY: list[Input] = [
    *[line for name in _DEGREES for line in _each("strategy", name, [0, -1, 1.5, "two", True, None], "auto")],
    *_each("strategy", "num_microbatches", [0, -4, 2.0, "many", False], "auto"),
    *_each("strategy", "stages_per_rank", [0, "all", 1.5], "auto"),
    *_each("strategy", "schedule", ["fastest", "1f1b ", ""], "1F1B"),
    *_each("strategy", "schedule", [3, None], "schedule"),
    *_each("strategy", "blocks", [3, ["a", 3], b"layers"], "model.layers"),
    *_each("strategy", "unbatched", ["mask", 3, [1]], "list of names"),
    *[
        line
        for name in ("load_once", "whole_batch_loss", "loss_parallel", "sequence_parallel", "cpu_offload")
        for line in _each("strategy", name, ["yes", 1, None], "True or False")
    ],
    *_each("strategy", "tp_plan", ["colwise", 3, {1: "colwise"}], "dict"),
    *_each("strategy", "reshard_after_forward", ["no", 0], "True, False or None"),
    *_each("strategy", "activation_checkpointing", ["all", 3, True, ["no.such_op"]], "full"),
    *_each("strategy", "compile", ["yes", 3], "compile"),
    *_each("strategy", "save_distributed_checkpoint", ["sync", 1, None], "async"),
    *_each("strategy", "archive", [5, True], "folder"),
    *_each("strategy", "verify", ["yes", -1, 1.0, None], "how many optimizer steps"),
    *_each("strategy", "start_method", ["thread", None, 1], "fork"),
    *_each("strategy", "process_group_backend", ["mpi2", 3, "cuda:gloo2"], "gloo"),
    *_each("strategy", "timeout", [30, "30 s", timedelta(0), timedelta(seconds=-5)], "timedelta"),
    *_each("strategy", "replica_sync", [0, -2, "often", 1.5], "replica_sync"),
    ("strategy", {"whole_batch_loss": True, "schedule": "1F1B"}, ("whole_batch_loss=True", "GPipe")),
    ("strategy", {"sequence_parallel": True, "compile": True}, ("sequence_parallel=True", "compile=False")),
    ("strategy", {"schedule": "1F1B", "stages_per_rank": 2}, ("stages_per_rank=2", "Interleaved1F1B")),
    ("strategy", {"schedule": "nowhere/mine.csv"}, ("nowhere/mine.csv", "cannot be read")),
    ("strategy", {"replica_sync": {"sync_every": 4}}, ("sync_every", "interval")),
]

_REPLICAS: list[Input] = [
    ("replica sync", {"interval": 0}, ("interval=0", "at least 1")),
    ("replica sync", {"interval": 4, "method": "median"}, ("method='median'", "average")),
    ("replica sync", {"interval": 4, "outer_lr": 0}, ("outer_lr=0", "positive")),
    ("replica sync", {"interval": 4, "outer_momentum": 1}, ("outer_momentum=1", "excluded")),
    ("replica sync", {"interval": 4, "num_fragments": 5}, ("num_fragments=5", "interval=4")),
    ("replica sync", {"interval": 4, "delay": 4}, ("delay=4", "at most 3")),
    ("replica sync", {"interval": 4, "mixing": 2.0}, ("mixing=2.0", "excluded")),
    ("replica sync", {"interval": 4, "dtype": "float16"}, ("dtype='float16'", "bfloat16")),
    ("replica sync", {"interval": 4, "close_before": ["lunch"]}, ("lunch", "validation")),
    ("replica sync", {"interval": 4, "method": "auto"}, ('method="auto"', "interval=4")),
]

_DEVICES: list[Input] = [
    ("devices", (8, {"data_parallel_size": 3}), ("data_parallel_size=3", "8 devices", "1, 2, 4, 8")),
    ("devices", (8, {"tensor_parallel_size": 16}), ("tensor_parallel_size=16", "8 devices")),
    ("devices", (6, {"data_parallel_size": 2, "pipeline_parallel_size": 2}), ("makes 4", "6 devices")),
    ("devices", (8, {"data_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 1}), ("4", "8")),
    ("devices", (4, {"data_parallel_size": 4, "replicate_size": 3}), ("replicate_size=3", "data_parallel_size=4")),
    ("devices", (4, {"data_parallel_size": "all"}), ("data_parallel_size='all'", "auto")),
    ("layout", {"data_parallel_size": 0}, ("data_parallel_size=0", "at least 1")),
    ("layout", {"tensor_parallel_size": -2}, ("tensor_parallel_size=-2", "at least 1")),
    ("layout", {"data_parallel_size": 4, "replicate_size": 3}, ("replicate_size=3", "4")),
    ("rank", 2, ("rank 2", "0..1")),
    ("rank", -1, ("rank -1", "0..1")),
]

_CALLBACKS: list[Input] = [
    *[
        line
        for callback in ("StepBreakdown", "BubbleRatio", "ScalingEfficiency", "ConfigArchive")
        for name in ("every_n_steps", "num_warmup_steps")
        for line in _each(callback, name, [-1, 1.5, "often"], "integer")
    ],
    *_each("StepBreakdown", "profile_every", [-1, "never"], "profile_every"),
    *_each("ScalingEfficiency", "tokens", ["words", -3], "auto"),
    *_each("FiniteGradients", "action", ["ignore", None], "skip"),
    *_each("FiniteGradients", "most_in_a_row", [0, 1.5], "at least 1"),
    ("ConfigArchive", {"url": "nosuchprotocol://x"}, ("nosuchprotocol", "cannot open")),
]

_SCHEDULES: list[Input] = [
    ("schedule", "2F2B", ("2F2B", "1F1B", "GPipe")),
    ("schedule", "gpipe2", ("gpipe2", "GPipe")),
    ("schedule file", "", ("mine.csv", "no action")),
    ("schedule file", "0F0,0F1\n", ("mine.csv", "0B0")),
    ("schedule file", "0F0,0B0\n1F0\n", ("mine.csv", "1")),
    ("schedule file", "hello,world\n", ("hello", "0F0")),
    ("schedule file", "0F0,0F0,0B0\n", ("0F0", "2 times")),
    ("schedule file", "0B0,0F0\n", ("0B0", "Change the order")),
    ("schedule file", "0X0\n", ("0X0", "F")),
    ("schedule file", b"\xff\xfe\x00", ("mine.csv", "decode")),
    ("schedule file", "0F0,0B0\n0F1,0B1\n", ("stage 0", "rank")),
]

_ENTRIES: list[Input] = [
    ("entry", "", ("not JSON", "Expecting value")),
    ("entry", "{", ("not JSON", "line 1")),
    ("entry", "[]", ("not an archive entry", "schema")),
    ("entry", "3", ("not an archive entry", "schema")),
    ("entry", '{"a": 1}', ("not an archive entry", "schema")),
    ("entry", '{"schema": "one"}', ("not an archive entry", "schema")),
    ("entry", '{"schema": 999}', ("999", "update")),
    ("entry", '{"schema": 1}', ("missing", "entry.id")),
    ("entry", "[" * 100_000, ("not JSON", "nest")),
    ("entry", '{"schema": 1, "id": NaN}', ("entry.id", "nan")),
    ("entry's field", {"id": "../../etc/passwd"}, ("../../etc/passwd", "id")),
    ("entry's field", {"id": ""}, ("id", "''")),
    ("entry's field", {"id": 3}, ("entry.id", "3")),
    ("entry's field", {"time": "yesterday"}, ("yesterday", "2026-07-31T09:30:00Z")),
    ("entry's field", {"updated": 12}, ("entry.updated", "12")),
    ("entry's field", {"degrees.data_parallel_size": 0}, ("data_parallel_size=0", "at least 1")),
    ("entry's field", {"degrees.data_parallel_size": "2"}, ("data_parallel_size", "'2'")),
    ("entry's field", {"degrees.replicate_size": 3}, ("replicate_size=3", "data_parallel_size=2")),
    ("entry's field", {"hardware.num_devices": 7}, ("7", "8")),
    ("entry's field", {"hardware.links": []}, ("hardware.links", "[]")),
    ("entry's field", {"model": None}, ("entry.model", "None")),
    ("entry's field", {"model.num_parameters": "many"}, ("num_parameters", "many")),
    ("entry's field", {"model": _GONE}, ("entry.model", "missing")),
    ("entry's field", {"result.status": "great"}, ("great", "'ok'")),
    ("entry's field", {"result.samples_per_second": "fast"}, ("samples_per_second", "fast")),
    ("entry's field", {"result.breakdown": {"compute": "x"}}, ("breakdown", "'x'")),
    ("entry's field", {"settings.num_microbatches": 1.5}, ("num_microbatches", "1.5")),
    ("entry's field", {"batch.global_size": []}, ("global_size", "[]")),
    ("entry's field", {"training.learning_rate": "0.1"}, ("learning_rate", "0.1")),
    ("archive", "nothing", ("nothing", "archive")),
    ("archive", "../secret", ("../secret", "archive")),
    ("archive", "", ("entry", "id")),
]

_PLANNER: list[Input] = [
    ("cluster", {"device": "H900", "num_devices": 8}, ("H900", "H100")),
    ("cluster", {"device": "", "num_devices": 8}, ("''", "H100")),
    ("cluster", {"device": "H100", "num_devices": 0}, ("num_devices=0", "positive")),
    ("cluster", {"device": "H100", "num_devices": -8}, ("num_devices=-8", "positive")),
    ("cluster", {"device": "H100", "num_devices": 8, "per_node": -1}, ("per_node=-1", "positive")),
    ("cluster", {"device": "H100", "num_devices": 8, "link": -3.0}, ("link=-3.0", "positive")),
    ("cluster", {"device": "H100", "num_devices": 8, "network_gbits": -1.0}, ("network", "positive")),
    ("cluster file", "", ("cluster.json", "Expecting value")),
    ("cluster file", "[]", ("cluster.json", "list")),
    ("cluster file", "{}", ("cluster.json", "device")),
    ("cluster file", '{"device": "H100"}', ("cluster.json", "num_devices")),
    ("cluster file", '{"device": 3, "num_devices": 8}', ("cluster.json", "device")),
    ("cluster file", '{"device": "H100", "num_devices": "8"}', ("cluster.json", "num_devices")),
    ("cluster file", '{"device": "H100", "num_devices": 8, "speed": 3}', ("cluster.json", "speed")),
    ("cluster file", '{"device": {"name": "x"}, "num_devices": 8}', ("cluster.json", "device")),
    ("cluster file", '{"device": "H100", "num_devices": 8, "measured": 3}', ("cluster.json", "measured")),
    ("cluster file", '{"schema": 99, "device": "H100", "num_devices": 8}', ("cluster.json", "99")),
    ("cluster file", " " * (17 << 20), ("cluster.json", "bytes are more than")),
    ("cluster file", "[" * 100_000, ("cluster.json", "recursion")),
    ("cluster file", b"\xff\xfe", ("cluster.json", "utf-8")),
    *[
        ("model", {name: value}, (name, repr(value), "at least 1"))
        for name in ("num_layers", "hidden_size", "num_heads", "seq_length")
        for value in (0, -1)
    ],
    ("model", {"hidden_size": 250}, ("250", "num_heads=8")),
    ("plan", {"global_batch": 0}, ("global_batch=0", "at least 1")),
    ("plan", {"global_batch": -3}, ("global_batch=-3", "at least 1")),
    ("plan", {"precision": "int3"}, ("int3", "bf16")),
]

_OTHERS: list[Input] = [
    ("checkpoint", "", ("broken.ckpt", "empty")),
    ("checkpoint", "no checkpoint", ("broken.ckpt", "checkpoint")),
    ("checkpoint", b"PK\x03\x04", ("broken.ckpt", "checkpoint")),
    ("checkpoint", b"\x80\x04\x95", ("broken.ckpt", "checkpoint")),
    ("norm", 0, ("norm_type=0", "positive")),
    ("norm", -2.0, ("norm_type=-2.0", "positive")),
    ("norm", float("nan"), ("norm_type=nan", "positive")),
    ("batch", {}, ("batch", "tensor")),
    ("batch", {"x": 3}, ("batch", "tensor")),
    ("batch", {"x": torch.zeros(0, 3)}, ("0", "sample")),
    ("batch", {"x": torch.zeros(())}, ("batch", "tensors from the dataset")),
]

_ENVIRONMENT: list[Input] = [
    *[
        ("environment", ({name: value},), (f"{name}={value!r}", "integer of at least"))
        for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT")
        for value in ("", "first", "-1", "1.5")
    ],
    ("environment", ({"WORLD_SIZE": "+-2"},), ("WORLD_SIZE='+-2'", "an integer of at least 1")),
    ("environment", ({"WORLD_SIZE": "0"},), ("WORLD_SIZE='0'", "at least 1")),
    ("environment", ({"MASTER_PORT": "0"},), ("MASTER_PORT='0'", "at least 1")),
    ("environment", ({"MASTER_PORT": "99999"},), ("MASTER_PORT=99999", "65535")),
    ("environment", ({"LOCAL_RANK": "2"},), ("LOCAL_RANK=2", "0 to 1", "devices=")),
    ("environment", ({"NODE_RANK": "1"},), ("NODE_RANK=1", "num_nodes=")),
    ("environment", ({"NODE_RANK": "2"}, 2), ("NODE_RANK=2", "0 to 1")),
    ("environment", ({"WORLD_SIZE": "8"},), ("WORLD_SIZE=8", "2 processes")),
    ("environment", ({"RANK": "2"},), ("RANK=2", "0 to 1")),
    ("environment", ({"MASTER_ADDR": ""},), ("MASTER_ADDR=''", "machine with rank 0")),
    ("environment", ({"MASTER_ADDR": "not a machine"},), ("MASTER_ADDR='not a machine'", "machine with rank 0")),
]

_STRATEGY_PATH, _CALLBACKS_PATH = "lightning_hybrid.Hybrid3DStrategy", "lightning_hybrid.callbacks"
#: ``trainer:`` of a LightningCLI's YAML, and what must be said.
YAML: list[tuple[str, tuple[str, ...]]] = [
    *[
        (f"strategy: {{class_path: {_STRATEGY_PATH}, init_args: {{{arguments}}}}}", words)
        for arguments, words in [
            ("pipeline_parallel_size: two", ("pipeline_parallel_size", "two", "auto")),
            ("pipeline_parallel_size: 0", ("pipeline_parallel_size=0", "at least 1")),
            ("pipeline_parallel: 2", ("pipeline_parallel", "not accepted")),
            ("verify: -1", ("verify=-1", "how many optimizer steps")),
            ("verify: 1.5", ("verify", "1.5")),
            ("timeout: soon", ("timeout", "soon", "h:m:s")),
            ("schedule: fastest", ("fastest", "1F1B")),
            ("tp_plan: [1]", ("tp_plan", "[1]", "Mapping")),
            ("replica_sync: {sync: 3}", ("sync", "interval")),
            ("load_once: maybe", ("load_once", "maybe", "bool")),
            ("start_method: thread", ("start_method", "thread", "popen")),
        ]
    ],
    (f"strategy: {{class_path: {_STRATEGY_PATH}, init_args: 3}}", (_STRATEGY_PATH, "3")),
    ("strategy: {class_path: lightning_hybrid.Hybrid4D}", ("Hybrid4D", "no attribute")),
    *[
        (f"callbacks: [{{class_path: {_CALLBACKS_PATH}.{name}, init_args: {{{arguments}}}}}]", words)
        for name, arguments, words in [
            ("Nothing", "", ("Nothing", "no attribute")),
            ("StepBreakdown", "speed: 3", ("speed", "not accepted")),
            ("BubbleRatio", "every_n_steps: often", ("every_n_steps", "often")),
            ("ConfigArchive", "every_n_steps: -1", ("every_n_steps=-1", "steps")),
            ("FiniteGradients", "action: go", ("go", "skip")),
            ("Verify", "num_steps: 0", ("num_steps=0", "at least 1")),
        ]
    ],
]

#: What the command line is given, and what it must say (with exit code 1 or 2).
COMMANDS: list[tuple[list[str], tuple[str, ...]]] = [
    ([], ("subcommand",)),
    (["fly"], ("fly", "plan")),
    (["plan", "--devices", "many"], ("devices", "many")),
    (["plan", "--devices", "0", "--num_layers", "4", "--hidden_size", "64", "--num_heads", "4"], ("0", "positive")),
    (["plan", "no.such:Model", "--seq_length", "8"], ("no.such",)),
    (["plan", "--device", "H900", "--num_layers", "4", "--hidden_size", "64", "--num_heads", "4"], ("H900", "H100")),
    (["plan", "--cluster", "nowhere.json", "--num_layers", "4"], ("nowhere.json",)),
    (["plan"], ("num_layers", "model")),
    (["plan", "--speed", "3"], ("speed",)),
    (["plan", "numbers.json", "--seq_length", "8"], ("config", "list")),
    (["plan", "sizeless.json"], ("seq_length",)),
    (["plan", *_SIZES, "--per_node", "0"], ("per_node=0", "positive")),
    (["plan", *_SIZES, "--network_gbits", "0"], ("network", "positive")),
    (["plan", *_SIZES, "--device", "Mine", "--peak", "0", "--memory", "80"], ("peak=0", "positive")),
    (["plan", *_SIZES, "--most", "0"], ("most=0", "at least 1")),
    (["plan", *_SIZES, "--ffn_size", "-2"], ("ffn_size=-2", "at least 0")),
    (["plan", *_SIZES, "--vocab_size", "-2"], ("vocab_size=-2", "at least 0")),
    (["probe", "--devices", "-1"], ("devices=-1", "at least 1")),
    (["probe", "--quick", "--devices", "1", "--output", "numbers.json/x.json"], ("output", "file")),
    (["doctor", "--devices", "-3"], ("devices=-3", "at least 1")),
    (["doctor", "--nccl_log", "nowhere.log"], ("nowhere.log", "NCCL_DEBUG")),
    (["archive", "list", "--status", "great"], ("great", "oom")),
    (["archive", "list", "--since", "2026-13-45"], ("2026-13-45", "2026-07")),
    (["archive", "list", "--until", "yesterday"], ("yesterday", "2026-07")),
    (["archive", "list", "--last", "-1"], ("-1", "0 (all)")),
    (["archive", "best", "--num_devices", "0"], ("num_devices=0", "at least 1")),
    (["archive", "import", "nowhere"], ("nowhere", "no entries")),
    (["check", "collections:OrderedDict"], ("OrderedDict", "training loader")),
    (["archive"], ("subcommand",)),
    (["archive", "fly"], ("fly", "list")),
    (["archive", "show", "x", "--url", "nosuchprotocol://x"], ("nosuchprotocol",)),
    (["archive", "show", "nothing", "--url", "nowhere"], ("nothing",)),
    (["convert", "nowhere.ckpt", "there.ckpt"], ("nowhere.ckpt",)),
    (["convert", "a.ckpt"], ("destination",)),
    (["convert", "a.ckpt", "b", "--to", "tar"], ("tar", "safetensors")),
    (["schedule", "fastest"], ("fastest", "1F1B")),
    (["schedule", "1F1B", "--stages", "0"], ("0",)),
    (["schedule", "1F1B", "--microbatches", "-1"], ("-1",)),
    (["report", "nowhere"], ("nowhere",)),
]

WRONG: list[Input] = [
    *_STRATEGY,
    *_REPLICAS,
    *_DEVICES,
    *_CALLBACKS,
    *_SCHEDULES,
    *_ENTRIES,
    *_PLANNER,
    *_OTHERS,
    *_ENVIRONMENT,
]
