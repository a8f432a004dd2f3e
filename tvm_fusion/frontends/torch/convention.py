"""What callers of an exported program see: see `ir.convention`.

    before    main(x) with buffers as constants, and their new values lost
    after     main(x, buffer) -> (tensors that are returned, new values of buffers and inputs)

State are the buffers that the program writes, and all weights without values: those of a module on
the meta device, which `values_later` exports as fake tensors.
Numbers among the inputs are parts of the program; a call with another one is refused.
Complex tensors are pairs of real numbers in `main` (`pairs`), and complex for callers.
Results that share memory with an input or with another result are views of these where all shapes
are static. Does not tell: results that are views of one tensor that is not returned itself.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import tvm
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from ...errors import FrontendError
from ...ir.convention import BARE, OF_PROCESS, Convention, Of, Result, View
from .complex.pairs import complex_outputs, is_complex_input
from .importer import Importer, Symbols, size_of

MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)


# ---- Weights without values.


@contextlib.contextmanager
def values_later(model: torch.nn.Module, inputs: Any) -> Iterator[Any]:
    """The inputs, with weights of the model on the meta device as fake ones on the CPU, which are
    traced beside tensors of the CPU, and those whose sign or conjugate is only marked written out
    (operators on marked ones are others); weights are put back afterwards. Tied ones stay tied.
    """
    mode, fakes, before = FakeTensorMode(allow_non_fake_inputs=True), {}, []

    def fake(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if tensor.device.type != "meta":
            is_marked = tensor.is_conj() or tensor.is_neg()
            return tensor.resolve_conj().resolve_neg() if is_marked else tensor
        if id(tensor) not in fakes:
            with mode:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            weight = isinstance(tensor, torch.nn.Parameter)
            fakes[id(tensor)] = torch.nn.Parameter(made, False) if weight else made
        return fakes[id(tensor)]

    try:
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                before.append((held, dict(held)))
                held.update({name: fake(tensor) for name, tensor in held.items()})
        yield pytree.tree_map(fake, inputs)
    finally:
        for held, tensors in before:
            held.update(tensors)


def refuse_unusable(
    program: torch.export.ExportedProgram, where: str, keeps_convention: bool
) -> None:
    """Raise FrontendError for a program that was traced on the meta device, whose constants have no
    values, for one that returns no tensor, and for weights without values where there is nobody to
    load them later.
    """
    tensors = {**program.constants, **program.state_dict}
    if any(isinstance(t, torch.Tensor) and t.device.type == "meta" for t in tensors.values()):
        raise FrontendError(
            f"{where}: it was exported on the meta device, where constants have no values: give "
            "the module itself with example inputs, and its weights to load_state_dict of what is "
            "compiled"
        )
    if not any(_is_tensor(value) for value in results_of(program)):
        raise FrontendError(f"{where}: it returns no tensor; return one, to have it computed")
    fakes = [name for name, tensor in tensors.items() if isinstance(tensor, FakeTensor)]
    if fakes and not keeps_convention:
        raise FrontendError(
            f"{where}: {len(fakes)} weights have no values ({fakes[0]}, ...): give them some, or "
            "give the model to tvm_fusion.compile, whose result has load_state_dict"
        )


# ---- Inputs that are no tensors.


def _user_inputs(program: torch.export.ExportedProgram) -> list[InputSpec]:
    specs = program.graph_signature.input_specs
    return [spec for spec in specs if spec.kind is InputKind.USER_INPUT]


def tensor_inputs(program: torch.export.ExportedProgram) -> list[str]:
    """The placeholders of the caller's tensors, by name."""
    args = [spec.arg for spec in _user_inputs(program)]
    return [arg.name for arg in args if isinstance(arg, TensorArgument)]


