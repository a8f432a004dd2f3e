"""Errors a user can meet, and the one exception that kernel writers raise.

Every message says what went wrong, where, why, and what to do about it.
"""

CHECK_FAILED = 1  # the exit status of a command whose check failed
BAD_INPUT = 2  # that of a command that cannot begin


class TvmFusionError(Exception):
    """Base class of everything this package raises on purpose."""


class InputError(TvmFusionError):
    """The caller gave something unusable: a file, a target, a policy key, an input array. CLI exit
    status 2.
    """


class OutOfRange(InputError, IndexError):
    """A compiled module was to read or write at an index that its tensor does not have."""


class DividedByZero(InputError, ZeroDivisionError):
    """A compiled module was to divide an integer by zero."""


class NothingTuned(InputError):
    """A database has nothing of a device, though of others."""


class FrontendError(InputError):
    """A model could not be read or converted."""


class TargetError(InputError):
    """An unknown target, or a device the machine does not have."""


class ConfigError(InputError):
    """A profile or policy file with an unknown key, a missing value or a wrong type."""


class PlanError(InputError):
    """A plan file that is broken, or was made for another module."""


class VerificationError(TvmFusionError):
    """Numbers of a fused kernel are further from the float64 reference than the rule allows. CLI
    exit status 1.
    """


class BuildError(TvmFusionError):
    """A kernel could not be compiled."""


class Unsupported(TvmFusionError):
    """A kernel writer cannot express a PrimFunc. The caller takes another kernel class; never shown
    as a crash.
    """


class TooDeep(Unsupported):
    """A chain of operators is longer than Python's stack allows (`write_kernels.call_deep`)."""
