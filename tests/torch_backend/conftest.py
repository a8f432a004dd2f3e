"""What tests of the backend begin with, and what they look at."""

import pytest
import torch

from tvm_fusion.compilation import compiler


@pytest.fixture
def fresh_dynamo():
    """Nothing is compiled before; the same random numbers, and no gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def modules(monkeypatch):
    """The compiled modules, in the order in which they were made."""
    made, compile_ = [], compiler.compile
    monkeypatch.setattr(
        compiler, "compile", lambda *a, **k: made.append(compile_(*a, **k)) or made[-1]
    )
    return made
