"""Where a stage is cut: every rank runs the user's own step, and this module decides what is real in it.

[Note: how a step is cut]
Every call of a block, and of a module with parameters outside of the blocks, goes through :meth:`Cut._call`. While a
stage that owns blocks ``first..last-1`` runs the step,

* whatever comes before block ``first`` is a hole (:mod:`~lightning_hybrid.pipeline.holes`);
* at the call of block ``first`` the travelling arguments are replaced by what the previous stage sent, in the
  user's own variables too (a residual may be added outside of the blocks);
* from there on everything is real;
* at the call of block ``last`` its travelling arguments are captured and the step is left by an exception.

The last stage runs on into the head, the loss and the user's logging. Parameter names never change. Instances get a
subclass with a ``__call__`` of its own (as ``fully_shard`` gives them one), because a forward pre-hook would come too
late for modules that override ``__call__``, as activation checkpointing does.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lightning_hybrid.batches.randomness import random_mark
from lightning_hybrid.errors import PipelineError, UnsupportedError
from lightning_hybrid.pipeline.holes import Hole, placeholder
from lightning_hybrid.pipeline.hollow import hollow, refuse_hollow, refuse_leaked
from lightning_hybrid.pipeline.probe import Probe, StepFacts

__all__ = ["Cut", "StageRun"]

#: How often a step that draws random numbers is probed once more, to see whether they decide which blocks are called.
_NUM_SEEDS = 3
_SAME_BLOCKS = (
    "Every step must call the same blocks in the same order once (set layerdrop and the like to 0), or use"
    " pipeline_parallel_size=1."
)


class _StageDone(BaseException):
    """Leaves the step with the tensors for the next stage. A ``BaseException``: user code must not swallow it."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__("a pipeline stage ended here; this must not be caught")
        self.tensors = tensors


class _Enter(torch.autograd.Function):
    """Makes received tensors differentiable and hands their gradients over.

    The tensors become results of this node in place: no copy, and not leaves, so blocks may change them in place.
    """

    @staticmethod
    def forward(ctx: Any, run: StageRun, wanted: tuple[bool, ...], anchor: Tensor, *received: Tensor) -> Any:
        ctx.run = run
        ctx.mark_dirty(*received)
        ctx.mark_non_differentiable(*(tensor for tensor, want in zip(received, wanted, strict=True) if not want))
        ctx.set_materialize_grads(False)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.run.gradients = list(gradients)
        return (None,) * (3 + len(gradients))


def _receive_nothing(local: list[Tensor]) -> list[Tensor]:
    raise PipelineError("A stage that was through with a micro-batch was asked for its input again.")


