"""One model, compiled in this process: `python -m tests.benchmarks.compile_time.child WHAT`.

WHAT is JSON with `name`, `backend`, `device`, `dtype` and `scale`; one line of JSON is printed.
"""

import json
import resource
import sys
import threading
import time
from typing import Any

MIB = 2**20
INTERVAL_S = 0.01


def main(what: dict[str, Any]) -> dict[str, float]:
    """Seconds from the first call to its synchronised result, of imports (torch with its Dynamo,
    TVM, and this package beyond both) and of the next call; the greatest memory above that of a
    process that only holds the model, in MiB, on the host and on the device.
    """
    began = time.monotonic()
    import torch
    import torch._dynamo  # torch.compile imports it whatever the backend is

    torch_there = time.monotonic()
    if what["backend"] == "tvm_fusion":
        import tvm  # noqa: F401

        tvm_there = time.monotonic()
        import tvm_fusion.torch_backend  # noqa: F401 - registers it
    else:
        tvm_there = torch_there
    ours_there = time.monotonic()
    from .. import workloads

    model = workloads.make(what["name"], what["device"], what["dtype"], what["scale"])
    on_gpu = what["device"] != "cpu"
    torch.set_grad_enabled(False)
    compiled = torch.compile(model.module, backend=what["backend"], **what.get("how", {}))

    def called() -> float:
        called_at = time.monotonic()
        compiled(*model.inputs)
        if on_gpu:
            torch.cuda.synchronize()
        return time.monotonic() - called_at

    if on_gpu:
        torch.zeros(1, device=what["device"]) @ torch.zeros(1, device=what["device"])
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    with Memory(on_gpu) as memory:
        first_s = called()
    return {
        "import_torch_s": torch_there - began,
        "import_tvm_s": tvm_there - torch_there,
        "import_s": ours_there - tvm_there,
        "first_s": first_s,
        "next_s": called(),
        "host_mib": memory.host,
        "device_mib": memory.device,
    }


class Memory:
    """The greatest memory within, above that of the beginning; of the device every 10 ms."""

    host = device = 0.0

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu, self._ended = on_gpu, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Memory":
        self._host, self._free = _resident(), self._device_free()
        if self._on_gpu:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._on_gpu:
            self._thread.join()
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.host = max(0.0, most - self._host)

    def _look(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self.device = max(self.device, (self._free - self._device_free()) / MIB)

    def _device_free(self) -> int:
        import torch

        return torch.cuda.mem_get_info()[0] if self._on_gpu else 0


def _resident() -> float:
    """The memory of this process, in MiB."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / MIB


if __name__ == "__main__":
    found = main(json.loads(sys.argv[1]))
    print(json.dumps(found))
