"""Convolution kernels on a GPU: error against float64, and time beside cuDNN.

    python tests/gpu/check_conv.py [--suite NAME ...] [--only TEXT] [--form NAME] [--configs N]
                                   [--apart] [--workers N] [--json F]

Kernels are those the package would choose, or the best of one form; a case that a form does not
take is listed with its reason. They are written and compiled in several processes first. Data and
weights lie channels last for both; ours includes scale, shift and relu, cuDNN is the convolution
alone ("cudnn") and with the same work behind it ("eager"); "copy" is that of as many bytes as all
tensors have. Outputs hold NaN before the checked run.
Times are those of the kernels alone (CUPTI), medians of interleaved rounds, each launch behind a
read that cleans the L2.
"""

import argparse
import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if shutil.which("nvcc"):
    os.environ.setdefault("TVM_CUDA_COMPILE_MODE", "nvcc")

import torch
import torch.nn.functional as F
import tvm
from torch import Tensor

from tests.support.conv_suites import SUITES
from tests.support.convolutions import Conv
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.convolution.forms import CUDA_WRITER as WRITER
from tvm_fusion.runtime.build.build import build_functions
from tvm_fusion.runtime.timing.timing import kernel_times

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-5}
CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
ENTRY = "convolution"


def written(
    case: Conv, form: str | None, count: int, folder: Path, profile: str, apart: bool = False
) -> dict[str, Any]:
    """Libraries of the first `count` configurations that can be written: path, configuration, form,
    predicted microseconds; or why there is none. With `apart`, of the first of each tile only.
    """
    hw, policy, found, reasons = load_profile(profile), load_policy(None), [], []
    target = hw.to_target()
    try:
        problem = WRITER.read(case.func(), False)
        rank = next((f.rank for f in WRITER.forms if f.name == form), None)
        ranked = rank(problem, hw, policy) if rank else WRITER.ranked(problem, hw, policy)
    except Unsupported as why:
        return {"kernels": [], "refused": [str(why)]}
    tiles = set()
    for seconds, config in ranked:
        own = WRITER.form_of(config)
        if apart and (tile := _tile(config)) in tiles:
            continue
        if apart:
            tiles.add(tile)
        try:
            kernel = own.emit(problem, hw, config)
            mod = tvm.IRModule({ENTRY: kernel.with_attr("global_symbol", ENTRY)})
            library, resources = build_functions(mod, target)
        except Exception as why:  # the boundary of a candidate: the others are still tried
            reasons.append(f"{own.name}: {type(why).__name__}: {why}"[:300])
            continue
        path = folder / f"{os.getpid()}_{len(list(folder.iterdir()))}.so"
        library.export_library(str(path))
        spilled = sum(r.spill_bytes for r in resources)
        found.append((str(path), str(config), own.name, seconds * 1e6, spilled))
        if len(found) == count:
            break
    return {"kernels": found, "refused": reasons}


def _tile(config: Any) -> tuple:
    fields = (
        *("block_m", "block_n", "warp_m", "warp_n", "split", "staged", "deferred"),
        *("channels", "filters", "columns", "rolls", "shared"),
    )
    return type(config).__name__, *(getattr(config, name, None) for name in fields)


def tensors_of(case: Conv) -> list[Tensor]:
    """Random inputs as the case lays them out."""
    torch.manual_seed(0)
    made = []
    terms = math.prod(case.kernel) * case.channels / case.groups
    for i, shape in enumerate([case.data_shape, case.weight_shape, *case.extra]):
        x = torch.randn(*shape, device="cuda", dtype=torch.float32)
        made.append((x * (terms**-0.5 if i == 1 else 1.0)).to(getattr(torch, case.dtype)))
    return made


def by_torch(case: Conv, tensors: list[Tensor], behind: bool = True) -> Tensor:
    """The same by torch, results channels last as tensors of that shape."""
    space = "DHW"[-case.rank :]
    first = "IO" if case.transposed else "OI"
    x = tensors[0].permute([case.data_layout.index(c) for c in "NC" + space])
    w = tensors[1].permute([case.weight_layout.index(c) for c in first + space])
    before, after = case.padding[: case.rank], case.padding[case.rank :]
    padding = before
    if before != after:
        pairs = reversed(list(zip(before, after, strict=True)))  # the last dimension's come first
        x = F.pad(x, [n for pair in pairs for n in pair])
        padding = (0,) * case.rank
    options = dict(stride=case.strides, padding=padding, groups=case.groups)
    if case.transposed:
        y = TRANSPOSED[case.rank](x, w, output_padding=case.output_padding, **options)
    else:
        y = CONVOLUTIONS[case.rank](x, w, dilation=case.dilation, **options)
    y = y.permute([("NC" + space).index(c) for c in case.data_layout])
    if not behind:
        return y
    more = tensors[2:]
    if case.epilogue not in ("none", "relu"):
        y = y * more[0] + more[1] if len(more) > 1 else y
        y = y + more[2] if len(more) > 2 else y
    return torch.relu(y) if case.epilogue != "none" else y


def is_even(case: Conv) -> bool:
    """Whether there is as much padding before the data as behind it."""
    return case.padding[: case.rank] == case.padding[case.rank :]


BY_TORCH = ("none", "relu", "scale_shift", "residual")


