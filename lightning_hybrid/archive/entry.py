"""The schema of one archive entry: what ran, on what, how, and how well. Pure.

Versions: :data:`SCHEMA` grows when an old reader would misunderstand the document, and such a reader refuses it;
:data:`REVISION` grows when a field with a default or a status is added. An older reader ignores unknown fields of a
newer revision, and passes over documents with a status that it does not know. In a document of its own revision an
unknown field is damage and is refused.

An entry never holds environment variables. Messages of failures pass through
:func:`lightning_hybrid.archive.surroundings.redact` before they get here.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal, get_args

from lightning_hybrid.archive.document import from_plain, to_plain
from lightning_hybrid.errors import ArchiveError
from lightning_hybrid.layout import Layout

__all__ = [
    "REVISION",
    "SCHEMA",
    "Batch",
    "Entry",
    "Fingerprint",
    "Hardware",
    "Planned",
    "Result",
    "Settings",
    "Status",
    "Training",
    "fingerprint_module",
    "fingerprint_parameters",
    "is_id",
    "new_id",
    "now",
]

#: Of runs that show that their configuration does not work.
FAILURES = ("oom", "failed")
SCHEMA = 1
REVISION = 3

Status = Literal["running", "ok", "interrupted", "oom", "failed", "error"]
STATUSES: tuple[Status, ...] = get_args(Status)
Scalar = bool | int | float | str | None

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What makes two models "the same": equal names and shapes of all parameters. Independent of degrees and dtype."""

    model_class: str
    """Name of the module's class."""
    num_parameters: int
    """Elements of all parameters, shared ones once. 0 if they do not exist yet: such a model matches none."""
    hash: str
    """First 16 hexadecimal digits of the SHA-256 over the sorted names and shapes."""
    dtype: str = "unknown"
    """The dtype of most elements, such as ``"float32"``."""
    num_blocks: int | None = None
    """Length of the chain of blocks that a pipeline can cut, where known."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The devices of one run."""

    device: str
    """``"cpu"``, ``"cuda"``, ..."""
    kind: str
    """The model of the device, such as ``"NVIDIA H200"``."""
    num_devices: int
    """Devices used, over all nodes."""
    num_nodes: int = 1
    """Machines."""
    memory_bytes: int | None = None
    """Memory of one device (of the whole machine for ``"cpu"``)."""
    links: dict[str, float] = field(default_factory=dict)
    """Measured bandwidth in bytes per second by mesh axis; empty where nobody measured."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the run was set up, beside its degrees."""

    schedule: str = "none"
    """Pipeline schedule; ``"none"`` without a pipeline."""
    num_microbatches: int = 1
    """Micro-batches of one ``training_step``."""
    precision: str = "32-true"
    """Lightning's name of the precision."""
    tp_plan: dict[str, str] | None = None
    """Pattern of module names -> tensor parallel style; null where the library chose it or there is none."""
    options: dict[str, Scalar] = field(default_factory=dict)
    """Further arguments of the strategy, by name."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How many samples one update sees."""

    size_per_data_rank: int | None = None
    """Samples of one ``training_step`` on one data rank."""
    accumulate_grad_batches: int = 1
    """``training_step`` calls per update."""
    global_size: int | None = None
    """Samples per update: size_per_data_rank x data_parallel_size x accumulate_grad_batches."""
    tokens_per_sample: float | None = None
    """Mean number of tokens of a sample; null where samples have none."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What else decides whether two runs learn alike."""

    optimizer: str | None = None
    """Class name of the first optimizer."""
    learning_rate: float | None = None
    """Base learning rate of its first parameter group."""
    seed: int | None = None
    """What ``seed_everything`` was given."""
    max_steps: int | None = None
    """The Trainer's ``max_steps``; null for no limit."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How the run went. Rates count each sample once, whatever the number of devices that worked on it."""

    status: Status = "running"
    """``"running"`` also stands for a run that was killed: nobody was left to say more."""
    message: str | None = None
    """First lines of the failure, without secrets."""
    num_steps: int = 0
    """Optimizer steps done."""
    step_time: float | None = None
    """Seconds from one optimizer step's end to the next; warm-up, validation and checkpoints excluded."""
    samples_per_second: float | None = None
    """Over all devices."""
    tokens_per_second: float | None = None
    """Over all devices."""
    samples_per_second_per_device: float | None = None
    """``samples_per_second`` / number of devices."""
    tokens_per_second_per_device: float | None = None
    """``tokens_per_second`` / number of devices."""
    breakdown: dict[str, float] = field(default_factory=dict)
    """Parts of the step, under the names that the callbacks log."""
    bubble: dict[str, float] = field(default_factory=dict)
    """Bubble ratios, measured and ideal, under the names that the callback logs."""
    scaling: dict[str, float] = field(default_factory=dict)
    """Scaling efficiency, under the names that the callback logs."""
    peak_memory_bytes: int | None = None
    """Largest of all devices; null where the device does not count it."""
    first_loss: float | None = None
    """Loss of the first ``training_step``."""
    last_loss: float | None = None
    """Loss of the latest ``training_step``."""
    history: dict[str, str] = field(default_factory=dict)
    """What the callbacks measured over the run: see :func:`~lightning_hybrid.archive.record.read_history`."""
    timeline: dict[str, str] = field(default_factory=dict)
    """One measured step of a pipeline: see :func:`~lightning_hybrid.archive.record.read_timeline`."""
    memory: dict[str, float] = field(default_factory=dict)
    """Bytes by what they are for on the rank that needs most, as estimated at set-up."""

    @property
    def is_good(self) -> bool:
        """Whether the run shows that its configuration works: it ended in order, and its throughput was measured."""
        return worked(self.status, self.samples_per_second)

    @property
    def is_failure(self) -> bool:
        """Whether the run shows that its configuration does not work."""
        return self.status in FAILURES


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What the planner predicted of a run whose degrees it chose; :class:`Result` has what was measured.

    Raises:
        ArchiveError: if a time is negative or not finite, or a factor not positive: later plans are corrected by them.
    """

    step_time: float
    """Seconds of an optimizer step."""
    samples_per_second: float
    """Over all devices."""
    tokens_per_second: float
    """Over all devices."""
    memory_bytes: float
    """That the fullest device must have, driver, communicators and the allocator's gaps included."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of a step by part, under the planner's names; they add up to ``step_time``."""
    factors: dict[str, float] = field(default_factory=dict)
    """By which earlier runs corrected parts (see :mod:`lightning_hybrid.planner.calibration`)."""
    runner_up: str | None = None
    """The next best degrees, in words."""

    def __post_init__(self) -> None:
        times = {"step_time": self.step_time, **self.parts}
        wrong = [name for name, value in times.items() if not 0 <= value < math.inf]
        wrong += [f"factor of {part}" for part, factor in self.factors.items() if not 0 < factor < math.inf]
        if wrong:
            raise ArchiveError(f"planned has impossible values: {', '.join(wrong)}")


def worked(status: str, rate: float | None) -> bool:
    """Whether a run ended in order and its throughput (samples per second) was measured."""
    return status in ("ok", "interrupted") and rate is not None and math.isfinite(rate) and rate > 0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One run.

    Raises:
        ArchiveError: if the id cannot be a file name, a time is not UTC in ISO 8601, or degrees and devices disagree.
    """

    id: str
    """Unique, sorts by time, and is the document's name: see :func:`new_id`."""
    time: str
    """When the run began: UTC, ``2026-07-31T09:30:00Z``."""
    updated: str
    """When the entry was last written."""
    model: Fingerprint
    hardware: Hardware
    degrees: Layout
    software: dict[str, str] = field(default_factory=dict)
    """Package -> version."""
    settings: Settings = field(default_factory=Settings)
    batch: Batch = field(default_factory=Batch)
    training: Training = field(default_factory=Training)
    result: Result = field(default_factory=Result)
    parent: str | None = None
    """Id of the entry that this run took its degrees from."""
    planned: Planned | None = None
    """Where the planner chose the degrees."""
    schema: int = SCHEMA
    revision: int = REVISION

    def __post_init__(self) -> None:
        if not is_id(self.id):
            raise ArchiveError(
                f"{self.id!r} cannot be the id of an entry: use up to 200 letters, digits, '.', '_' and '-',"
                " beginning with a letter or digit."
            )
        for name, value in (("time", self.time), ("updated", self.updated)):
            try:
                datetime.strptime(value, TIME)
            except ValueError:
                raise ArchiveError(f"{name} is {value!r}, which is not of the form 2026-07-31T09:30:00Z.") from None
        if self.degrees.world_size != self.hardware.num_devices:
            raise ArchiveError(
                f"degrees ({self.degrees}) make {self.degrees.world_size} devices,"
                f" but hardware.num_devices is {self.hardware.num_devices}."
            )

    def to_json(self) -> str:
        """Return the document: sorted keys, two spaces, one trailing newline, so that ``git diff`` reads well."""
        return json.dumps(to_plain(self), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Entry:
        """Read what :meth:`to_json` wrote.

        Raises:
            ArchiveError: if the text is no JSON, no entry, damaged, or of a newer schema; the message says which.
        """
        try:
            document: Any = json.loads(text)
        except RecursionError as error:
            raise ArchiveError("it is not JSON of an entry: lists or objects are nested too deeply") from error
        except ValueError as error:
            raise ArchiveError(f"it is not JSON ({error})") from error
        if not isinstance(document, dict) or type(document.get("schema")) is not int:
            raise ArchiveError('it is not an archive entry (no integer "schema")')
        schema, revision = document["schema"], document.get("revision", 0)
        if schema != SCHEMA:
            raise ArchiveError(
                f"its schema is {schema}, this release reads schema {SCHEMA}; update lightning_hybrid to use it"
            )
        newer = type(revision) is int and revision > REVISION
        return from_plain(cls, document, where="entry", ignore_unknown=newer)


def is_id(text: str) -> bool:
    """Whether a text can be the id of an entry, and so a file name on any system."""
    return _ID.fullmatch(text) is not None


def now() -> str:
    """Return the present time in the form that entries use."""
    return datetime.now(timezone.utc).strftime(TIME)


def new_id(model: Fingerprint, time: str) -> str:
    """Return an id that no other run makes: time, class, start of the model's hash, six random digits.

    Time comes first so that names sort by it; class and hash let a reader of many entries choose by name.
    """
    name = re.sub(r"[^A-Za-z0-9]", "", model.model_class)[:40] or "model"
    return f"{re.sub('[-:]', '', time)}-{name}-{model.hash[:8]}-{secrets.token_hex(3)}"


def fingerprint_parameters(
    model_class: str, parameters: Iterable[tuple[str, tuple[int, ...], str]], *, num_blocks: int | None = None
) -> Fingerprint:
    """Return the fingerprint of a model from ``(name, shape, dtype)`` of each parameter, in any order.

    The hash leaves the dtype out: the same model in another precision is the same model.
    """
    table = sorted(parameters)
    digest = hashlib.sha256("\n".join(f"{name} {list(shape)}" for name, shape, _ in table).encode())
    elements: Counter[str] = Counter()
    for _, shape, dtype in table:
        elements[dtype] += math.prod(shape)
    return Fingerprint(
        model_class=model_class,
        num_parameters=elements.total(),
        hash=digest.hexdigest()[:16],
        dtype=elements.most_common(1)[0][0] if elements else "unknown",
        num_blocks=num_blocks,
    )


def fingerprint_module(module: Any, *, num_blocks: int | None = None) -> Fingerprint:
    """Return the fingerprint of a whole ``torch.nn.Module``, on any device, meta included.

    Sharded parameters (DTensor) have their full shape, so sharding does not change it. A pipeline does: a stage holds
    only its own blocks, so call this before the module is cut.
    """
    parameters = (
        (name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
        for name, parameter in module.named_parameters()
    )
    return fingerprint_parameters(type(module).__name__, parameters, num_blocks=num_blocks)
