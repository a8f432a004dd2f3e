"""The same module gives the same plan, byte for byte, whatever the hash seed of the process."""

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.plan.search.search import search

from ..support.large_graphs import graph_of, random_dag, transformer

AT_A_TIME = 2


def plan_digest() -> str:
    """A hash of the plans of a stack of layers and of a random DAG, for a GPU and a CPU."""
    policy, text = load_policy({"search_evaluations": 300}), hashlib.sha256()
    for hw in (load_profile("h200"), load_profile("llvm")):
        for mod in (transformer(1, tokens=128, width=128, heads=4), random_dag(30, seed=5)):
            text.update(search(graph_of(mod, hw), hw, policy).to_json().encode())
    return text.hexdigest()


def _digest_with(seed: int) -> str:
    env = {**os.environ, "PYTHONHASHSEED": str(seed)}
    script = "from tests.plan.test_plan_bytes import plan_digest; print(plan_digest())"
    run = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


# Always: digests that other processes made, with other seeds (`benchmarks/test_golden`).
@pytest.mark.nightly
@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("processes", [2, pytest.param(20, marks=pytest.mark.nightly)])
def test_processes_with_different_hash_seeds_make_the_same_plan(processes):
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        digests = set(pool.map(_digest_with, range(1, processes + 1)))
    assert digests == {plan_digest()}
