"""Reports as JSON, made without a compiler: any number of layers, all that a report can have."""

from __future__ import annotations

from typing import Any

WIDTH, HIDDEN, TOKENS = 768, 3072, 512
ACTIVATION = 2 * TOKENS * WIDTH  # bytes

# Of a layer: kernel, family, operators, what it reads of the layer, floating point operations.
LAYER = (
    ("norm1", "row", ("square", "mean", "rsqrt", "scale"), ("x",), 4 * TOKENS * WIDTH),
    ("qkv", "gemm", ("matmul", "bias"), ("norm1",), 6 * TOKENS * WIDTH**2),
    ("attention", "attention", ("scores", "softmax", "values"), ("qkv",), 4 * TOKENS**2 * WIDTH),
    ("project", "gemm", ("matmul", "bias", "add"), ("attention", "x"), 2 * TOKENS * WIDTH**2),
    ("norm2", "row", ("square", "mean", "rsqrt", "scale"), ("project",), 4 * TOKENS * WIDTH),
    ("up", "gemm", ("matmul", "bias", "gelu"), ("norm2",), 2 * TOKENS * WIDTH * HIDDEN),
    ("down", "gemm", ("matmul", "bias", "add"), ("up", "project"), 2 * TOKENS * WIDTH * HIDDEN),
    ("permute", "transpose", ("transpose",), ("down",), 0),
)
MODULES = {
    "qkv": "attn.qkv",
    "attention": "attn",
    "project": "attn.out",
    "up": "mlp",
    "down": "mlp",
}
DEVICE = {
    "name": "nvidia_h200",
    "kind": "cuda",
    "flops_per_s": {"float16": 9.89e14, "float32": 6.7e13},
    "memory_bytes_per_s": 4.8e12,
    "l2_bytes_per_s": 1.2e13,
    "launch_us": 2.1,
}
AWKWARD = "</script><!--\"'&\u2028 \N{GREEK SMALL LETTER MU}"


def layered_report(layers: int, repeated: bool = True) -> dict[str, Any]:
    """A report of equal layers of eight kernels each on a GPU; `repeated` says that they are."""
    graph = _Graph()
    last = graph.tensor("x", "input")
    groups, sources = [], {}
    for layer in range(layers):
        made = {"x": last}
        for kernel, family, names, reads, flops in LAYER:
            group, made[kernel] = graph.group(layer, kernel, names, [made[r] for r in reads])
            group |= _numbers(len(groups), layer, family, flops)
            groups.append(group)
            sources[group["name"]] = {
                "kernel": f"__global__ void {group['name']}() {{ /* {AWKWARD} */ }}\n" * 20,
                "config": f"tile 128x{64 + len(groups)}" if family == "gemm" else None,
                "tensor_ir": f"@T.prim_func\ndef {group['name']}():\n    ...\n",
            }
        last = made["permute"]
    graph.tensors[last]["role"] = "output"
    fused, unfused = (sum(g[f"bytes_{kind}"] for g in groups) for kind in ("fused", "unfused"))
    live = [ACTIVATION * (3 + step % 3) for step in range(len(groups))]
    return {
        "version": 3,
        "target": DEVICE["name"],
        "launches": {"fused": len(groups), "unfused": len(graph.ops)},
        "bytes": {"fused": fused, "unfused": unfused},
        "time_us": {"fused": 1000.0 * layers, "unfused": 2400.0 * layers},
        "memory": {"fused": max(live), "unfused": 2 * max(live)},
        "verify": {"passed": True, "worst_error": 4.125e-4},
        "plan": {"policy": "default"},
        "groups": groups,
        "refusals": _refusals(groups),
        "times": _times(layers),
        "device": DEVICE,
        "bytes_elsewhere": 0,
        "assumed": {},
        "graph": {"ops": graph.ops, "tensors": graph.tensors},
        "sources": sources,
        "timeline": {"fused": live, "unfused": [2 * v for v in live for _ in range(2)]},
        "repeats": [{"first": 0, "groups": len(LAYER), "count": layers}] if repeated else [],
    }


