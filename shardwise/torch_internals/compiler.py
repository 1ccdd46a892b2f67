"""torch.compile up to its graphs: traced, differentiated and cut into forward and backward as for its own compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

__all__ = ["backend_running_graphs", "forget_compiled"]


def forget_compiled() -> None:
    """Forgets what has been compiled in this process: of one function torch keeps a few versions, and then gives up."""
    torch._dynamo.reset()


def backend_running_graphs(runner: Callable[[GraphModule], Callable[[list[Any]], Any]]) -> Any:
    """Returns a backend for ``torch.compile`` whose graphs run as ``runner`` makes them.

    Operators are decomposed, and what is recomputed in backward is decided, as for Inductor. A runner's function takes
    a list of the graph's inputs, which it may empty to free them.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def made(graph: GraphModule, _: Any) -> Any:
        run: Any = runner(graph)

        def boxed(inputs: list[Any]) -> Any:
            return run(inputs)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    return aot_autograd(
        fw_compiler=made,
        bw_compiler=made,
        inference_compiler=made,
        decompositions=select_decomp_table,
        partition_fn=min_cut_rematerialization_partition,
    )
