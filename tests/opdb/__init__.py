"""The whole compiler on PyTorch's own database of operators (`op_db`), each beside eager execution.

    python -m tests.opdb --dtypes float32 --only 'nn.functional.*' --out found.json

`samples` makes modules of the database's samples, `judge` compiles and compares one entry in a
process that may die, `exceptions` has what is not right and why, `__main__` is the command.
"""

OUTCOMES = ("right", "not judged", "refused", "timeout", "internal error", "wrong", "crash")
DTYPES = ("float32", "int64", "bool", "bfloat16", "float16", "complex64")
