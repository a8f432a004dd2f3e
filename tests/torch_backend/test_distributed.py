"""The backend on two processes: collectives stay in torch, what stands between them is fused."""

import os
import socket
import sys
import warnings

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import tvm_fusion.torch_backend  # noqa: F401 - makes the backend known


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def data_parallel(model):
    return nn.parallel.DistributedDataParallel(model)


def sharded(model):
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def tensor_parallel(model):
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def changed(model, x):
    """The model after its weights were halved."""
    for weight in model.parameters():
        weight.mul_(0.5)
    return model(x)


def work(rank, make, port, launches):
    """What each process does; errors end it."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model, x, told = nn.Sequential(Block(), Block()).eval(), torch.randn(4, 16), []
    twin = nn.Sequential(Block(), Block())
    twin.load_state_dict(model.state_dict())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="tvm_fusion")
        run = getattr(sys.modules[__name__], make)(model)
        fused = torch.compile(
            run, backend="tvm_fusion", options={"verify": False, "report": told.append}
        )
        for _ in range(2):
            torch.testing.assert_close(fused(x), twin(x))
        found = [one.report.launches.unfused for one in told]
        assert found == launches, found
        assert max(one.report.launches.fused for one in told) < max(launches)
        assert not any(one.outside for one in told)
        wanted = changed(twin, x)
        for weight in run.parameters():
            weight.mul_(0.5)
        torch.testing.assert_close(fused(x), wanted)
    distributed.destroy_process_group()


@pytest.mark.long
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("make", "launches"),
    [
        ("tensor_parallel", [6, 7, 1]),  # cut behind each product that is summed up
        ("data_parallel", [7, 7]),
        ("sharded", [9]),  # both blocks run one graph, whose weights are inputs
    ],
)
def test_two_processes_give_what_one_does(make, launches):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(work, (make, port, launches), nprocs=2)
