"""When replicas exchange, and what: counted in optimizer steps.

[Note: replicas that meet]
Between two exchanges replicas say nothing to each other. So one that has run out of batches, or stands elsewhere for
another reason, would send its weights for something else. Before each exchange, and at the last batch of an epoch, the
replicas tell each other why they have come and which weights they train, in one message of 24 bytes. If they do not
agree all of them fail by name.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_hybrid.data_parallel.buffers import SharedBuffers
from lightning_hybrid.errors import ConfigurationError, UnsupportedError
from lightning_hybrid.measuring.unprofiled import unprofiled
from lightning_hybrid.planner.replicas import propose_replica_sync
from lightning_hybrid.replicas.exchange import Averager, Running, buckets_of
from lightning_hybrid.replicas.options import EVENTS, ReplicaSync
from lightning_hybrid.replicas.outer import OuterWeights

__all__ = ["Replicas", "fragments_of", "local"]

#: Steps before an exchange whose time is measured, with ``interval="auto"``; it is the second one.
TRIAL = 4
_REASONS = ("an exchange after so many steps", *(f"an exchange before {event}" for event in EVENTS))
_REASONS += ("the last batch", "a measurement")


class Replicas:
    """One rank's part of one replica: its weights, and those that were exchanged last.

    ``step`` counts optimizer steps since all of the model was exchanged at once, ``since`` for each fragment the steps
    that its exchange lacks; ``trained`` are the weights that are exchanged, by name.
    """

    def __init__(
        self,
        module: nn.Module,
        options: ReplicaSync,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        blocks: Sequence[str] = (),
        tied: Sequence[str] = (),
        buffers: SharedBuffers,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Take this rank's part of the module; replicas hold equal values now.

        Args:
            module: cut, split and sharded.
            options: with a known interval.
            group: the ranks that hold the same share in all replicas.
            device: one that the group can send from.
            blocks: names of the model's blocks, in order, those of other stages too.
            tied: names of parameters that several stages hold.
            buffers: keeps buffers alike within this replica.
            settle: has the module hold its shards.

        Raises:
            ConfigurationError: if there are more fragments than blocks.
            UnsupportedError: for 16-bit weights with outer weights.
        """
        self.options = options
        self._group, self._settle, self._buffers = group, settle, buffers
        self._parameters = dict(module.named_parameters())
        self._fragments, self._tied = fragments_of(blocks, options.num_fragments), frozenset(tied)
        self._averager = Averager(group, device, torch.bfloat16 if options.dtype else None)
        self.trained: dict[str, nn.Parameter] = {}
        self.moving: set[str] = set()
        """Of these, what has been trained since its last exchange; all others rest."""
        self._resting: dict[int, set[str]] = {}
        """By fragment what rested until it was sent."""
        self._sent_last: set[int] = set()
        """Fragments that were sent since the last step: with ``mixing`` one may be closed at once."""
        self._trial = Trial(device) if options.interval == "auto" else None
        self._set_options(options)
        self._still = SharedBuffers(module, group, device, trained=self.trained.values)
        self.step = 0
        self.since = [0] * options.num_fragments
        self._running: dict[int, list[tuple[list[str], Running]]] = {}
        self.is_restored = False
        self.know(name for name, parameter in self._parameters.items() if parameter.requires_grad)

    def _set_options(self, options: ReplicaSync) -> None:
        """Take other options between two windows."""
        self.options = options
        self.interval = TRIAL if options.interval == "auto" else int(options.interval)
        lr, momentum = (options.outer_lr, options.outer_momentum) if options.method == "diloco" else (1.0, 0.0)
        place = torch.device("cpu") if options.offload else None
        self.outer = OuterWeights(lr, momentum, place) if options.has_outer_state else None
        self._begin_outer()

    def _begin_outer(self) -> None:
        """Replicas are equal: what they have is what they last exchanged."""
        if self.outer is not None:
            for name, parameter in self.trained.items():
                self.outer.set(name, local(parameter))

    def __str__(self) -> str:
        options = self.options
        what = "weights averaged"
        if options.method == "diloco":
            what = f"an outer SGD step (lr={options.outer_lr}, Nesterov momentum {options.outer_momentum})"
        steps = "steps, as many as the first ones show" if options.interval == "auto" else f"{self.interval} steps"
        text = f"{what} every {steps}"
        text += f", in {len(self.since)} fragments by turns" if len(self.since) > 1 else ""
        text += f", used {options.delay} steps later" if options.delay else ""
        closed = ", ".join(options.close_before) or "nothing"
        return f"{text}; an incomplete window is closed before: {closed}"

    # ---- called as training goes on --------------------------------------------------------------------------------

    def start(self) -> None:
        """At the start of training: outer weights are the weights, which may have been loaded meanwhile."""
        if not any(self.since):
            if not self.is_restored:
                self._begin_outer()
            self._still.note()
        self.is_restored = False

    def notice_trained(self) -> None:
        """Before each step: what is trained from now on. It keeps being exchanged when it is frozen again."""
        trained = [name for name, parameter in self._parameters.items() if parameter.requires_grad]
        self.know(trained)
        self.moving.update(trained)

    def know(self, names: Iterable[str]) -> None:
        """Exchange some parameters from now on; outer weights that are new are what the parameters are."""
        for name in names:
            if name in self.trained:
                continue
            parameter = self._parameters[name]
            if self.outer is not None and parameter.element_size() < 4:
                raise UnsupportedError(
                    f"replica_sync keeps outer weights in fp32, but {name} is {parameter.dtype}, in which small"
                    ' outer steps vanish. Use precision="bf16-mixed", or method="average" with dtype=None and'
                    " delay=0."
                )
            self.trained[name] = parameter
            if self.outer is not None and name not in self.outer:
                self.outer.set(name, local(parameter))

    def after_step(self) -> None:
        """After each optimizer step: exchange what is due. A collective of the replicas then."""
        if self._trial is not None:
            self._trial.step_ended()
        self.step += 1
        self._sent_last.clear()
        self.since = [count + 1 for count in self.since]
        number, delay = len(self.since), self.options.delay
        for fragment in range(number):
            if (self.step - self._offset(fragment)) % self.interval == 0:
                self.meet(0)
                if delay:
                    self._start(fragment)
                else:
                    self._exchange(fragment, self.options.mixing)
            if fragment in self._running and (self.step - delay - self._offset(fragment)) % self.interval == 0:
                self._arrive(fragment, self.options.mixing)
        if self.step % self.interval == 0:
            self._average_still()
            if self._trial is not None:
                self._choose(self._trial)

    def _choose(self, trial: Trial) -> None:
        """After an exchange, with ``interval="auto"``: take what is proposed. A collective over the world."""
        times = trial.times()
        if times is None:
            return
        proposal = propose_replica_sync(*times)
        is_short = any(parameter.element_size() < 4 for parameter in self.trained.values())
        method = self.options.method if self.options.method != "auto" else "average" if is_short else proposal.method
        rank_zero_info(f'lightning_hybrid: replica_sync: method="{method}": {proposal.reason}')
        self.adopt(proposal.interval, method)

    def adopt(self, interval: int, method: Any) -> None:
        """Replace what was ``"auto"``; replicas are equal now, or their weights are loaded next."""
        if self._trial is not None:
            self._trial, self.step = None, 0
            self._set_options(self.options.chosen(interval, method))

    def close(self, event: str) -> bool:
        """Exchange what lacks an exchange, unless told otherwise. Return whether replicas are equal now.

        A collective of the replicas. Outer steps are those of a whole window, on a difference of fewer steps.
        """
        if event not in self.options.close_before:
            return not any(self.since)
        if any(self.since) or self._running:
            self.meet(1 + EVENTS.index(event))
            for fragment in sorted(self._running):
                self._arrive(fragment, self.options.mixing)
            for fragment in (i for i, count in enumerate(self.since) if count):
                self._exchange(fragment, 0.0)
            self._average_still()
        self.step = 0
        return True

    def resume(self, step: int, since: Sequence[int], moving: Iterable[str]) -> None:
        """Go on in the window of a checkpoint; weights and outer weights have been loaded."""
        number = len(self.since)
        self.step, self.since = step, [*since] if len(since) == number else [max(since)] * number
        self.moving = {*moving}
        self.is_restored = True

    @property
    def outer_bytes(self) -> int:
        """What outer weights and momentum take on this rank, or may take once ``"auto"`` has decided."""
        if self.outer is not None or self.options.method != "auto":
            return 0 if self.outer is None else self.outer.num_bytes
        copies = 2 if self.options.outer_momentum else 1
        return copies * sum(max(4, p.element_size()) * local(p).numel() for p in self.trained.values())

    @property
    def is_open(self) -> bool:
        """Whether replicas differ: they have trained since their last exchange."""
        return any(self.since)

    @property
    def is_between_windows(self) -> bool:
        """Whether the replicas have just met, so that a message more does not make them wait."""
        return self.step % self.interval == 0

    def meet(self, reason: int, number: int | None = None) -> None:
        """See the note above. A collective of the replicas.

        Raises:
            ConfigurationError: on all of them, if they are at different places, or train different weights.
        """
        names = "\n".join((*sorted(self.trained), "", *sorted(self.moving)))
        mine = [reason, self.step if number is None else number, zlib.crc32(names.encode())]
        told = self._tell(torch.tensor(mine, device=self._averager.device))
        if len({(why, count) for why, count, _ in told}) > 1:
            places = ", ".join(f"replica {i}: {_REASONS[why]} ({count})" for i, (why, count, _) in enumerate(told))
            raise ConfigurationError(
                f"The replicas have come to different places: {places}. Give all data ranks the same number of training"
                " batches (limit_train_batches, a DistributedSampler, or a data set that is split evenly), and let none"
                " of them alone skip an optimizer step or set trainer.should_stop."
            )
        if len({names for *_, names in told}) > 1:
            raise ConfigurationError(
                f"The replicas train different weights: {self._only_some_train()}. Freeze and unfreeze the same weights"
                " before the same step on all ranks."
            )

    def _tell(self, mine: Tensor) -> list[list[int]]:
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(found, mine, group=self._group)
        return [place.tolist() for place in found]

    def _only_some_train(self) -> str:
        """Say what not all replicas train. A collective of the replicas."""
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, self.moving, group=self._group)
        names = sorted(set.union(*found) - set.intersection(*found))
        who = ", ".join(str(i) for i, trained in enumerate(found) if names[0] in trained)
        return f"{names[0]} only replica {who}" + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")

    # ---- exchanges -------------------------------------------------------------------------------------------------

    def _offset(self, fragment: int) -> int:
        """The step in a window at which a fragment is exchanged; the last one at its end."""
        return (fragment + 1) * self.interval // len(self.since)

    def _start(self, fragment: int) -> None:
        """Send a fragment off; its result is used later."""
        with unprofiled(self._averager.group):
            self._running[fragment] = list(self._sent(fragment))

    def _sent(self, fragment: int) -> Iterator[tuple[list[str], Running]]:
        """Send a fragment piece by piece: what is made for a piece is free before the next, if it is waited for."""
        self._settle()
        shares = {name: local(p) for name, p in self.trained.items() if self._fragments(name) == fragment}
        if fragment not in self._sent_last:
            self._resting[fragment] = shares.keys() - self.moving
            self.moving -= shares.keys()
            self._sent_last.add(fragment)
        for names in buckets_of(shares, self._tied):
            values = [shares[name] for name in names]
            if self.outer is not None:
                values = [self.outer.difference(name, shares[name]) for name in names]
            yield names, self._averager.start(values)

    def _exchange(self, fragment: int, mixing: float) -> None:
        """Exchange a fragment now."""
        self._use(fragment, self._sent(fragment), mixing)

    def _average_still(self) -> None:
        """Buffers, and weights that no optimizer trains: those that have changed."""
        self._buffers.before_step(trains=False)
        self._still.average()

    def _arrive(self, fragment: int, mixing: float) -> None:
        """Use what was sent some steps ago."""
        self._settle()
        self._use(fragment, self._running.pop(fragment), mixing)

    @torch.no_grad()
    def _use(self, fragment: int, sent: Iterable[tuple[list[str], Running]], mixing: float) -> None:
        for names, running in sent:
            means = dict(zip(names, running.wait(), strict=True))
            if self.outer is not None:
                resting = self._resting[fragment]
                self.outer.step({name: mean for name, mean in means.items() if name not in resting})
                for name in resting & means.keys():  # the momentum must not move what the user has frozen
                    self.outer.shift(name, means[name])
            for name, mean in means.items():
                own, common = local(self.trained[name]), mean if self.outer is None else self.outer[name]
                common = common.to(own.device, own.dtype)
                own.copy_(torch.lerp(common, own, mixing) if mixing else common)
        self.since[fragment] = max(1, self.options.delay) if mixing else 0  # mixed weights are not the same on all


