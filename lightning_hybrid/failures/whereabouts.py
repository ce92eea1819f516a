"""What a rank is doing, read from the frames of its main thread: nothing is noted while it works, so it costs nothing.

A frame knows its module, its function and its variables. The few of Lightning's, torch's and ours that stand for
something are named here; the rest of a stack is the user's, or nobody's business.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

__all__ = ["Whereabouts", "frames_of", "frames_of_traceback", "look"]

_KINDS = {"F": "forward", "B": "backward", "I": "backward (inputs)", "W": "backward (weights)"}
#: Where a main thread waits for other ranks.
_WAITING = (
    "torch.distributed",
    "lightning_hybrid.data_parallel.gloo",
    "lightning_hybrid.pipeline.channels",
    "lightning_hybrid.pipeline.activations",
    "torch.autograd.graph",
    "torch._ops",
)
_OPTIMIZER, _IN_CLOSURE = "optimizer step", ("training_step", "backward", "zero_grad")
_OURS = ("lightning_hybrid", "lightning", "torch", "torchmetrics", "lightning_utilities", "lightning_fabric")
_LIBRARY = tuple({str(Path(path)) for name, path in sysconfig.get_paths().items() if name in ("stdlib", "purelib")})


class Whereabouts(NamedTuple):
    """Where the main thread of a rank stands."""

    action: str
    """In words, from the outside to the inside: ``"training batch 3, stage 1 forward of micro-batch 0"``."""
    waits: bool
    """Whether it is inside of a communication with other ranks."""
    signature: tuple[int, ...]
    """Changes as soon as the thread goes on."""
    stack: str = ""
    """The innermost frames, one a line."""


def frames_of(thread: int) -> list[FrameType]:
    """Return the frames of a running thread, the outermost first; nothing if it has ended."""
    frame, frames = sys._current_frames().get(thread), []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def frames_of_traceback(error: BaseException) -> list[FrameType]:
    """Return the frames that an exception has gone through, the outermost first, with those of what caused it."""
    inner = error.__cause__ or error.__context__
    own = [frame for frame, _ in _walk(error.__traceback__)]
    return own + (frames_of_traceback(inner) if inner is not None and inner.__traceback__ is not None else [])


def _walk(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def look(frames: Iterable[FrameType], *, with_stack: bool = False) -> Whereabouts:
    """Say what a thread with these frames (the outermost first) is doing."""
    frames = list(frames)
    phrases: list[str] = []
    for frame in frames:
        known = _NAMES.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        phrase = known(frame) if known is not None else None
        if phrase and phrase not in phrases:
            if phrase in _IN_CLOSURE and _OPTIMIZER in phrases:  # Lightning runs them in the optimizer's closure
                phrases.remove(_OPTIMIZER)
            phrases.append(phrase)
    if own := next((frame for frame in reversed(frames) if _is_users(frame)), None):
        phrases.append(f"in {own.f_code.co_name} ({Path(own.f_code.co_filename).name}:{own.f_lineno})")
    inner = frames[-1].f_globals.get("__name__", "") if frames else ""
    return Whereabouts(
        action=", ".join(phrases),
        waits=inner.startswith(_WAITING) or any(_waits(frame) for frame in frames[-3:]),
        signature=tuple(x for frame in frames for x in (id(frame), frame.f_lasti)),
        stack="".join(f"    {_line(frame)}\n" for frame in frames[-12:]) if with_stack else "",
    )


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _waits(frame: FrameType) -> bool:
    """A wait in code of ours that also computes."""
    name = frame.f_globals.get("__name__", "")
    return name == "lightning_hybrid.pipeline.step" and frame.f_code.co_name == "_await_gradients"


def _is_users(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    if module.split(".")[0] in _OURS or module in ("runpy", "threading", "multiprocessing"):
        return False
    path = frame.f_code.co_filename
    return not path.startswith((*_LIBRARY, "<frozen")) and "site-packages" not in path and path != "<string>"


def _of(name: str, default: Any = None) -> Callable[[FrameType], Any]:
    return lambda frame: frame.f_locals.get(name, default)


def _hook(frame: FrameType) -> str | None:
    name = frame.f_locals.get("hook_name")
    if name in (None, "training_step", "on_before_zero_grad", "optimizer_step"):
        return None
    owner = frame.f_locals.get("callback") or frame.f_locals.get("pl_module") or frame.f_locals.get("trainer")
    owner_name = type(owner).__name__ if owner is not None else ""
    return f"{owner_name}.{name}" if owner_name and owner_name != "Trainer" else f"{name}"


def _action(frame: FrameType) -> str | None:
    now = getattr(frame.f_locals.get("self"), "now", None)
    if now is None:
        return None
    return f"stage {now.stage} {_KINDS.get(now.kind.value, now.kind.value)} of micro-batch {now.microbatch}"


def _batch(frame: FrameType) -> str:
    number = frame.f_locals.get("batch_idx")
    return f"training batch {number}" if number is not None else "before a training batch"


def _evaluation(frame: FrameType) -> str:
    values = frame.f_locals
    loop, number = values.get("self"), values.get("batch_idx", "?")
    stage = getattr(getattr(getattr(loop, "trainer", None), "state", None), "stage", None)
    return f"{getattr(stage, 'value', 'evaluation')} batch {number}"


def _said(text: str) -> Callable[[FrameType], str]:
    return lambda frame: text


_CALL, _LOOPS, _OWN = "lightning.pytorch.trainer.call", "lightning.pytorch.loops.", "lightning_hybrid."
#: (module, function) -> what a frame of it means; ``None`` for nothing.
_NAMES: dict[tuple[str, str], Callable[[FrameType], str | None]] = {
    (_CALL, "_call_callback_hooks"): _hook,
    (_CALL, "_call_lightning_module_hook"): _hook,
    (_CALL, "_call_lightning_datamodule_hook"): _hook,
    (_CALL, "_call_setup_hook"): _said("setup"),
    (_CALL, "_call_configure_model"): _said("configure_model"),
    (_CALL, "_call_callbacks_on_save_checkpoint"): _said("on_save_checkpoint"),
    (_CALL, "_call_callbacks_on_load_checkpoint"): _said("on_load_checkpoint"),
    (f"{_LOOPS}training_epoch_loop", "advance"): _batch,
    (f"{_LOOPS}evaluation_loop", "_evaluation_step"): _evaluation,
    (f"{_LOOPS}prediction_loop", "_predict_step"): _evaluation,
    (f"{_LOOPS}fetchers", "__next__"): _said("loading a batch"),
    ("torch.utils.data.dataloader", "__next__"): _said("loading a batch"),
    (f"{_OWN}pipeline.step", "run"): _action,
    (f"{_OWN}strategy", "training_step"): _said("training_step"),
    (f"{_OWN}strategy", "backward"): _said("backward"),
    (f"{_OWN}strategy", "optimizer_step"): lambda frame: None,
    (f"{_OWN}strategy", "_parallelize"): _said("cutting, splitting and sharding the model"),
    (f"{_OWN}setup_pipeline", "__call__"): _said("looking at the first batch"),
    (f"{_OWN}checkpoint.hooks", "save_checkpoint"): _said("saving a checkpoint"),
    (f"{_OWN}checkpoint.hooks", "load_checkpoint"): _said("loading a checkpoint"),
    (f"{_OWN}logged_values", "log"): _said("logging"),
    ("lightning.pytorch.core.module", "log"): _said("logging"),
    ("torch.optim.optimizer", "wrapper"): _said(_OPTIMIZER),
}
