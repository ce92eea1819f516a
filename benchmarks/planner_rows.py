"""Published measurements as questions to the planner: what was run, and what it took."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_hybrid.errors import ConfigurationError, HybridError
from lightning_hybrid.layout import Layout
from lightning_hybrid.planner import Cluster, ModelProfile, Setup, estimate
from lightning_hybrid.planner.gpus import find_gpu

_GATED = ("llama", "mistral", "mixtral", "qwen", "gemma", "olmo", "yi-", "swiglu", "gated", "deepseek")
_SCHEDULES = (
    ("interleaved", "Interleaved1F1B"),
    ("1f1b-i", "Interleaved1F1B"),
    ("zb-1p", "ZB-H1"),
    ("zb-h1", "ZB-H1"),
    ("zb-2p", "ZB-H2"),
    ("zb-h2", "ZB-H2"),
    ("zb-v", "ZBVZeroBubble"),
    ("zbv", "ZBVZeroBubble"),
    ("dualpipe", "DualPipeV"),
    ("gpipe", "GPipe"),
)
_NEEDED = ("gpu", "layers", "hidden", "seq", "num_gpus")
_WHOLE = (
    *("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "num_experts", "experts_per_token", "num_gpus"),
    *("gpus_per_node", "tp", "pp", "vpp", "dp", "dp_replicate", "dp_shard", "cp", "zero_stage", "micro_batch"),
    *("num_micro_batches", "global_batch"),
)
#: What tells the time of a step, nearest to the clock first.
_TIMES = ("iter_time_s", "tokens_per_s_per_gpu", "samples_per_s_per_gpu", "tflops_per_gpu", "mfu")
_REAL = (*_TIMES, "gpu_mem_gb", "mfu_peak_tflops", "memory_gb")


@dataclass(frozen=True)
class Case:
    """One row: the question, and the answers that were measured (``None`` where the row has none)."""

    row: Mapping[str, Any]
    profile: ModelProfile
    cluster: Cluster
    setup: Setup
    seconds: float | None
    gigabytes: float | None

    @property
    def label(self) -> str:
        row = self.row
        return f"#{row.get('id')} {str(row['source'])[:34]} {row.get('model') or ''}"


def read_rows(paths: Iterable[str]) -> list[dict[str, Any]]:
    """All rows; each remembers its file, whose groups are its own.

    Raises:
        ConfigurationError: if a file cannot be read, or is no list of objects.
    """
    rows = []
    for path in paths:
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
            raise ConfigurationError(f"{path} must hold a list of objects, one for each row.")
        rows += [{"source": "(no source)", **row, "file": Path(path).name} for row in found]
    return rows


def cases_of(rows: Iterable[Mapping[str, Any]]) -> tuple[list[Case], list[str]]:
    """The rows that can be asked, and why the others cannot, by source and reason."""
    cases, left_out = [], defaultdict(list)
    for row in rows:
        try:
            case = case_of(row)
            estimate(case.profile, case.cluster, case.setup)  # what does not fit together shows here
            cases.append(case)
        except Exception as error:  # rows may come from anybody; none may end the command
            why = str(error) if isinstance(error, HybridError) else f"{type(error).__name__}: {error}"
            left_out[f"{row.get('source')}: {why}"].append(f"#{row.get('id')}")
    return cases, [
        f"{len(ids)} of {why} ({', '.join(ids[:3])}{', ...' * (len(ids) > 3)})" for why, ids in left_out.items()
    ]


def case_of(row: Mapping[str, Any]) -> Case:
    """One row as a question.

    Raises:
        ConfigurationError: if a field that is needed is missing, or a number is none.
    """
    row = _with_numbers(row)
    profile, cluster = _profile(row), _cluster(row)
    setup = _setup(row)
    is_timed = row.get("usable_time", any(row.get(name) for name in _TIMES))
    seconds = _seconds(row, profile, cluster) if is_timed else None
    gigabytes = (row.get("memory_gb") or None) if row.get("usable_memory", True) else None
    return Case(row, profile, cluster, setup, seconds, gigabytes)


def _with_numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with numbers where it has strings that are numbers."""
    if missing := [name for name in _NEEDED if row.get(name) in (None, "", 0)]:
        raise ConfigurationError(f"{', '.join(missing)} missing")
    numbers = {name: _number(name, row[name]) for name in (*_WHOLE, *_REAL) if row.get(name) not in (None, "")}
    return {**row, **numbers}