@dataclass(kw_only=True)
class StageRun:
    """One stage's way through the step on one micro-batch."""

    first: int
    """Index of the first own block."""
    last: int
    """Index after the last own block."""
    facts: StepFacts
    receive: Callable[[list[Tensor]], list[Tensor]]
    """Given local stand-ins of the first block's travelling arguments (right shapes), returns the real ones."""
    keep: frozenset[int] = frozenset()
    """Ids of tensors that are not values of this step (placeholders of weights) and must stay what they are."""
    leaves: bool = False
    """Whether received tensors enter as leaves, which a backward split into inputs and weights wants (one copy)."""
    captures: bool = False
    """Whether the step is left right after the last block of all, with what it returned."""
    joins: bool = False
    """Whether the block ``first`` is the last of all and a hole, in whose place ``receive`` gives what it returned."""
    entered: bool = False
    inputs: list[Tensor] = field(default_factory=list)
    """The leaves, if they are wanted."""
    received: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    """Of the received tensors, once the backward has run; ``None`` for those that were not used."""
    _substitutes: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.entered = self.first == 0

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the first block's travelling arguments by what was received."""
        leaves, spec = tree_flatten((args, kwargs))
        self.facts.check_structure(self.first, leaves)
        positions = self.facts.arguments[self.first]
        if not self.entered:
            received = self.receive([leaves[i] for i in positions])
            if torch.is_grad_enabled():
                received = self._differentiable(received, self.facts.differentiable[self.first])
            self.received = [self._put(leaves[i], real) for i, real in zip(positions, received, strict=True)]
            self.entered = True
        for i, real in zip(positions, self.received, strict=True):  # also when the call is recomputed in the backward
            leaves[i] = real
        refuse_hollow(f"An argument of {self.facts.blocks[self.first]}", leaves)
        args, kwargs = tree_unflatten(leaves, spec)
        return args, kwargs

    def _differentiable(self, received: list[Tensor], wanted: tuple[bool, ...]) -> list[Tensor]:
        """Have gradients kept for those received tensors that require them where they come from."""
        if self.leaves:
            self.inputs = [t.requires_grad_(want) for t, want in zip(received, wanted, strict=True)]
            return [tensor.clone() for tensor in self.inputs]
        anchor = torch.zeros((), requires_grad=True)
        return list(_Enter.apply(self, wanted, anchor, *received))  # type: ignore[no-untyped-call]

    def _put(self, local: Tensor, real: Tensor) -> Tensor:
        """Make the user's variable hold the received tensor. Where that cannot be, remember which stands for which."""
        if not isinstance(local, nn.Parameter) and id(local) not in self.keep:
            try:
                torch.utils.swap_tensors(local, real)
                return local
            except RuntimeError as error:  # other tensors are views of it
                reason = str(error)
        else:
            reason = "it is a parameter"
        if self.facts.reuses[self.first]:
            raise PipelineError(
                f"The code after block {self.facts.blocks[self.first]} computes with that block's arguments, and one of"
                f" them cannot be replaced by what the previous stage sent ({reason}). Compute it from the block's"
                " output, or use pipeline_parallel_size=1."
            )
        self._substitutes[id(local)] = (local, real)
        return real

    def forget(self) -> None:
        """Let go of everything, once the backward is over: the graph's node that the tensors came from refers to this
        run, and no garbage collection sees cycles through the graph (the whole module would outlive its ``fit``)."""
        self.inputs, self.received, self.gradients = [], [], []
        self.receive = _receive_nothing
        self._substitutes.clear()

    def substitute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace values that the user's variables still hold from before the first own block."""
        if not self._substitutes:
            return args, kwargs
        known = self._substitutes
        args, kwargs = tree_map_only(Tensor, lambda t: known.get(id(t), (t, t))[1], (args, kwargs))
        return args, kwargs

    def leave(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the travelling arguments of the next stage's first block."""
        leaves, _ = tree_flatten(self.substitute(args, kwargs))
        self.facts.check_structure(self.last, leaves)
        found = [leaves[i] for i in self.facts.arguments[self.last]]
        refuse_hollow(f"An argument of {self.facts.blocks[self.last]}", found)
        return found

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> list[Tensor]:
        """Return what the code after the last block gets: its output, and its arguments where they are used again."""
        return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)] + self._used_again(args, kwargs)

    def join(self, args: tuple[Any, ...], kwargs: dict[str, Any], stand_in: Any) -> Any:
        """Return the output of the last block, put together from what was received; ``stand_in`` has its structure."""
        flat, spec = tree_flatten(stand_in)
        places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        arguments = self._used_again(args, kwargs)
        local = [*(flat[i] for i in places), *arguments]
        wanted = tuple(tensor.is_floating_point() for tensor in local)
        real = self._differentiable(self.receive(local), wanted)
        for i, tensor in zip(places, real, strict=False):
            flat[i] = tensor
        del local, stand_in  # what is put into the user's variables must not be held here
        for argument, tensor in zip(arguments, real[len(places) :], strict=True):
            self._put(argument, tensor)
        self.entered = True
        return tree_unflatten(flat, spec)

    def _used_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        leaves = tree_leaves((args, kwargs))
        return [leaves[i] for i in self.facts.arguments[-1]] if self.facts.reuses[-1] else []