def fixed_inputs(program: torch.export.ExportedProgram, where: str) -> dict[int, Any]:
    """The caller's numbers, texts and None by place among all inputs: the program has them in it.

    Raises
    ------
    FrontendError
        An input is a number that may be another in each call.
    """
    fixed = {}
    for place, spec in enumerate(_user_inputs(program)):
        if isinstance(spec.arg, ConstantArgument):
            fixed[place] = spec.arg.value
        elif not isinstance(spec.arg, TensorArgument):
            raise FrontendError(
                f"{where}: input {spec.arg.name!r} is a number that changes between calls; give a "
                "tensor, or leave it out of dynamic_shapes, to have its value in what is compiled"
            )
    return fixed


def drop_fixed_inputs(program: torch.export.ExportedProgram) -> None:
    """Takes what is no tensor off the inputs of a decomposed program, which nothing in it reads."""
    specs, signature = [], program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    for spec in signature.input_specs:
        if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, ConstantArgument):
            program.graph.erase_node(nodes[spec.arg.name])
        else:
            specs.append(spec)
    program._graph_signature = ExportGraphSignature(specs, signature.output_specs)
    program.graph_module.recompile()


# ---- State as inputs, new values as outputs.


@dataclass(frozen=True, slots=True)
class Border:
    """What the tensors of a program are that goes in and out of `main`.

    Attributes
    ----------
    inputs : dict of fx.Node to int
        Those of the caller, by number.
    state : dict of str to str
        Of each tensor that stays between calls the name of its parameter.
    values : dict of str to torch.Tensor
        Those that are known, by the name of the parameter.
    outputs : list of fx.Node
        What `main` gives.
    updates : list of tuple of fx.Node and fx.Node
        Placeholders, and what takes their place.
    written : dict of fx.Node to int
        Inputs of the caller that are written to, by what stands in them in the end.
    pairs : set of str
        The parameters that are complex in the model.
    complex_results : list of bool
        Of what the caller gets, flat.
    """

    inputs: dict[fx.Node, int]
    state: dict[str, str]
    values: dict[str, torch.Tensor]
    outputs: list[fx.Node]
    updates: list[tuple[fx.Node, fx.Node]]
    written: dict[fx.Node, int]
    pairs: set[str]
    complex_results: list[bool]

    @classmethod
    def of(cls, program: torch.export.ExportedProgram, in_place: set[fx.Node]) -> Border:
        """The border of a decomposed program; writes `in_place` need no new value."""
        signature = program.graph_signature
        nodes = {node.name: node for node in program.graph.nodes}
        inputs = {nodes[name]: number for number, name in enumerate(tensor_inputs(program))}
        state, values = _state(program, nodes)
        placeholders = {spec.target: nodes[spec.arg.name] for spec in signature.input_specs}
        placeholders |= {node.name: node for node in inputs}
        mutations = [
            (placeholders[spec.target], nodes[spec.arg.name])
            for spec in signature.output_specs
            if spec.kind in MUTATIONS
        ]
        written = {new: inputs[old] for old, new in mutations if old in inputs}
        updates = [(old, new) for old, new in mutations if new not in in_place]
        tensors = [value for value in results_of(program) if _is_tensor(value)]
        outputs = [value for value in tensors if value not in inputs and value not in written]
        outputs = list(dict.fromkeys([*outputs, *(new for _, new in updates)])) or tensors[:1]
        pairs = {node.name for node in program.graph.nodes if is_complex_input(node)}
        flags = _of_results(program, complex_outputs(program))
        return cls(inputs, state, values, outputs, updates, written, pairs, flags)

    def apply(self, program: torch.export.ExportedProgram) -> None:
        """Make a program take state as its last inputs, and give the outputs and no more."""
        nodes = {node.name: node for node in program.graph.nodes}
        known = program.graph_signature.input_specs
        own = set(self.state.values())
        first = {s.target: s.arg.name for s in known if s.arg.name in own}
        specs, tied = [], set(self.state) - set(first)
        for spec in known:
            if spec.target in tied:
                nodes[spec.arg.name].replace_all_uses_with(nodes[self.state[spec.target]])
            elif spec.arg.name not in own:
                specs.append(spec)
        specs += [_given(TensorArgument(name)) for name in dict.fromkeys(self.state.values())]
        results = [_returned(TensorArgument(node.name)) for node in self.outputs]
        program.graph.output_node().args = (tuple(self.outputs),)
        program._graph_signature = ExportGraphSignature(specs, results)
        for held in ("_state_dict", "_constants"):
            kept = {n: t for n, t in getattr(program, held).items() if n not in self.state}
            setattr(program, held, kept)

    def convention(
        self,
        program: torch.export.ExportedProgram,
        views: Sequence[View | None],
        results: Sequence[Any],
        fixed: dict[int, Any],
        symbols: Symbols,
        mod: tvm.IRModule,
    ) -> Convention:
        """The convention of the imported program.

        Parameters
        ----------
        program : ExportedProgram
        views : sequence of View or None
            Of its results (`views_of`).
        results : sequence of fx.Node or value
            What it returned before `apply`.
        fixed : dict of int to value
            Inputs that are no tensors (`fixed_inputs`).
        symbols : mapping of str to tirx.Var
        mod : IRModule
            What was imported of the program after `apply`.
        """
        leaves = []
        for value, view, is_complex in zip(results, views, self.complex_results, strict=True):
            if value in self.inputs:
                leaves.append(Result(Of.INPUT, self.inputs[value]))
            elif value in self.written:
                leaves.append(Result(Of.INPUT, self.written[value]))
            elif value in self.outputs:
                leaves.append(Result(Of.OUTPUT, self.outputs.index(value), view, is_complex))
            else:
                leaves.append(_number(value, symbols))
        structure = program.call_spec.out_spec
        numbers = {param.name: number for number, param in enumerate(mod["main"].params)}
        state = {name: numbers[parameter] for name, parameter in self.state.items()}
        changes = {numbers[old.name]: self.outputs.index(new) for old, new in self.updates}
        values = {numbers[name]: _copy(value) for name, value in self.values.items()}
        pairs = tuple(sorted(numbers[name] for name in self.pairs if name in numbers))
        return Convention(tuple(leaves), _written(structure), state, changes, values, fixed, pairs)


