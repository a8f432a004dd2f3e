"""What a user adds: kernel families, rewrites of the graph, profiles of devices.

Each `register_...` takes effect at once, for all that is planned in this process and for the
processes that `tune` starts. What it returns undoes it, as a context manager or by `undo()`; what a
decorator registered is undone by `unregister_...` and its name::

    with tvm_fusion.register_family(Mine(), kinds=("llvm",)):
        compiled = tvm_fusion.compile(model, "llvm")

    @tvm_fusion.register_rewrite("double_to_add", kinds=("llvm",))
    def double_to_add(hw):
        return DoubleToAdd()

The other names here are what such a family, rewrite or profile is written with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar, overload

import tvm
import tvm_ffi

from .config import (
    HardwareProfile,
    Policy,
    add_profile,
    added_profiles,
    load_policy,
    load_profile,
    remove_profile,
)
from .cost.traffic import Resources, Traffic
from .errors import InputError, Unsupported
from .kernels import registry
from .kernels.base import (
    MULTIPLIES,
    READABLE,
    REDUCES,
    ROLLED,
    SUMS_COLUMNS,
    SUMS_ROWS,
    TRANSPOSES,
    Family,
    Fit,
    Needs,
    OnCPU,
    write_on_cpu,
)
from .kernels.forms import Form, Writer
from .plan.group_view import GroupView
from .plan.refusal import Refusal, RefusalCode
from .transform.rewrites.rewrites import REWRITES, Rewrite, may_round

__all__ = [
    "MULTIPLIES",
    "READABLE",
    "REDUCES",
    "ROLLED",
    "SUMS_COLUMNS",
    "SUMS_ROWS",
    "TRANSPOSES",
    "Family",
    "Fit",
    "Form",
    "GroupView",
    "HardwareProfile",
    "MakePass",
    "Needs",
    "OnCPU",
    "Policy",
    "Refusal",
    "RefusalCode",
    "Registration",
    "Resources",
    "Traffic",
    "Unsupported",
    "Writer",
    "load_policy",
    "load_profile",
    "register_family",
    "register_profile",
    "register_rewrite",
    "unregister_family",
    "unregister_profile",
    "unregister_rewrite",
    "write_on_cpu",
]

KINDS = registry.KINDS
MakePass = Callable[[HardwareProfile], tvm.transform.Pass]
Added = TypeVar("Added")
AnyFamily = TypeVar("AnyFamily", bound=Family)
AnyMake = TypeVar("AnyMake", bound=MakePass)


class Registration(Generic[Added]):
    """What was registered, until it is undone; as a context manager, for the time of its block.

    Attributes
    ----------
    name : str
    added : the family, pass or profile, which `with ... as` gives, too.
    """

    def __init__(self, name: str, added: Added, remove: Callable[[str], None]) -> None:
        self.name = name
        self.added = added
        self._remove: Callable[[str], None] | None = remove

    def undo(self) -> None:
        """Takes it out again; nothing where that was done."""
        if self._remove is not None:
            remove, self._remove = self._remove, None
            remove(self.name)

    def __enter__(self) -> Added:
        return self.added

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"Registration({self.name!r}{', undone' if self._remove is None else ''})"


@overload
def register_family(
    family: type[AnyFamily], *, kinds: tuple[str, ...] = KINDS
) -> type[AnyFamily]: ...
@overload
def register_family(
    family: AnyFamily, *, kinds: tuple[str, ...] = KINDS
) -> Registration[AnyFamily]: ...
@overload
def register_family(
    family: None = None, *, kinds: tuple[str, ...] = KINDS
) -> Callable[[type[AnyFamily]], type[AnyFamily]]: ...
def register_family(family: Any = None, *, kinds: tuple[str, ...] = KINDS) -> Any:
    """Adds a kernel family, which the planner asks before all that were there.

    Parameters
    ----------
    family : Family or a class of such
        A class, as below a decorator, is made an instance of without arguments.
    kinds : of "cuda" and "llvm"
        The devices that it writes kernels for.

    Returns
    -------
    Registration or the class
        The class where one was given, which `unregister_family` and its name undo.

    Raises
    ------
    TypeError
        It is no `Family`, or lacks a name or methods, which the message lists.
    ValueError
        Another family has the name, or a kind does not exist.

    Examples
    --------
    >>> from tvm_fusion.extend import Family, Fit, Resources, Traffic
    >>> class Mine(Family):
    ...     name = "mine"
    ...     def accepts(self, group, hw, policy):
    ...         return Fit("mine", 1, 1, tuple(1.0 for _ in group.blocks))
    ...     def traffic(self, group, fit, hw):
    ...         return Traffic(hbm_bytes=1e6, l2_bytes=1e6)
    ...     def resources(self, group, fit, hw):
    ...         return Resources(registers_per_thread=32, smem_bytes=0)
    >>> with register_family(Mine(), kinds=("llvm",)) as mine:
    ...     print(mine.name)
    mine
    """
    if family is None:
        return lambda cls: register_family(cls, kinds=kinds)
    if isinstance(family, type) and issubclass(family, Family):
        registry.register(family(), kinds)
        return family
    registry.register(family, kinds)
    return Registration(family.name, family, unregister_family)


def unregister_family(name: str) -> None:
    """Takes out a family that was added.

    Raises
    ------
    LookupError
        None of that name was added.
    """
    _check_added("kernel family", name, [added.name for added, _ in registry.added()])
    registry.unregister(name)


@overload
def register_rewrite(
    name: str, make: None = None, *, kinds: tuple[str, ...] = KINDS, rounds: bool = False
) -> Callable[[AnyMake], AnyMake]: ...
@overload
def register_rewrite(
    name: str,
    make: MakePass | tvm.transform.Pass,
    *,
    kinds: tuple[str, ...] = KINDS,
    rounds: bool = False,
) -> Registration[MakePass]: ...
def register_rewrite(
    name: str, make: Any = None, *, kinds: tuple[str, ...] = KINDS, rounds: bool = False
) -> Any:
    """Adds a rewrite of the graph, which is tried on each model and kept where the predicted time
    falls by a hundredth and more; the plan names it (`plan.rewrites`).

    The pass sees high-level Relax whose composites (softmax, norms, ...) are opened, before
    `LegalizeOps`. It runs behind this package's own rewrites and those added before it.

    Parameters
    ----------
    name : str
        Stands in plans: another pass needs another name.
    make : callable or tvm.transform.Pass, optional
        Called with the `HardwareProfile` of the device, returns the pass; or the pass. Without it,
        what is returned is a decorator of such a callable.
    kinds : of "cuda" and "llvm"
        The devices that it is tried for.
    rounds : bool
        The rewritten graph rounds elsewhere: it is not tried where the policy keeps each rounding.

    Returns
    -------
    Registration or a decorator
        What a decorator registered, `unregister_rewrite` and its name undo.

    Raises
    ------
    TypeError
        `make` is neither a pass nor callable.
    ValueError
        The name is taken or empty, or a kind does not exist.

    Notes
    -----
    When it is tried, an `InputError` that names it says that it raised something, returned no
    module, or one that is not well formed. Whether it kept the numbers, the check of `compile`
    says, whose reference is the model without any rewrite.
    """
    if make is None:
        return lambda later: _decorated(name, later, kinds, rounds)
    if isinstance(make, type) or not (isinstance(make, tvm.transform.Pass) or callable(make)):
        raise TypeError(
            f"rewrite {name!r}: make is a pass or a function of a HardwareProfile that returns "
            f"one, not {make!r}"
        )
    if not isinstance(name, str) or not name:
        raise ValueError(f"a rewrite has a name, not {name!r}")
    if name in REWRITES:
        raise ValueError(f"rewrite {name!r} is already registered")
    if not kinds or not set(kinds) <= set(KINDS):
        raise ValueError(f"rewrite {name!r}: kinds={kinds!r}, not of {KINDS}")
    made: MakePass = (lambda _hw: make) if isinstance(make, tvm.transform.Pass) else make
    policies = may_round if rounds else lambda _policy: True
    REWRITES[name] = Rewrite(
        lambda hw: checked_pass(name, made, hw), policies, tuple(kinds), ours=False
    )
    return Registration(name, made, unregister_rewrite)


def _decorated(name: str, make: Any, kinds: tuple[str, ...], rounds: bool) -> Any:
    register_rewrite(name, make, kinds=kinds, rounds=rounds)
    return make


def unregister_rewrite(name: str) -> None:
    """Takes out a rewrite that was added.

    Raises
    ------
    LookupError
        None of that name was added.
    """
    _check_added("rewrite", name, [n for n, rewrite in REWRITES.items() if not rewrite.ours])
    del REWRITES[name]


def checked_pass(name: str, make: MakePass, hw: HardwareProfile) -> tvm.transform.Pass:
    """A user's pass whose errors name it; a module that it leaves equal is returned as it is."""

    @tvm.transform.module_pass(opt_level=0, name=f"tvm_fusion.rewrite.{name}")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        try:
            found = make(hw)(mod)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise InputError(
                f"rewrite {name!r} failed on a module of the model: {why}"
                "; mend it, or take it out with unregister_rewrite"
            ) from error
        if not isinstance(found, tvm.IRModule):
            raise InputError(
                f"rewrite {name!r} returned {found!r} in place of an IRModule"
                "; return the module, changed or not"
            )
        if not tvm.relax.analysis.check_well_formed(found):
            raise InputError(
                f"rewrite {name!r} returned a module that is not well formed"
                "; look at it with relax.analysis.well_formed"
            )
        return mod if tvm_ffi.structural_equal(found, mod) else found

    return run


