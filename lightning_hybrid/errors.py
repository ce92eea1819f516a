"""The error tree. Every message says what was given, what would be right, and the way out."""

from __future__ import annotations

__all__ = [
    "ArchiveError",
    "CheckpointError",
    "ConfigurationError",
    "HybridError",
    "NonFiniteError",
    "PipelineError",
    "ProbeError",
    "UnsupportedError",
    "VerificationError",
]


class HybridError(Exception):
    """Root of all errors raised by this library."""


class ConfigurationError(HybridError, ValueError):
    """An argument, or a combination of arguments, cannot work. The message states the numbers and the remedy."""


class UnsupportedError(HybridError, NotImplementedError):
    """A combination that could not be made equal to one process. Raised before the first step, never in the middle."""


class PipelineError(HybridError, RuntimeError):
    """A pipeline stage could not be cut out of the step, or failed while it ran."""


class CheckpointError(HybridError, RuntimeError):
    """A checkpoint is missing, damaged, foreign or does not fit the model."""


class ArchiveError(HybridError, RuntimeError):
    """The configuration archive cannot be read or written."""


class ProbeError(HybridError, RuntimeError):
    """Devices and links could not be measured; the message has what failed first, and on which rank."""


class NonFiniteError(HybridError, ArithmeticError):
    """A loss or a gradient is NaN or infinite. Raised on all ranks by ``FiniteGradients``."""


class VerificationError(HybridError, ArithmeticError):
    """A step differs from the same step in one process. Raised on all ranks by ``Verify``."""