class _Graph:
    def __init__(self) -> None:
        self.ops: list[dict[str, Any]] = []
        self.tensors: list[dict[str, Any]] = []

    def tensor(self, name: str, role: str = "intermediate") -> int:
        shape, dtype = [1, TOKENS, WIDTH], "float16"
        made = {"id": len(self.tensors), "name": name, "shape": shape, "dtype": dtype}
        self.tensors.append(made | {"bytes": ACTIVATION, "role": role})
        return made["id"]

    def group(
        self, layer: int, kernel: str, names: tuple[str, ...], reads: list[int]
    ) -> tuple[dict[str, Any], int]:
        """A chain of operators; the further inputs go to the last one."""
        prefix = f"layer{layer}_{kernel}"
        module = f"layers.{layer}.{MODULES.get(kernel, kernel)}"
        before, *others = reads
        for name in names:
            result = self.tensor(f"{prefix}_{name}")
            last = name == names[-1]
            self.ops.append(
                {
                    "name": f"{prefix}_{name}",
                    "operator": f"rms_norm#{2 * layer}" if "norm" in kernel else name,
                    "module": module,
                    "source": f"model.py:{10 + len(kernel)}",
                    "inputs": [before, *(others if last else ())],
                    "outputs": [result],
                    "flops": 0,
                }
            )
            before = result
        group = {
            "name": f"fused_{prefix}",
            "label": f"{module}: {', '.join(names)}" + (AWKWARD if kernel == "permute" else ""),
            "modules": [module],
            "lines": [self.ops[-1]["source"]],
            "ops": [op["name"] for op in self.ops[-len(names) :]],
            "composites": ["rms_norm"] if "norm" in kernel else [],
            "reads": reads,
            "writes": [before],
        }
        return group, before


def _numbers(index: int, layer: int, family: str, flops: int) -> dict[str, Any]:
    """What is predicted and measured of a kernel: different in each, so that none stands for
    another.
    """
    predicted = 10.0 + flops / 2e9 + 0.013 * index
    median = predicted * (0.9 + 0.03 * (index % 8))
    return {
        "kernel_class": family,
        "launches": 1,
        "bytes_fused": 2 * ACTIVATION + index,
        "bytes_unfused": 6 * ACTIVATION + 3 * index,
        "flops": flops,
        "predicted_us": predicted,
        "unfused_predicted_us": 2.4 * predicted,
        "terms": {"tensor": 0.8 * predicted, "hbm": 0.4 * predicted, "launch": 2.1},
        "measured_us": median,
        "measured": {
            "median_us": median,
            "low_us": 0.97 * median,
            "high_us": 1.05 * median,
            "samples": 20 + index,
            "clock": "event",
            "failure": None,
        },
        "roofline_share": 0.5 + 0.4 * (index % 7) / 7,
        "registers": 32 + index % 200,
        "spill_bytes": 8 * (index % 3),
        "code_bytes": 4096 + 16 * index,
        "error": 1e-5 * (index + 1),
        "fallback": "runs unfused for a test" if index == 4 else None,
        "evidence": {
            "kind": "model",
            "verdict": "sure",
            "ratio": 0.41,
            "low": 0.38,
            "high": 0.43 + 1e-3 * index,
        },
        "assumed_l2": {f"tensor{index}": ACTIVATION} if index % 2 else {},
        "tuned": {"choice": "trace", "us": median, "untuned_us": 1.2 * median},
        "same_as": index % len(LAYER) if layer else None,
        "rejected": index if index % 3 == 0 else None,
    }


def _refusals(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "code": "epilogue" if k % 2 else "recompute",
            "where": [group["ops"][0], group["ops"][-1]],
            "why": f"{group['ops'][0]} would be computed {k + 2} times",
            "numbers": {"factor": k + 2, "share": 0.125},
            "flip": f"a factor below {k + 1}",
            "cost_us": 0.5 * (k + 1) if k % 4 else None,
            "kernel_class": group["kernel_class"],
        }
        for k, group in enumerate(groups)
    ]


def _times(layers: int) -> dict[str, Any]:
    def time(median: float, **more: Any) -> dict[str, Any]:
        quartiles = {"median_us": median, "low_us": 0.96 * median, "high_us": 1.06 * median}
        return quartiles | {"samples": 40, "clock": "event", "failure": None} | more

    failed = {"median_us": None, "low_us": None, "high_us": None, "samples": 0, "clock": None}
    return {
        "fused": time(1000.0 * layers),
        "unfused": time(2400.0 * layers, verdict="faster", ratio=2.4),
        "torch.compile": time(1020.0 * layers, verdict="no difference measured", ratio=None),
        "tvm": failed | {"failure": "it has no schedule for attention", "verdict": None},
    }
