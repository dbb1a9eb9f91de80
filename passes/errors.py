"""The exceptions that Tessera raises. Each message names the input at fault and the mend."""

from __future__ import annotations


class TesseraError(Exception):
    """Base of every error raised by this package."""


class OptionsError(TesseraError, ValueError):
    """An option has an unknown name or a value outside its domain."""


class ClusterError(TesseraError, ValueError):
    """A cluster description cannot be read, or names a device that is not there."""


class LoweringError(TesseraError):
    """A graph is not something that ``lower`` can turn into kernels."""


class ProfileError(TesseraError, ValueError):
    """A profile misses an entry or holds a number that cannot be a time."""


class PlanError(TesseraError):
    """A plan cannot be made, or does not fit the graph or the cluster it is used with."""


class InfeasibleError(PlanError):
    """No placement satisfies the constraints (memory, pins); the message says what does not fit."""


class ProgramError(TesseraError):
    """A program is not a correct execution of its graph; raised by ``verify`` and ``Program.from_text``."""


class LoadError(TesseraError, ValueError):
    """A state dict does not fit its model, or a model cannot be placed on several devices."""


class FallbackError(TesseraError):
    """Under ``strict=True``: something that would otherwise have fallen back with a warning."""


class TesseraWarning(UserWarning):
    """Category of every warning of this package, so that one filter catches them all."""


class EngineError(TesseraError, RuntimeError):
    """An engine cannot do what was asked of it: it is closed, or the request was dropped when it closed."""


class EngineFullError(EngineError):
    """The engine's queue is full, and the caller did not want to wait (any longer)."""