def references(case: Conv, tensors: list[Tensor]) -> list[Tensor]:
    """The results in float64: of large convolutions by torch, of any other kind by numpy."""
    if case.epilogue in BY_TORCH and not case.prologue and is_even(case):
        return [by_torch(case, [t.double() for t in tensors])]
    found = case.expected([t.double().cpu().numpy() for t in tensors])
    return [torch.from_numpy(x).cuda() for x in found]


def check(name: str, case: Conv, kernels: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Runs one case; gives its row."""
    tensors = tensors_of(case)
    row: dict[str, Any] = {"name": name, "case": asdict(case), "refused": kernels["refused"]}
    wanted = references(case, tensors)
    outputs = [torch.empty(x.shape, device="cuda", dtype=tensors[0].dtype) for x in wanted]
    calls, rows = {}, []
    arguments = [tvm.runtime.from_dlpack(t) for t in (*tensors, *outputs)]
    for path, config, form, predicted, spilled in kernels["kernels"]:
        main = tvm.runtime.load_module(path)[ENTRY]
        for output in outputs:
            output.fill_(math.nan)
        main(*arguments)
        torch.cuda.synchronize()
        pairs = zip(outputs, wanted, strict=True)
        errors = [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs]
        error = max(math.inf if math.isnan(e) else e for e in errors)
        good = error <= TOLERANCE[case.dtype]
        found = {"form": form, "config": config, "predicted_us": predicted, "error": error}
        rows.append({**found, "spill_bytes": spilled})
        if not good:
            print(f"WRONG {name} {form} {config}: {error}", flush=True)
        calls[str(len(rows) - 1)] = lambda main=main: main(*arguments)
    torch.backends.cudnn.benchmark = True
    if is_even(case) or not case.transposed:  # torch crops transposed ones evenly
        calls["cudnn"] = lambda: by_torch(case, tensors, behind=False)
        calls["eager"] = lambda: by_torch(case, tensors)
    moved = sum(t.nbytes for t in (*tensors, *outputs))
    source = torch.empty(moved // 2, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    calls["copy"] = lambda: target.copy_(source)
    times = kernel_times(calls, repeats)
    row["copy_us"] = times["copy"].median_us
    for i, found in enumerate(rows):
        found["us"] = times[str(i)].median_us
    row["kernels"] = rows
    for peer in ("cudnn", "eager"):
        row[f"{peer}_us"] = times[peer].median_us if peer in times else math.nan
    best = min(rows, key=lambda r: r["us"], default=None)
    if best is None:
        print(f"{name:34s} none: {'; '.join(row['refused'])[:200]}", flush=True)
        return row
    print(
        f"{name:34s} first {rows[0]['us']:8.1f} best {best['us']:8.1f} predicted"
        f" {rows[0]['predicted_us']:8.1f} ({row['copy_us'] / rows[0]['us']:.2f} of the copy rate)"
        f" cudnn {row['cudnn_us']:8.1f} eager {row['eager_us']:8.1f}"
        f" error {max(r['error'] for r in rows):.1e} {best['form']} {short(best['config'])}"
        f" | {rows[0]['form']} {short(rows[0]['config'])}",
        flush=True,
    )
    return row


def short(config: str) -> str:
    """A configuration's numbers."""
    return config[config.index("(") + 1 : -1].replace("block_", "").replace(" ", "")[:70]


def main() -> int:
    """The command; 1 where a kernel is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--suite", nargs="+", default=["resnet50"], choices=sorted(SUITES))
    parser.add_argument("--only", default="")
    parser.add_argument("--form")
    parser.add_argument("--profile", default="nvidia_h200")
    parser.add_argument("--configs", type=int, default=1)
    parser.add_argument("--apart", action="store_true", help="one configuration of each tile")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--json")
    args = parser.parse_args()
    cases = {n: c for suite in args.suite for n, c in SUITES[suite]().items() if args.only in n}
    if args.batch:
        cases = {f"{n} b{args.batch}": replace(c, batch=args.batch) for n, c in cases.items()}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(args.workers, mp_context=spawn) as pool:
            begun = {
                n: pool.submit(
                    written,
                    c,
                    args.form,
                    args.configs,
                    _own_folder(folder, i),
                    args.profile,
                    args.apart,
                )
                for i, (n, c) in enumerate(cases.items())
            }
            for name, case in cases.items():
                try:
                    rows.append(check(name, case, begun[name].result(), args.repeats))
                except Exception as error:  # the boundary of a case: the others are still tried
                    print(f"FAILED {name}: {type(error).__name__}: {error}"[:400], flush=True)
                    rows.append({"name": name, "failed": str(error)})
    if args.json:
        found = {"device": torch.cuda.get_device_name(), "rows": rows}
        Path(args.json).write_text(json.dumps(found, indent=1))
    wrong = [
        r["name"]
        for r in rows
        if "failed" in r
        or any(k["error"] > TOLERANCE[r["case"]["dtype"]] for k in r.get("kernels", ()))
    ]
    print(f"{len(rows)} cases, wrong: {wrong or 'none'}")
    return bool(wrong)


def _own_folder(folder: str, number: int) -> Path:
    path = Path(folder, str(number))
    path.mkdir()
    return path


if __name__ == "__main__":
    sys.exit(main())
