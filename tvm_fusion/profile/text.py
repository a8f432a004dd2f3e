"""A profile as text: at most 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..report.text import align, clip, format_bytes, format_spread, format_time
from ..runtime.timing.timing import TimeReport, Verdict
from .facts import KernelProfile, ModuleProfile, Profile

TOP = 10  # kernels
LABEL = 26  # columns of what a kernel computes
CLASS = 11
GB = 1e9


def text(profile: Profile, full: bool = False) -> str:
    """The profile of a function: totals, and the kernels that take most, or all of them."""
    before, after = profile.unfused, profile.fused
    parts = [
        "\n".join([_heading(profile), _totals(profile)]),
        _kernels("after fusion", after, full),
        _kernels("before fusion", before, full),
    ]
    return "\n\n".join(parts)


def _heading(profile: Profile) -> str:
    threads = f", {profile.threads} threads" if profile.threads else ""
    sizes = ", ".join(f"{name} = {size}" for name, size in profile.sizes.items())
    clocks = {"wall": "the clock", "kernel": "CUPTI", "event": "CUDA events"}
    lines = [
        f"tvm_fusion profile on {profile.target}{threads}: {profile.fused.span.samples} calls by "
        f"{clocks[profile.fused.span.clock]}; medians (quartiles)"
    ]
    if sizes:
        lines.append(f"symbolic sizes taken as {clip(sizes, 75)}")
    return "\n".join(lines)


def _totals(profile: Profile) -> str:
    """A row for each quantity, before and after."""
    before, after = profile.unfused, profile.fused

    def row(name: str, shown: Callable[[ModuleProfile], str], saved: str = "") -> tuple[str, ...]:
        return name, shown(before), shown(after), saved

    def spread(which: str) -> tuple[str, ...]:
        first, second = getattr(after, which), getattr(before, which)
        return row(
            which, lambda module: format_spread(getattr(module, which)), _saved(first, second)
        )

    rows = [
        ("", "before fusion", "after fusion", ""),
        row("launches", lambda m: f"{m.launches:,}", _times(before.launches, after.launches)),
        spread("call"),
        spread("busy"),
        spread("gaps"),
        row("bytes", lambda m: format_bytes(m.bytes), _times(before.bytes, after.bytes)),
        row("bandwidth", lambda m: _bandwidth(m, profile.memory_bytes_per_s)),
        row(
            "memory",
            lambda m: format_bytes(m.measured_memory_bytes or m.memory_bytes),
            _times(before.memory_bytes, after.memory_bytes),
        ),
    ]
    words = {"busy": "in kernels", "gaps": "between", "call": "a call", "memory": "peak memory"}
    return align([(words.get(name, name), *rest) for name, *rest in rows], left=1)


def _bandwidth(module: ModuleProfile, most: float) -> str:
    if not module.bytes or not module.busy.median_us:
        return "-"
    rate = module.bytes * 1e6 / module.busy.median_us
    return (
        f"{rate / GB:.3g} GB/s, {rate / most:.0%} of memory's" if most else f"{rate / GB:.3g} GB/s"
    )


def _saved(after: TimeReport, before: TimeReport) -> str:
    """How many times less, where the samples tell the two apart."""
    ratio = after.ratio(before)
    if ratio is None:
        return Verdict.EVEN.value if after.verdict(before) is Verdict.EVEN else ""
    return f"{ratio:.2f}x"


def _times(before: float | None, after: float | None) -> str:
    return f"{before / after:.2f}x" if before and after else ""


def _kernels(title: str, module: ModuleProfile, full: bool) -> str:
    """The kernels in the order in which they take most time; all of them in their own order."""
    order: Sequence[KernelProfile] = module.kernels
    if not full:
        order = sorted(order, key=lambda kernel: -(kernel.time.median_us or 0.0))[:TOP]
    total = sum(kernel.time.median_us or 0.0 for kernel in module.kernels)
    rows = [(title, "class", "median", "quartiles", "of all", "bytes", "GB/s", "limit")]
    for kernel in order:
        time, rate, share = kernel.time, kernel.bytes_per_s, kernel.limit_share
        rows.append(
            (
                f"  {clip(kernel.label, LABEL)}",
                clip(kernel.kernel_class or "-", CLASS),
                format_time(time.median_us),
                f"{format_time(time.low_us)} - {format_time(time.high_us)}",
                f"{(time.median_us or 0.0) / total:.0%}" if total else "-",
                format_bytes(kernel.bytes),
                "-" if rate is None else f"{rate / GB:.3g}",
                "-" if share is None else f"{share:.0%}",
            )
        )
    lines = [align(rows, left=2)]
    left = len(module.kernels) - len(order)
    if left:
        lines.append(f"  and {left} more: --full")
    return "\n".join(lines)