def register_profile(profile: HardwareProfile | str | Path) -> Registration[HardwareProfile]:
    """Makes a device known by the name and the aliases in its profile, as a `target` of all that
    takes one, and for GPUs of this machine whose name has one of the aliases in it.

    Parameters
    ----------
    profile : HardwareProfile or path
        A path is one to a TOML file as in `configs/`. Of a profile that is near,
        `dataclasses.replace(load_profile("h100"), name="mine", aliases=(), num_sms=66)` makes one.

    Raises
    ------
    TypeError
        It is neither.
    ValueError
        The name or an alias is taken, or is no name (it has capitals, ends in .toml, is "cuda").
    ConfigError
        The file is not there, or none of a profile.
    """
    if isinstance(profile, str | Path):
        profile = load_profile(Path(profile))
    add_profile(profile)
    return Registration(profile.name, profile, unregister_profile)


def unregister_profile(name: str) -> None:
    """Takes out a profile that was added.

    Raises
    ------
    LookupError
        None of that name was added.
    """
    _check_added("profile", name, [profile.name for profile in added_profiles()])
    remove_profile(name)


def _check_added(what: str, name: str, added: list[str]) -> None:
    if name not in added:
        known = ", ".join(added) or "none"
        raise LookupError(f"no {what} {name!r} was registered (registered: {known})")