def _state(
    program: torch.export.ExportedProgram, nodes: dict[str, fx.Node]
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """The parameters of tensors that are written or have no values, and the values there are."""
    tensors = {**program.constants, **program.state_dict}
    signature = program.graph_signature
    written = {id(tensors[t]) for t in signature.buffers_to_mutate.values()}
    state, values, parameters = {}, {}, {}
    for spec in signature.input_specs:
        tensor = tensors.get(spec.target)
        later = isinstance(tensor, FakeTensor)
        if spec.kind is InputKind.USER_INPUT or not (later or id(tensor) in written):
            continue
        state[spec.target] = parameters.setdefault(id(tensor), spec.arg.name)
        if not later:
            values[state[spec.target]] = tensor
    return state, values


def _copy(tensor: torch.Tensor) -> tvm.runtime.Tensor:
    return Importer._convert_pytorch_tensor_to_tvm(tensor.detach().clone().contiguous())


def _given(argument: TensorArgument) -> InputSpec:
    return InputSpec(InputKind.USER_INPUT, argument, None)


def _returned(argument: TensorArgument) -> OutputSpec:
    return OutputSpec(OutputKind.USER_OUTPUT, argument, None)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def results_of(program: torch.export.ExportedProgram) -> list[Any]:
    """What the caller gets, flat: nodes and values."""
    (returned,) = program.graph.output_node().args
    return _of_results(program, returned)


def _of_results(program: torch.export.ExportedProgram, outputs: Sequence[Any]) -> list[Any]:
    """Those of all outputs that the caller gets."""
    pairs = zip(outputs, program.graph_signature.output_specs, strict=True)
    return [value for value, spec in pairs if spec.kind not in MUTATIONS]


def _number(value: Any, symbols: Symbols) -> Result:
    """A result that is no tensor."""
    if not isinstance(value, fx.Node):
        return Result(Of.VALUE, value)
    number = value.meta["val"]
    if isinstance(number, int | float | bool):
        return Result(Of.VALUE, number)
    size = size_of(number, symbols) if isinstance(number, torch.SymInt) else None
    if size is None:
        raise FrontendError(
            f"it returns {value.name}, a number that is no expression in the sizes of its inputs: "
            "return it as a tensor"
        )
    return Result(Of.EXTENT, str(size))


def _is_plain(structure: pytree.TreeSpec) -> bool:
    """A bare tensor, or a tuple of tensors: what `main` gives."""
    flat = all(child.is_leaf() for child in structure.children())
    return structure.is_leaf() or (structure.type is tuple and flat)


def _written(structure: pytree.TreeSpec) -> str | None:
    """The structure as text."""
    if _is_plain(structure):
        return BARE if structure.is_leaf() else None
    try:
        return pytree.treespec_dumps(structure)
    except NotImplementedError:  # of a class without a name for files
        same = (text for text, other in OF_PROCESS.items() if other == structure)
        text = next(same, f"{len(OF_PROCESS)} of this process")
        OF_PROCESS[text] = structure
        return text


# ---- Results that share memory with an input or with another result.


def views_of(program: torch.export.ExportedProgram) -> list[View | None]:
    """Of each result whether it is a view; of a program that is not decomposed."""
    numbers = {name: i for i, name in enumerate(tensor_inputs(program))}
    results = results_of(program)
    places = {v: i for i, v in reversed(list(enumerate(results))) if _is_tensor(v)}
    found = []
    for value in results:
        view, base = None, _base(value, places)
        if base is not None and base.name in numbers:
            view = _as_view(value, base, Of.INPUT, numbers[base.name])
        elif base is not None and base is not value and base in places:
            view = _as_view(value, base, Of.OUTPUT, places[base])
        found.append(view)
    return found


def _base(value: Any, results: dict[fx.Node, int]) -> fx.Node | None:
    """The input or result whose memory a result has."""
    if not _is_tensor(value):
        return None
    node = value
    while node is value or node not in results:
        if not is_view(node):
            break
        node = node.args[0]
    return node


def is_view(node: fx.Node) -> bool:
    """Whether a node depends on nothing but the tensor whose memory it gives."""
    made = viewing(node)
    return made is not None and made.all_input_nodes == [made.args[0]]


def viewing(node: fx.Node) -> fx.Node | None:
    """The operator by which a node gives a tensor, or several, with the memory of its first
    operand; None where what it gives has memory of its own.
    """
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return viewing(node.args[0])
    schema = getattr(node.target, "_schema", None)
    alias = schema.returns[0].alias_info if schema is not None and schema.returns else None
    return node if alias is not None and not schema.is_mutable else None


def _as_view(value: fx.Node, base: fx.Node, of: Of, number: int) -> View | None:
    """The view; None where it is none that can be known."""
    view = view_on(value, base)
    if view is None:
        return None
    return View(of, number, tuple(view.shape), view.stride(), view.storage_offset())


def view_on(value: fx.Node, base: fx.Node) -> torch.Tensor | None:
    """What a chain of views gives for a contiguous base, on the meta device; None where shapes are
    symbolic, or memory is another.
    """
    tensors = [node.meta.get("val") for node in (value, base)]
    if not all(isinstance(n, int) for t in tensors for n in t.shape):
        return None
    whole = torch.empty(base.meta["val"].shape, dtype=base.meta["val"].dtype, device="meta")

    def run(node: fx.Node) -> Any:
        if node is base:
            return whole
        return node.target(run(node.args[0]), *node.args[1:], **node.kwargs)

    try:
        view = run(value)
    except RuntimeError:  # of what lies otherwise in eager execution, channels_last
        return None
    kinds = [(x.dtype, x.is_conj(), x.is_neg()) for x in (view, whole)]
    if kinds[0] != kinds[1] or (view.untyped_storage()._cdata != whole.untyped_storage()._cdata):
        return None
    return view
