"""Sizes that a policy names: kernels are the fastest at these."""

import pytest
import torch
from torch.export import Dim
from tvm import tirx

import tvm_fusion
from tvm_fusion._arguments import policy_of
from tvm_fusion.config import load_policy
from tvm_fusion.errors import ConfigError, InputError
from tvm_fusion.flow.functions import planned_function
from tvm_fusion.ir.extents import known_sizes
from tvm_fusion.ir.graph import VERSIONS_ATTR
from tvm_fusion.transform.apply.materialize import materialize

SHAPES = ({0: Dim("tokens", max=4096)}, None)


class Linear(torch.nn.Module):
    def forward(self, x, w):
        return torch.relu(x @ w)


def prim_funcs(mod):
    return [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]


def planned(sizes):
    inputs = torch.randn(8, 2048).half(), torch.randn(2048, 1024).half()
    policy = {"sizes": sizes, "verify": False}
    return planned_function(Linear(), "nvidia_h200", policy, None, inputs, SHAPES)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["tokens", "x.0"])
def test_versions_are_for_the_sizes_of_the_policy(name):
    found = planned({name: [300, 20, 2000]})
    (func,) = prim_funcs(materialize(found.low, found.graph, found.plan).mod)
    (bounds,) = known_sizes(func).values()
    assert (bounds.most, bounds.hints) == (4096, (20, 300, 2000))
    (kernel,) = prim_funcs(found.write().mod)
    edges = set(map(int, kernel.attrs[VERSIONS_ATTR]))
    assert edges
    assert edges <= {20, 300}


def test_names_and_values_that_a_model_does_not_have_are_refused():
    with pytest.raises(InputError, match=r"no 'token' \(did you mean 'tokens'\?\); its sizes: "):
        planned({"token": [1]})
    with pytest.raises(InputError, match="tokens is never 5000: at most 4096"):
        planned({"tokens": [1, 5000]})
    with pytest.raises(InputError, match="it has no symbolic size"):
        tvm_fusion.explain(
            Linear(),
            "nvidia_h200",
            policy={"sizes": {"tokens": [1]}},
            example_inputs=(torch.randn(4, 4), torch.randn(4, 4)),
        )


@pytest.mark.parametrize("sizes", [{"n": []}, {"n": [0]}, {"n": [1.5]}, {"n": 3}])
def test_what_are_no_sizes_is_refused(sizes):
    with pytest.raises(ConfigError, match=r"sizes\.n: expected a list of whole numbers above 0"):
        load_policy({"sizes": sizes})
    with pytest.raises(ConfigError, match="expected a table of lists"):
        load_policy({"sizes": "n"})


def test_sizes_are_in_files_and_on_the_command_line(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\n[sizes]\ntokens = [512, 1]\n')
    wanted = (("tokens", (1, 512)),)
    assert load_policy(file).sizes == wanted
    assert load_policy(policy_of("verify=false,sizes.tokens=1:512")).sizes == wanted


def test_policies_differ_by_their_sizes():
    policy = load_policy({"sizes": {"tokens": [1]}})
    assert policy.fingerprint() != load_policy(None).fingerprint()
