"""Generation on a GPU through `torch.compile`: scores of tokens that are given, step by step.

    python tests/gpu/check_generation.py [--only NAMES] [--steps N] [--limit S] [--out FILE]

The language models of `tests.benchmarks.real_models` in float16: a text is read, and then one token
after the other, with a static cache; all are given the same tokens (teacher forcing). Compared with
PyTorch in float32, with the same numbers; eager execution in float16 stands beside. An error is the
largest difference of a step's scores over their largest number, of all steps the largest. No step
behind the second one may compile anything. Seconds are those of the text, the first token, the
second and the rest, compiling among them. A model that takes longer than the limit has a row that
says so; rows of other models stay in the file.
"""

import argparse
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import tvm_fusion.torch_backend  # noqa: F401 - registers it
from tests.benchmarks.real_models.child import AS_FAR, CEILINGS
from tests.benchmarks.real_models.models import Where, exact, make
from tests.benchmarks.record import beside, header, write
from tvm_fusion.bench.patience import within

NAMES = "gpt2,llama_1b,qwen3_06b"


def main() -> int:
    """Check all models; returns 1 if one is wrong or compiles again."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--only", default=NAMES, help=f"of {NAMES},gemma2_2b")
    arguments.add_argument("--steps", type=int, default=64, help="tokens behind the text")
    arguments.add_argument("--limit", type=float, help="seconds for a model")
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--dtype", default="float16")
    arguments.add_argument("--tiny", action="store_true", help="of two layers")
    arguments.add_argument("--out", help="a JSON file for the results")
    args = arguments.parse_args()
    result = header("", args.device == "cuda", 1.0, 1)
    result["method"] = " ".join(__doc__.split("\n\n")[2].split())
    names = args.only.split(",")
    if args.out:
        result = beside(Path(args.out), result, names)
    where = Where(args.device, getattr(torch, args.dtype), args.tiny)
    rows = []
    for name in names:
        row = {"name": name, "dtype": args.dtype, "steps": args.steps, "right": False}
        try:
            with within(args.limit), torch.no_grad():
                row |= checked(name, where, args.steps)
        except TimeoutError as late:
            row["failure"] = str(late)
        rows.append(row | {"date": result["date"]})
        print(json.dumps(row), flush=True)
        if args.out:
            write(result | {"rows": [*result["rows"], *rows]}, Path(args.out))
    return int(not all(row["right"] for row in rows))


def checked(name: str, where: Where, steps: int) -> dict[str, Any]:
    """The errors of a model, ours and those of eager execution, and what was compiled."""
    module, (text, start) = make(f"{name}_prefill", where)
    words = module.model.config.vocab_size
    tokens = [text, *(where.tokens(1, 1, words) for _ in range(steps))]
    wanted = scores(exact(module, torch.float32), tokens, start)
    eager = scores(module, tokens, start)
    parts: list[Any] = []
    counts: list[int] = []
    times = [time.monotonic()]

    def told() -> None:
        counts.append(len(parts))
        times.append(time.monotonic())

    options = {"report": parts.append}
    compiled = torch.compile(module, backend="tvm_fusion", dynamic=False, options=options)
    given = scores(compiled, tokens, start, told)
    error, eager_error = (max(map(error_of, found, wanted)) for found in (given, eager))
    allowed = max(CEILINGS[str(where.dtype).removeprefix("torch.")], AS_FAR * eager_error)
    ends = [*times[:4], times[-1]]
    return {
        "text": text.shape[1],
        "error": error,
        "eager_error": eager_error,
        "allowed_error": allowed,
        "parts": counts[-1],
        "parts_after_two_steps": counts[2],
        "seconds": [round(end - begin, 1) for begin, end in pairwise(ends)],
        "right": error <= allowed and counts[-1] == counts[2],
    }


def scores(module: Any, tokens: list[torch.Tensor], start: torch.Tensor, told: Any = None) -> list:
    """The scores behind the text and each token; `told` is called after each."""
    found, position = [], start.clone()
    for each in tokens:
        found.append(module(each, position).float().clone())
        position = position + each.shape[1]
        if told is not None:
            told()
    return found


def error_of(given: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference over the largest number."""
    return float((given - wanted).abs().max() / wanted.abs().max())


if __name__ == "__main__":
    sys.exit(main())