class Cut:
    """The step of one module, made ready to be cut at any of its blocks."""

    def __init__(self, module: nn.Module, blocks: Sequence[str]) -> None:
        """Intercept the blocks and what lies beside them. ``blocks`` are FQNs within ``module``, in any order."""
        self.module = module
        self.parameter_names = {id(p): name for name, p in module.named_parameters()}
        self._blocks = {name: module.get_submodule(name) for name in blocks}
        self._names: dict[nn.Module, str] = {}
        self._parameters_of: dict[nn.Module, list[str]] = {}
        self._indices: dict[nn.Module, int] = {}
        self._holes: dict[nn.Module, Hole] = {}
        self._released: dict[tuple[nn.Module, str], tuple[str, bool]] = {}
        self.placeholders: frozenset[int] = frozenset()
        self.inside: Callable[[], AbstractContextManager[None]] = nullcontext
        self._probe: Probe | None = None
        self._run: StageRun | None = None
        self.last_run: StageRun | None = None
        """The run that calls belonged to last."""
        inside = {part for block in self._blocks.values() for part in block.modules()}
        for name, part in module.named_modules():
            _refuse_uncuttable(name, part, is_around=part not in inside and not inside.isdisjoint(part.modules()))
        memory: dict[Any, Any] = {}
        intercepted = {**self._outside(), **self._blocks}
        for name, part in intercepted.items():
            if isinstance(part, torch.jit.ScriptModule):
                raise UnsupportedError(
                    f"{name} is a ScriptModule, whose calls a pipeline cannot take over. Use the module it was made"
                    " from (torch.compile can speed that up), or pipeline_parallel_size=1."
                )
            self._names[part] = name
            self._parameters_of[part] = [self.parameter_names[id(p)] for p in part.parameters()]
            self._holes[part] = Hole(part, {id(module): module}, memory)
        for part in intercepted.values():
            _intercept(part, self._call)

    def blocks(self) -> list[nn.Module]:
        """All blocks, held by this rank or not."""
        return list(self._blocks.values())

    def _outside(self) -> dict[str, nn.Module]:
        """Modules with parameters that neither are, nor lie in, nor contain a block."""
        inside = {part for block in self._blocks.values() for part in block.modules()}
        found = {}
        for name, part in self.module.named_modules():
            contains_block = any(child in inside for child in part.modules())
            if not contains_block and any(True for _ in part.parameters()):
                found[name] = part
        return found

    @contextmanager
    def _probing(self, trains: bool) -> Iterator[Probe]:
        """Calls, and values given to ``self.log``, go to the probe."""
        released = [(part.__dict__[key], *facts) for (part, key), facts in self._released.items()]
        parameters: dict[Tensor, str] = {p: name for name, p in self.module.named_parameters()}
        self._probe = Probe(
            parameter_names={**parameters, **{value: name for value, name, _ in released}}, trains=trains
        )
        self.module.__dict__["log"] = self._probe.log
        try:
            for value, _, wants in released:  # all ranks learn the same, whatever they hold
                value.requires_grad_(wants)
            with (
                torch.enable_grad(),
                torch.random.fork_rng(devices=[]),
                self._probe.labels,
                self._probe.reads,
                self._probe.saved,
            ):
                yield self._probe
        finally:
            for value, _, _ in released:
                value.requires_grad_(False)
            self._probe.undo()
            self._probe = None
            self.module.__dict__.pop("log", None)

    def probe(self, step: Callable[[], Any], *, trains: bool = True) -> StepFacts:
        """Run the step once with holes only and return what was learnt. ``trains``: it needs gradients.

        Raises:
            PipelineError: if the step cannot be cut; the message names the module and the remedy.
        """
        mark = random_mark()
        with self._probing(trains) as probe:
            facts = probe.finish(step())
            if not facts.blocks:
                raise PipelineError(
                    f"This step calls none of {', '.join(self._names[block] for block in self.blocks()[:3])}, ...,"
                    " between which the pipeline would be cut (perhaps it calls parts of them). Name what it calls one"
                    ' after another, by blocks="path.to.list" or a function that returns the modules, or use'
                    " pipeline_parallel_size=1."
                )
            seeds = range(_NUM_SEEDS) if random_mark() != mark else ()
        orders = [facts.blocks]
        for seed in seeds:  # which blocks are called may be drawn too
            with self._probing(trains) as probe:
                torch.manual_seed(seed)
                random.seed(seed)
                numpy.random.seed(seed)
                orders.append(probe.finish(step()).blocks)
        if not self._indices:
            self._indices = {self._blocks[name]: index for index, name in enumerate(facts.blocks)}
        expected = tuple(self._names[block] for block in self._indices)
        for order in orders:
            if not order or order != expected:
                raise PipelineError(
                    f"This step calls the blocks {list(order) or 'not at all'}, but the pipeline is cut along"
                    f" {list(expected) or 'none'}. {_SAME_BLOCKS}"
                )
        return facts

    def hold(self, names: set[str]) -> None:
        """Keep only the parameters with these names; the others become placeholders that take no memory."""
        kept = {id(p) for p in self.module.parameters() if self.parameter_names[id(p)] in names}
        for part in self.module.modules():
            for name, parameter in list(part._parameters.items()):
                if parameter is not None and id(parameter) not in kept:
                    self._released[part, name] = self.parameter_names[id(parameter)], parameter.requires_grad
                    del part._parameters[name]
                    part.__dict__[name] = hollow(placeholder(parameter))
            if isinstance(part, nn.RNNBase):  # holds its weights in a list too
                part._flat_weights = [getattr(part, name) for name in part._flat_weights_names]
        self._note_placeholders()

    def to(self, device: torch.device) -> None:
        """Move what stands for released weights to a device."""
        for hole in self._holes.values():
            hole.to(device)
        for part in self.module.modules():
            for name, value in part.__dict__.items():
                if id(value) in self.placeholders:
                    part.__dict__[name] = hollow(placeholder(value, device))
        self._note_placeholders()

    def _note_placeholders(self) -> None:
        """Placeholders are the tensors without memory of their own among modules' plain attributes."""
        attributes = (value for part in self.module.modules() for value in part.__dict__.values())
        self.placeholders = frozenset(id(v) for v in attributes if isinstance(v, Tensor) and 0 in v.stride())

    def run(self, run: StageRun, step: Callable[[], Any]) -> Any:
        """Run one stage. Returns the tensors for the next stage, or the step's own output on the last stage."""
        with self.resume(run):
            try:
                output = step()
            except _StageDone as done:
                return done.tensors
        if not run.entered or run.last < len(self._indices) or run.captures:
            blocks = run.facts.blocks
            if output is None:
                raise UnsupportedError(
                    f"The step returned None before it called {blocks[run.last - 1]}, which skips the batch, but all"
                    " stages of a pipeline work on it. Return the loss times 0, leave such samples out in the dataset,"
                    " or use pipeline_parallel_size=1."
                )
            raise PipelineError(f"This step ended without a call of {blocks[run.last - 1]}. {_SAME_BLOCKS}")
        refuse_hollow("The step's output", tree_leaves(output))
        refuse_leaked(tree_leaves(output))
        return output

    @contextmanager
    def resume(self, run: StageRun) -> Iterator[None]:
        """While active, calls belong to ``run`` (its backward may call blocks again to recompute activations)."""
        self._run = self.last_run = run
        try:
            yield
        finally:
            self._run = None

    def _call(self, part: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = self._indices.get(part)
        if self._probe is not None:
            name, hole = self._names[part], self._holes[part]
            if name in self._blocks:
                return self._probe.block(name, part, hole, args, kwargs)
            return self._probe.outside(name, part, self._parameters_of[part], hole, args, kwargs)
        run = self._run
        if run is None:
            raise PipelineError(
                f"{self._names[part]} was called outside of a training, validation, test or predict step, where its"
                " pipeline stage cannot be reached. Call the model inside of a step, or use pipeline_parallel_size=1."
            )
        self._check_order(run, part, index)
        inside = self.inside()  # for a hole too: it counts the calls
        if run.joins and index == run.first and not run.entered:
            return run.join(args, kwargs, self._holes[part](args, kwargs))
        if index == run.first and run.first > 0:
            args, kwargs = run.enter(args, kwargs)
        elif not run.entered:
            return hollow(self._holes[part](args, kwargs))
        elif index == run.last:
            raise _StageDone(run.leave(args, kwargs))
        else:
            args, kwargs = run.substitute(args, kwargs)
        with inside:
            output = call(*args, **kwargs)
        if run.captures and index == len(self._indices) - 1:
            run.captures = False  # when it is called again to recompute activations, it returns
            raise _StageDone(run.capture(args, kwargs, output))
        return output

    def _check_order(self, run: StageRun, part: nn.Module, index: int | None) -> None:
        """Refuse a block in whose place another one should have been called: its stage would never begin."""
        due = run.last if run.entered else run.first
        if index is None and self._names[part] in self._blocks:
            raise PipelineError(f"This step calls {self._names[part]}, as the first batch did not. {_SAME_BLOCKS}")
        if index is not None and index > due:
            raise PipelineError(f"This step calls {self._names[part]} without {run.facts.blocks[due]}. {_SAME_BLOCKS}")


def _refuse_uncuttable(name: str, part: nn.Module, *, is_around: bool) -> None:
    in_place = is_around and part._compiled_call_impl is not None  # by part.compile()
    if in_place or (type(part).__name__ == "OptimizedModule" and hasattr(part, "_orig_mod")):
        raise UnsupportedError(
            f"{name} is compiled by torch.compile, whose code a pipeline cannot be cut in. Leave it as it is and use"
            " Hybrid3DStrategy(compile=True), which compiles the blocks, or pipeline_parallel_size=1."
        )
    if any(type(hook).__name__ == "WeightNorm" for hook in part._forward_pre_hooks.values()):
        raise UnsupportedError(
            f"{name} has torch.nn.utils.weight_norm, whose weight is no parameter and cannot be copied. Use"
            " torch.nn.utils.parametrizations.weight_norm, or pipeline_parallel_size=1."
        )


def _intercept(
    module: nn.Module, handler: Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
) -> None:
    """Give one instance a class whose calls go through ``handler``."""
    base: Any = type(module)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return handler(self, functools.partial(base.__call__, self), args, kwargs)

    # the class looks like its base from outside: wrappers and messages use its name
    namespace = {"__call__": __call__, "__module__": base.__module__, "__qualname__": base.__qualname__}
    module.__class__ = type(base.__name__, (base,), namespace)