def _number(name: str, value: Any) -> float:
    """A number that may be: finite, not negative, whole where it counts something."""
    try:
        found = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf or (name in _WHOLE and found % 1):
        raise ConfigurationError(
            f"{name}={value!r} is no {'whole number' if name in _WHOLE else 'number'} of at least 0"
        )
    return int(found) if name in _WHOLE else found


def is_out_of_memory(row: Mapping[str, Any]) -> bool:
    """Whether the row says that this did not fit."""
    return row.get("kind") == "oom" or "out of memory" in (row.get("notes") or "").lower()


def _text(row: Mapping[str, Any], *names: str) -> str:
    return " ".join(str(row.get(name) or "") for name in names).lower()


def _profile(row: Mapping[str, Any]) -> ModelProfile:
    arch = _text(row, "arch", "model")
    return ModelProfile.from_sizes(
        name=row.get("model") or "model",
        num_layers=row["layers"],
        hidden_size=row["hidden"],
        num_heads=row.get("heads") or max(1, row["hidden"] // 128),
        num_kv_heads=row.get("kv_heads"),
        ffn_size=row.get("ffn"),
        vocab_size=row.get("vocab") or 50304,
        seq_length=row["seq"],
        gated_mlp=row.get("gated", any(word in arch for word in _GATED)),
        num_experts=row.get("num_experts") or 1,
        num_active_experts=row.get("experts_per_token") or 1,
        tied_embeddings="untied" not in arch and ("tied" in arch or "gpt" in arch or "mpt" in arch),
        learned_positions="learned" in arch,
    )


def _cluster(row: Mapping[str, Any]) -> Cluster:
    name = str(row["gpu"])
    if row.get("gpu_mem_gb") and "GB" not in name.split("(")[0]:
        name = f"{name.split('(')[0]} {row['gpu_mem_gb']:g}GB"
    usual = find_gpu(name).per_node
    per_node = usual if usual > 16 else row.get("gpus_per_node") or usual  # a rack of NVL72 is one node of links
    return Cluster.named(name, row["num_gpus"], per_node=per_node, network_gbits=_gbits(row.get("inter_link"), row))


def _gbits(link: str | None, row: Mapping[str, Any]) -> float | None:
    """Gbit/s of a node, as the source's words say; ``None`` if they do not."""
    if not link:
        return None
    adapters = re.search(r"(\d+)\s*x\s*(\d+)\s*Gb", link)
    if adapters:
        return float(adapters[1]) * float(adapters[2])
    whole = re.search(r"(\d+)\s*Gb", link)
    if not whole:
        return None
    return float(whole[1]) * (row.get("gpus_per_node") or 8 if "per gpu" in link.lower() else 1)


def _setup(row: Mapping[str, Any]) -> Setup:
    tensor, pipeline, context = row.get("tp") or 1, row.get("pp") or 1, row.get("cp") or 1
    data = row.get("dp") or row["num_gpus"] // (tensor * pipeline * context)
    layout = Layout(
        data_parallel_size=data,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        replicate_size=row.get("dp_replicate") or 1,
    )
    batch = row.get("micro_batch") or 1
    count = row.get("num_micro_batches")
    if not count:
        count = max(1, round(row["global_batch"] / (data * batch))) if row.get("global_batch") else 1
    schedule, virtual = _schedule(row, pipeline)
    zero = row.get("zero_stage")
    if zero is None:
        zero = 3 if (row.get("dp_shard") or 1) > 1 else 1
    words = _text(row, "precision")
    precision = next((name for name in ("fp8", "fp16", "fp32") if name in words), "bf16")
    if "mixed" in words or "bf16" in words:
        precision = "fp8" if "fp8" in words else "bf16"
    return Setup(
        layout=layout,
        micro_batch=batch,
        num_microbatches=count,
        schedule=schedule,
        stages_per_rank=virtual,
        recompute=_recompute(row),
        zero=3 if zero == 2 else zero,  # FSDP's SHARD_GRAD_OP
        reshard=zero >= 3 and pipeline == 1,  # what pipelines do (torchtitan, Llama 3)
        sequence_parallel=tensor > 1 and _sequence_parallel(row),
        context=context,
        precision=precision,
        attention=_attention(row),
        fused=bool(row.get("compile")) or _uses_engine(row),
        overlap_tensor=_overlaps_tensor(row),
        gradient_bytes=2 if precision == "fp16" or "pure" in words or (words == "bf16" and zero == 3) else 4,
        gradient_twins=2 if "fp32 grad accumulation" in words else 0,
        adapters="lora" in _text(row, "notes"),
        even=virtual == 1 or row["layers"] % (pipeline * virtual) == 0,  # else the ends count as blocks (Megatron)
    )


def _recompute(row: Mapping[str, Any]) -> str:
    """With flash attention there is no core attention whose scores selective recomputation could save."""
    words = _text(row, "recompute")
    if "full" in words:
        return "full"
    if "selective" not in words:
        return "none"
    return "ops" if _attention(row) != "unfused" and "core" not in words else "selective"


def _uses_engine(row: Mapping[str, Any]) -> bool:
    """Whether it ran with Transformer Engine: fused kernels, cuDNN's attention, and tensor ranks' overlap.

    Told by its name, by Megatron's or NeMo's on devices that are as new, or by 8 bits without ``torch.compile``.
    """
    words = _text(row, "source", "table", "where", "notes", "framework")
    named = "transformer engine" in words or (_is_recent(row) and ("megatron" in words or "nemo" in words))
    return named or ("fp8" in _text(row, "precision") and not row.get("compile"))


def _overlaps_tensor(row: Mapping[str, Any]) -> bool:
    words = _text(row, "notes", "table", "arch")
    return _uses_engine(row) or any(word in words for word in ("tp-comm-overlap", "tp_comm_overlap", "async tp"))


def _schedule(row: Mapping[str, Any], pipeline: int) -> tuple[str, int]:
    words, virtual = _text(row, "schedule"), row.get("vpp") or 1
    if pipeline == 1:
        return "1F1B", 1
    name = next((name for word, name in _SCHEDULES if word in words), "1F1B")
    if name in ("ZBVZeroBubble", "DualPipeV"):
        return name, 2
    if virtual > 1:
        return "Interleaved1F1B", virtual
    return ("1F1B" if name == "Interleaved1F1B" else name), 1


def _attention(row: Mapping[str, Any]) -> str:
    """Sources from before flash attention say so, or have short sequences and do not say."""
    words = _text(row, "attention")
    if "unfused" in words or "no flash" in words or words in ("eager", "math"):
        return "unfused"
    if any(word in words for word in ("cudnn", "flash-3", "flash3", "fa3")):
        return "cudnn"
    is_late = (row.get("kv_heads") or row.get("heads")) != row.get("heads") or row.get("compile")
    if words in ("flash", "flash-1", "triton") and not is_late:  # grouped queries came with the second version
        return "flash"
    if _uses_engine(row) and "deterministic" not in words:
        return "cudnn"
    return "flash2" if words or row["seq"] > 2048 or _is_recent(row) else "unfused"


def _is_recent(row: Mapping[str, Any]) -> bool:
    """Whether the device came after flash attention, and so after Transformer Engine."""
    return str(row["gpu"]).upper().startswith(("H1", "H2", "H8", "GH", "B2", "B3", "GB", "MI3"))


def _sequence_parallel(row: Mapping[str, Any]) -> bool:
    """What sources that do not say have: with flash attention came sequence parallelism."""
    known = row.get("seq_parallel")
    return _attention(row) == "flash2" if known is None else bool(known)


def _seconds(row: Mapping[str, Any], profile: ModelProfile, cluster: Cluster) -> float:
    """Seconds of a step, from what the source printed, nearest to the clock first."""
    batch, devices = _setup(row).global_batch, row["num_gpus"]
    if row.get("iter_time_s"):
        return float(row["iter_time_s"])
    if row.get("tokens_per_s_per_gpu"):
        return batch * profile.seq_length / (row["tokens_per_s_per_gpu"] * devices)
    if row.get("samples_per_s_per_gpu"):
        return batch / (row["samples_per_s_per_gpu"] * devices)
    if row.get("tflops_per_gpu"):
        return batch * _flops_as_defined(row, profile) / (row["tflops_per_gpu"] * 1e12 * devices)
    if not row.get("mfu"):
        raise ConfigurationError(f"no time: none of {', '.join(_TIMES)}")
    peak = (row.get("mfu_peak_tflops") or cluster.gpu.peak("bf16") / 1e12) * 1e12
    return batch * profile.flops_per_sample / (row["mfu"] * peak * devices)


def _flops_as_defined(row: Mapping[str, Any], profile: ModelProfile) -> float:
    """Operations of a sample as the source counts them (with what is computed again, or causal attention by half)."""
    words, flops = _text(row, "tflops_def"), profile.flops_per_sample
    attention = 3 * profile.seq_length * profile.num_layers * profile.attention_flops
    if "causal" in words:
        flops -= attention / 2
    if "hardware" in words or "with full" in words or ("96" in words and "*b" in words):
        flops += profile.seq_length * profile.num_layers * profile.layer_flops
    return flops