class Trial:
    """Times of the first steps, and of their exchange."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: list[float] = []
        self._began = 0.0
        self._steps: list[float] = []

    def step_ended(self) -> None:
        """Before an exchange, if there is one after this step."""
        now = self._now()
        if self._ends:
            self._steps.append(now - self._ends[-1])
        self._began = now
        self._ends.append(now)

    def times(self) -> tuple[float, float] | None:
        """After an exchange: seconds of a step and of the exchange, the longest of any rank; ``None``: too early.

        A collective over the world.
        """
        exchange, self._ends = self._now() - self._began, []
        if len(self._steps) < TRIAL:  # the first ones warm up, and so does the first exchange
            return None
        times = torch.tensor([statistics.median(self._steps[2:]), exchange], dtype=torch.float32, device=self._device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        step, longest = times.tolist()
        return step, longest

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def fragments_of(blocks: Sequence[str], number: int) -> Callable[[str], int]:
    """Return which fragment a parameter is in, by name.

    Blocks are dealt out in turn (``0, 1, 2, 0, ...``), as Streaming DiLoCo found best (Douillard et al. 2025, arXiv
    2501.18512, "strided"); what is outside of blocks is in the last fragment.
    """
    if number > 1 and number > len(blocks):
        raise ConfigurationError(
            f"replica_sync: num_fragments={number}, but the model has {len(blocks)} blocks to deal out; use at most"
            f" {max(1, len(blocks))}, or name the lists of blocks (blocks=...)."
        )
    of_block: Mapping[str, int] = {name: i % number for i, name in enumerate(blocks)}

    def fragment(name: str) -> int:
        return next((i for block, i in of_block.items() if name.startswith(f"{block}.")), number - 1)

    return fragment


def local(tensor: Any) -> Tensor:
    """Return this rank's share of a parameter, without a graph, in the same memory."""
    share: Tensor = tensor.detach()
    return share.to_local() if isinstance(share, DTensor) else share
