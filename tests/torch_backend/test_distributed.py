"""The backend on several processes: collectives stay in torch, what stands between is fused."""

import os
import shutil
import socket
import sys
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import tvm_fusion.torch_backend  # noqa: F401 - makes the backend known
from tvm_fusion.config.links import link_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.down = nn.LayerNorm(16), nn.Linear(32, 16)
        self.gate, self.up = nn.Linear(16, 32), nn.Linear(16, 32)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def data_parallel(model):
    return nn.parallel.DistributedDataParallel(model)


def sharded(model):
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def tensor_parallel(model):
    return split_up(model, init_device_mesh("cpu", (distributed.get_world_size(),)))


def split_up(model, mesh):
    for block in model:
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


def data_and_tensor_parallel(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    split_up(model, mesh["tensor"])
    for block in model:
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def sequence_parallel(model):
    """Each process has some rows of each sequence, and gathers them for the products."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "gate": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    return model


def changed(model, x):
    """The model after its weights were halved."""
    for weight in model.parameters():
        weight.mul_(0.5)
    return model(x)


@dataclass(frozen=True)
class Job:
    """What each process does.

    Attributes
    ----------
    make : str
        A function of this module that makes a model one of several processes.
    processes, port : int
    launches : list of int
        Operators of each part.
    collectives : int
        Of the first graph.
    late : int or None
        A process that comes a second later.
    caches : str or None
        A folder for those of all processes.
    """

    make: str
    processes: int
    port: int
    launches: list[int]
    collectives: int
    late: int | None = None
    caches: str | None = None


def work(rank, job):
    """Errors end it."""
    begin(rank, job)
    model, x, told = nn.Sequential(Block(), Block()).eval(), torch.randn(2, 8, 16), []
    twin = nn.Sequential(Block(), Block())
    twin.load_state_dict(model.state_dict())

    def part(tensor):
        is_split = job.make == "sequence_parallel"
        return tensor.chunk(job.processes, 1)[rank] if is_split else tensor

    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="tvm_fusion")
        run = getattr(sys.modules[__name__], job.make)(model)
        fused = torch.compile(
            run, backend="tvm_fusion", options={"verify": False, "report": told.append}
        )
        for _ in range(2):
            torch.testing.assert_close(fused(part(x)), part(twin(x)))
        found = [one.report.launches.unfused for one in told]
        assert found == job.launches, found
        assert max(one.report.launches.fused for one in told) < max(found)
        assert not any(one.outside for one in told)
        asked = told[0].to_json()["collectives"]
        assert len(asked) == job.collectives, asked
        assert all(one["us"] > 0 and one["bytes"] >= 1024 // job.processes for one in asked), asked
        wanted = changed(twin, x)
        for weight in run.parameters():
            weight.mul_(0.5)
        torch.testing.assert_close(fused(part(x)), part(wanted))
    distributed.destroy_process_group()


def begin(rank, job):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port)}
    if job.caches is not None:
        os.environ["TVM_FUSION_CACHE"] = f"{job.caches}/{rank}"
    wait = timedelta(seconds=60)
    distributed.init_process_group("gloo", rank=rank, world_size=job.processes, timeout=wait)
    torch.manual_seed(0)
    if rank == job.late:
        time.sleep(1)


def end_in_between(rank, job):
    """The last process ends between two calls."""
    begin(rank, job)
    x = torch.randn(2, 8, 16)
    with torch.no_grad():
        model = tensor_parallel(nn.Sequential(Block(), Block()).eval())
        fused = torch.compile(model, backend="tvm_fusion", options={"verify": False})
        fused(x)
        if rank == job.processes - 1:
            os._exit(0)
        with pytest.raises(RuntimeError, match=r"gloo|[Cc]onnection"):  # torch's own
            fused(x)
    os._exit(0)  # what is left of the group cannot be ended in order


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


PARTS = [10, 11, 1]  # cut behind each product that is summed up


# Always: what one of several processes has, in this one, and collectives (`test_collectives`).
@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    ("make", "processes", "launches", "collectives"),
    [
        ("tensor_parallel", 2, PARTS, 2),
        pytest.param("tensor_parallel", 1, [20], 0, marks=pytest.mark.nightly),  # one part
        pytest.param("tensor_parallel", 4, PARTS, 2, marks=pytest.mark.nightly),
        ("data_parallel", 2, [10, 10], 0),
        ("sharded", 2, [13], 0),  # both blocks run one graph, whose weights are inputs
        ("sequence_parallel", 2, [1, 13, 2, 13, 1], 4),  # both products take what is gathered once
        ("data_and_tensor_parallel", 4, [14, 1], 1),
    ],
)
def test_several_processes_give_what_one_does(make, processes, launches, collectives):
    job = Job(make, processes, free_port(), launches, collectives)
    multiprocessing.spawn(work, (job,), nprocs=processes)


@pytest.mark.nightly
def test_processes_that_come_late_or_have_no_cache_agree(tmp_path):
    for late in (None, 0):
        job = Job("tensor_parallel", 2, free_port(), PARTS, 2, late, str(tmp_path))
        multiprocessing.spawn(work, (job,), nprocs=2)
        shutil.rmtree(tmp_path / "1", ignore_errors=True)


@pytest.mark.nightly
def test_a_process_that_ends_is_an_error_in_the_others():
    job = Job("tensor_parallel", 2, free_port(), PARTS, 2)
    multiprocessing.spawn(end_in_between, (job,), nprocs=2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(16, 32, bias=False) for _ in range(3))
        self.out = nn.Linear(32, 16, bias=False)

    def forward(self, x):
        q, k, v = (
            project(x).unflatten(-1, (-1, 8)).transpose(1, 2)
            for project in (self.queries, self.keys, self.values)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Widths of Llama 2 7B and Qwen 2.5; what is summed up is narrow."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(16, 11008, bias=False) for _ in range(2))
        self.down, self.head = nn.Linear(11008, 16, bias=False), nn.Linear(16, 152064, bias=False)

    def forward(self, x):
        x = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return self.head(nn.functional.rms_norm(x, (16,)))


@pytest.fixture
def one_of():
    """One process of several that are not there: what they would give is left out."""

    def begin(processes):
        distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=processes)
        return init_device_mesh("cpu", (processes,))

    torch._dynamo.reset()
    yield begin
    distributed.destroy_process_group()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("make", "processes", "rows"),
    [(Attention, 4, "out"), (Gated, 4, "down"), (Gated, 8, "down")],
)
def test_what_one_process_has_is_computed_in_parts(make, processes, rows, one_of):
    torch.manual_seed(0)
    model, x, told = make().eval(), torch.randn(2, 8, 16), []
    plan = {name: ColwiseParallel() for name, _ in model.named_children()}
    plan[rows] = RowwiseParallel()
    parallelize_module(model, one_of(processes), plan, src_data_rank=None)
    options = {"verify": False, "report": told.append}
    fused = torch.compile(model, backend="tvm_fusion", options=options)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="tvm_fusion")
        torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(told) == 2
    assert not any(one.outside for one in told)
    (collective,) = told[0].to_json()["collectives"]
    assert collective["ranks"] == processes
    assert collective["predicted_us"] is None  # over memory
    assert told[0].collectives[0].predicted_us(link_of(90)) > 6
