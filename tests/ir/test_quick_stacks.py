"""The callers of TVMScript's parsers are found quickly, and as `inspect` finds them."""

import inspect
from types import ModuleType

from tvm_fusion.ir.quick_stacks import quick_stacks


def module_of_a_parser() -> ModuleType:
    module = ModuleType("parser")
    module.inspect = inspect
    return module


def test_callers_are_those_that_inspect_finds():
    module = module_of_a_parser()
    with quick_stacks(module):
        quick, slow = module.inspect.stack(), inspect.stack()
    assert [(f.frame, f.filename, f.function) for f in quick] == [
        (f.frame, f.filename, f.function) for f in slow
    ]
    assert quick[0].code_context == slow[0].code_context
    assert module.inspect.signature is inspect.signature


def test_the_first_that_ends_leaves_the_quick_way_to_the_second():
    """As threads do that write kernels at once."""
    module = module_of_a_parser()
    first, second = quick_stacks(module), quick_stacks(module)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert module.inspect is not inspect
    second.__exit__(None, None, None)
    assert module.inspect is inspect
