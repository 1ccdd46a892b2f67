"""What ``torch.compile`` makes of a module, rehearsed: fused kernels, and what is kept for backward.

Within ``compiling_as_cuda``, ``torch.compile`` and ``Module.compile`` trace as ever, and torch's own partitioner
decides what forward keeps and backward recomputes. The graphs then run on meta tensors:

    matrix products, attention, convolutions, complex numbers    each call as in eager code
    all else that computes                                       one kernel for neighbours with none of those between

A fused kernel reads its inputs once and writes what others need of it; what is between takes no memory. A second kernel
reads them again where sums run over other dimensions than the last, as for the gradients of a norm's weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from shardwise.forecast.costs import bytes_of, kind_of
from shardwise.forecast.recording import TapeRecorder
from shardwise.forecast.tape import Op
from shardwise.torch_internals import backend_running_graphs, forget_compiled, replaced_functions

__all__ = ["compiling_as_cuda"]

aten = torch.ops.aten
# fmt: off
_VIEWS = {
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze",
    "slice", "select", "split", "split_with_sizes", "detach", "alias", "as_strided", "view_as_complex",
    "view_as_real", "unbind", "getitem", "_conj", "unfold", "diagonal",
}
# Fused beside the pointwise operators and the reductions that have a price.
_FUSED = {
    "_to_copy", "clone", "copy", "convert_element_type", "fma", "where", "tril", "triu", "flip", "repeat",
    "cat", "constant_pad_nd", "embedding", "gather", "index", "scatter", "select_scatter", "slice_scatter",
    "full", "full_like", "zeros", "ones", "zeros_like", "ones_like", "scalar_tensor", "arange", "iota",
    "empty", "any", "amin", "var", "var_mean", "prod", "_safe_softmax", "native_dropout", "rand",
    "inductor_random", "inductor_seeds", "inductor_lookup_seed",
}
# fmt: on


@contextmanager
def compiling_as_cuda(recorder: TapeRecorder) -> Iterator[None]:
    """Within it, what is compiled runs as its graphs would on CUDA, and is written to the tape.

    Then the compiler forgets it, and all else, so that neither this nor a later compilation finds too many versions.
    """
    compile_ = torch.compile
    has_compiled = False
    backend = backend_running_graphs(lambda graph: _Graph(graph, recorder).run)

    def compiled(function: Any) -> Any:
        nonlocal has_compiled
        if not has_compiled:
            forget_compiled()
        has_compiled = True
        return compile_(function, backend=backend, dynamic=False)

    def chosen_compile(model: Any = None, **_: Any) -> Any:
        if model is None:
            return chosen_compile
        module = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
        if not isinstance(module, nn.Module) or getattr(model, "__name__", "") == "forward":
            return compiled(model)
        # Hooks are not compiled: they gather and reduce.
        module.forward = compiled(module.forward)
        return model

    try:
        with replaced_functions(torch, compile=chosen_compile):
            yield
    finally:
        if has_compiled:
            forget_compiled()


def _packet(node: Node) -> str:
    target: Any = node.target
    overload = getattr(target, "_overloadpacket", None)
    name = overload._qualified_op_name if overload is not None else getattr(target, "__name__", str(target))
    return str(name).split("::")[-1]


def _is_fused(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.is_complex():
        return False
    if any(
        isinstance(each.meta.get("val"), torch.Tensor) and each.meta["val"].is_complex()
        for each in _inputs(node)
    ):
        return False
    packet, tags = _packet(node), getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or packet in _FUSED or kind_of(packet) == "reduction"


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and _packet(node) in _VIEWS


def _inputs(node: Node) -> list[Node]:
    return list(node.all_input_nodes)


class _Joined:
    """Sets of nodes at depths that grow together."""

    def __init__(self) -> None:
        self._parents: dict[tuple[Node, int], tuple[Node, int]] = {}

    def add(self, each: tuple[Node, int]) -> None:
        self._parents.setdefault(each, each)

    def _top(self, each: tuple[Node, int]) -> tuple[Node, int]:
        while self._parents[each] != each:
            each = self._parents[each]
        return each

    def join(self, one: tuple[Node, int], other: tuple[Node, int]) -> None:
        self.add(one)
        self.add(other)
        self._parents[self._top(one)] = self._top(other)

    def groups(self) -> list[list[tuple[Node, int]]]:
        found: dict[tuple[Node, int], list[tuple[Node, int]]] = defaultdict(list)
        for each in self._parents:
            found[self._top(each)].append(each)
        return list(found.values())


class _Kernel:
    """Fused calls: which tensors they read and which of their results others need."""

    def __init__(self, members: list[Node], reads: list[Node], writes: list[Node]) -> None:
        self.members = members
        self.reads = reads
        self.writes = writes

    def ops(self, recorder: TapeRecorder) -> Iterator[Op]:
        read = [node.meta["val"] for node in self.reads if isinstance(node.meta.get("val"), torch.Tensor)]
        written = [node.meta["val"] for node in self.writes]
        kinds = {kind_of(_packet(node)) for node in self.members}
        kind = "reduction" if "reduction" in kinds else "elementwise"
        dtype = str((written or read)[0].dtype).removeprefix("torch.") if written or read else "float32"
        num_bytes = bytes_of("fused", read, written, False)
        yield Op("fused", kind, recorder.stream, 0, num_bytes, dtype, share="fused")
        if any(_sums_over_rows(node) for node in self.members):
            num_bytes = bytes_of("fused", read, (), False)
            yield Op("fused", kind, recorder.stream, 0, num_bytes, dtype, share="fused")


def _sums_over_rows(node: Node) -> bool:
    """Whether a reduction leaves the last dimension as it is, unlike the norms and losses beside it."""
    if _packet(node) not in ("sum", "mean"):
        return False
    source, result = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return bool(result.dim() and source.dim() > 1 and result.shape[-1] == source.shape[-1] > 1)


class _Graph:
    """A graph as steps: views, calls and fused kernels, each as late as possible; and when each result is freed."""

    def __init__(self, graph: GraphModule, recorder: TapeRecorder) -> None:
        self._graph = graph
        self._recorder = recorder
        self._nodes = list(graph.graph.nodes)
        self._inputs = [node for node in self._nodes if node.op == "placeholder"]
        self._fused = {node for node in self._nodes if node.op == "call_function" and _is_fused(node)}
        self._kernel_of = self._kernels()
        self._steps = self._ordered()
        self._frees = self._last_uses()

    # --- which calls are one kernel -------------------------------------------------------------------------------

    def _kernels(self) -> dict[Node, _Kernel]:
        """Joins fused calls that are connected, with no other call on a way between them; by what each one writes."""
        first, last = self._depths()
        written = dict.fromkeys(node for node in first if self._is_fused(node) and self._is_kept(node))
        # A call that nothing keeps is made again in every kernel that needs it.
        places: dict[Node, set[int]] = defaultdict(set)
        joined = _Joined()

        def place(node: Node, depth: int) -> None:
            if depth in places[node]:
                return
            places[node].add(depth)
            joined.add((node, depth))
            for source in dict.fromkeys(map(self._base, _inputs(node))):
                if self._is_fused(source) and source not in written:
                    place(source, depth)
                if depth in places[source] or (source in written and last[source] == depth):
                    joined.join((node, depth), (source, depth))

        for node in written:
            place(node, last[node])
        found: dict[Node, _Kernel] = {}
        for group in joined.groups():
            members = list(dict.fromkeys(node for node, _ in group))
            inside = set(members)
            reads = dict.fromkeys(self._base(each) for node in members for each in _inputs(node))
            writes = [
                node
                for node in members
                if node in written
                and any(places.get(user, {-1}) != {last[node]} for user in self._users(node))
            ]
            kernel = _Kernel(members, [node for node in reads if node not in inside], writes)
            found.update(dict.fromkeys((node for node in members if node in written), kernel))
        return found

    def _depths(self) -> tuple[dict[Node, int], dict[Node, int]]:
        """How many calls of their own lie before each node, and how many may at most before it is needed."""
        first: dict[Node, int] = {}
        for node in self._nodes:
            is_call = node.op == "call_function" and not self._is_fused(node) and not _is_view(node)
            first[node] = max((first[each] for each in _inputs(node)), default=0) + is_call
        last: dict[Node, int] = {}
        for node in reversed(self._nodes):
            limits = [
                last[user] if self._is_fused(user) else first[user] - 1
                for user in self._users(node)
                if user.op != "output"
            ]
            if any(user.op == "output" for user in self._users(node)):
                limits.append(first[node])
            last[node] = max(min(limits, default=first[node]), first[node])
        return first, last

    def _is_fused(self, node: Node) -> bool:
        return node in self._fused

    def _is_kept(self, node: Node) -> bool:
        """Whether a fused call's result becomes a tensor: a reduction's, and what is used by other calls."""
        return kind_of(_packet(node)) == "reduction" or any(
            not self._is_fused(user) for user in self._users(node)
        )

    def _base(self, node: Node) -> Node:
        """What a view shows."""
        while _is_view(node):
            node = node.all_input_nodes[0]
        return node

    def _users(self, node: Node) -> Iterator[Node]:
        """Who uses a result, itself or through views."""
        for user in node.users:
            if _is_view(user):
                yield from self._users(user)
            else:
                yield user

    # --- in which order, and until when ---------------------------------------------------------------------------

    def _ordered(self) -> list[Node | _Kernel]:
        steps: list[Node | _Kernel] = []
        done: set[Any] = set(self._inputs)

        def need(node: Node) -> None:
            what = self._kernel_of.get(node, node)
            if what in done:
                return
            done.add(what)
            for each in what.reads if isinstance(what, _Kernel) else _inputs(node):
                need(each)
            steps.append(what)

        for node in self._nodes:
            if not (self._is_fused(node) or _is_view(node) or node.op == "output"):
                need(node)
        for each in _inputs(self._nodes[-1]):
            need(each)
        return steps

    def _last_uses(self) -> list[list[Node]]:
        last: dict[Node, int] = {}
        for index, step in enumerate(self._steps):
            for node in step.writes if isinstance(step, _Kernel) else [step]:
                last.setdefault(node, index)
            for node in step.reads if isinstance(step, _Kernel) else _inputs(step):
                last[node] = index
        for node in self._inputs:
            last.setdefault(node, 0)
        kept = set(_inputs(self._nodes[-1]))
        frees: list[list[Node]] = [[] for _ in self._steps]
        for node, index in last.items():
            if node not in kept and frees:
                frees[index].append(node)
        return frees

    # --- the run --------------------------------------------------------------------------------------------------

    def run(self, inputs: list[Any]) -> Any:
        values: dict[Node, Any] = dict(zip(self._inputs, inputs, strict=True))
        inputs.clear()
        for step, freed in zip(self._steps, self._frees, strict=True):
            if isinstance(step, _Kernel):
                for node in step.writes:
                    like = node.meta["val"]
                    values[node] = torch.empty_strided(
                        like.shape, like.stride(), dtype=like.dtype, device="meta"
                    )
                self._recorder.tape.extend(step.ops(self._recorder))
            else:
                values[step] = self._call(step, values)
            for node in freed:
                values.pop(node, None)
        output: Any = torch.fx.node.map_arg(self._nodes[-1].args[0], lambda node: values[node])
        return output

    def _call(self, node: Node, values: dict[Node, Any]) -> Any:
        if node.op == "get_attr":
            return getattr(self._graph, str(node.target))
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: values[each])
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        return target(*args, **kwargs)
