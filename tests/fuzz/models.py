"""Random models: trees of blocks as data, and their source as classes.

Every block maps a tensor (rows, width) to one of the same shape, so any tree of blocks is a model. A block of kind
"linear" is an `nn.Linear`; most others have their own class in the printed source. Actions can change the behaviour
of a block between steps by its attributes (`fails`, `first`, ...).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.fuzz.dice import Dice


@dataclass(frozen=True)
class Block:
    """A module: its kind, its name in its parent, its children, and the options of its kind."""

    kind: str
    name: str
    children: tuple[Block, ...] = ()
    options: tuple[int | str, ...] = ()
    single: bool = False  # its parameters are float32, the rest of the model's are not

    def walk(self, path: str = "") -> Iterator[tuple[str, Block]]:
        """Yields this block and all blocks below it with their paths; the root's path is empty."""
        yield path, self
        for child in self.children:
            yield from child.walk(f"{path}.{child.name}" if path else child.name)


@dataclass(frozen=True)
class Param:
    """A parameter of the tree."""

    path: str
    shape: tuple[int, ...]
    single: bool


# --- leaves -----------------------------------------------------------------------------------------------------------

# For each kind: its weight in the draw, and its parameters' names and shapes for a width and an option.
_LEAF_WEIGHTS = {
    "linear": 34,
    "no_bias": 10,
    "mlp": 10,
    "norm": 6,
    "batch_norm": 7,
    "embedding": 6,
    "conv": 5,
    "recurrent": 4,
    "attention": 4,
    "bare": 8,
    "buffer": 6,
    "borrowed": 3,
}


def leaf_params(block: Block, width: int) -> list[tuple[str, tuple[int, ...]]]:
    w, option = width, block.options[0] if block.options else 0
    size = option if isinstance(option, int) else 0
    known: dict[str, list[tuple[str, tuple[int, ...]]]] = {
        "linear": [("weight", (w, w)), ("bias", (w,))],
        "no_bias": [("weight", (w, w))],
        "mlp": [
            ("up.weight", (size, w)),
            ("up.bias", (size,)),
            ("down.weight", (w, size)),
            ("down.bias", (w,)),
        ],
        "norm": [("weight", (w,)), ("bias", (w,))],
        "batch_norm": [("weight", (w,)), ("bias", (w,))],
        "embedding": [("table.weight", (size, w))],
        "conv": [("conv.weight", (1, 1, 3)), ("conv.bias", (1,))],
        "bare": [("weight", (size, w))],
        "borrowed": [("inner.weight", (w, w)), ("inner.bias", (w,))],
        "recurrent": [("gru.weight_ih_l0", (3 * w, w)), ("gru.bias_ih_l0", (3 * w,))],
        "attention": [("att.in_proj_weight", (3 * w, w)), ("att.out_proj.weight", (w, w))],
    }
    return known.get(block.kind, [])


def params_of(root: Block, width: int) -> list[Param]:
    """Returns the parameters that actions may use, in the order of the tree."""
    found = []

    def visit(path: str, block: Block, single: bool) -> None:
        single = single or block.single
        prefix = f"{path}." if path else ""
        found.extend(Param(prefix + name, shape, single) for name, shape in leaf_params(block, width))
        for child in block.children:
            visit(prefix + child.name, child, single)

    visit("", root, False)
    return found


# Leaves that are a module of torch, called with a tensor.
_TORCH_LEAVES = {
    "linear": "nn.Linear({w}, {w})",
    "no_bias": "nn.Linear({w}, {w}, bias=False)",
    "norm": "nn.LayerNorm({w})",
    "batch_norm": "nn.BatchNorm1d({w})",
}

_LEAF_CLASSES = {
    "mlp": """
class MLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))
""",
    "embedding": """
class Lookup(nn.Module):
    def __init__(self, width, rows):
        super().__init__()
        self.table = nn.Embedding(rows, width)

    def forward(self, x):
        return x + self.table(torch.arange(x.shape[0]) % self.table.num_embeddings)
""",
    "conv": """
class Conv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x):
        return self.conv(x.unsqueeze(1)).squeeze(1)
""",
    "recurrent": """
class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gru = nn.GRU(width, width)

    def forward(self, x):
        return self.gru(x.unsqueeze(1))[0].squeeze(1)
""",
    "attention": """
class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.att = nn.MultiheadAttention(width, 1)

    def forward(self, x):
        return self.att(x, x, x, need_weights=False)[0]
""",
    "bare": '''
class Bare(nn.Module):
    """A parameter of its own, of any number of rows: fewer than ranks, or none."""

    def __init__(self, width, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, x):
        return x + self.weight.sum(0)
''',
    "buffer": '''
class Counting(nn.Module):
    """A buffer that forward writes to and computes with."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, x):
        if self.training:
            self.seen = self.seen * 0.5 + x.detach().mean(0).to(self.seen.dtype)
        return x + self.seen
''',
    "borrowed": '''
class Borrowed(nn.Module):
    """Uses the parameters of a module that it never calls."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.inner.weight, self.inner.bias)
''',
}
_LEAF_NAMES = {
    "mlp": "MLP",
    "embedding": "Lookup",
    "conv": "Conv",
    "recurrent": "Recurrent",
    "attention": "Attention",
    "bare": "Bare",
    "buffer": "Counting",
    "borrowed": "Borrowed",
}

# --- blocks with blocks inside ----------------------------------------------------------------------------------------

# kind: (weight, number of children, body of forward, attributes that are set in __init__)
_BODIES: dict[str, tuple[int, int, str, str]] = {
    "pair": (24, 2, "return self.{b}(torch.tanh(self.{a}(x)))", ""),
    "residual": (14, 1, "return x + self.{a}(x)", ""),
    "both": (8, 2, "return self.{a}(x) + self.{b}(x)", ""),
    "either": (8, 2, "return self.{a}(x) if self.first else self.{b}(x)", "self.first = True"),
    "twice": (6, 1, "return self.{a}(torch.tanh(self.{a}(x)))", ""),
    "mirrored": (4, 1, "return self.{a}(x) + self.{a}(-x)", ""),
    "recursive": (
        6,
        2,
        """if depth == 0:
    return torch.tanh(self.{a}(x))
return torch.tanh(self.{b}(self(x, depth - 1) + self(-x, depth - 1)))""",
        "",
    ),
    "raising": (
        8,
        1,
        """y = self.{a}(x)
if self.fails:
    raise Oops("in forward")
if self.fails_in_backward and y.requires_grad:
    y.register_hook(raise_oops)
return y""",
        "self.fails = self.fails_in_backward = False",
    ),
    "catching": (
        8,
        2,
        """try:
    return self.{a}(x)
except Oops:
    return self.{b}(x)""",
        "",
    ),
    "unused": (4, 1, "return x", ""),
    "no_grad": (4, 1, "with torch.no_grad():\n    y = self.{a}(x)\nreturn x + y", ""),
    "checkpoint": (5, 1, "return checkpoint(self.{a}, x, use_reentrant=False)", ""),
    "reentrant": (3, 1, "return checkpoint(self.{a}, x, use_reentrant=True)", ""),
    "selective": (
        3,
        1,
        "return checkpoint(self.{a}, x, use_reentrant=False, context_fn=save_matmuls)",
        "",
    ),
    "in_place": (4, 1, "y = self.{a}(x) + 0\ny.mul_(0.5)\nreturn y", ""),
    "in_place_direct": (3, 1, "y = self.{a}(torch.tanh(x))\ny.mul_(0.5)\nreturn y", ""),
    "tuple": (2, 1, "return self.{a}((x, 3))[0]", ""),
    "list": (2, 1, "return self.{a}([x, [torch.tanh(x)]])[1][0]", ""),
    "dict": (2, 1, 'return self.{a}({{"x": x, "n": 3}})["y"]', ""),
    "named": (2, 1, "return self.{a}(Two(x, 3)).first", ""),
    "dataclass": (2, 1, "return self.{a}(Parcel(x)).content", ""),
    "appended": (2, 1, "out = []\nself.{a}(x, out)\nreturn out[0]", ""),
    "appended_more": (2, 1, "out = [x]\nself.{a}(x, out)\nreturn out[0] + out[1]", ""),
    "keyword": (2, 1, "return self.{a}(x=x, scale=0.5)", ""),
}

# The inner half of a container: takes and returns what the outer half passes and expects.
_CARRIERS = {
    "tuple": ("parts", "return (self.{a}(parts[0]), parts[1])"),
    "list": ("parts", "return [None, [self.{a}(parts[0]) + parts[1][0]]]"),
    "dict": ("parts", 'return {{"y": self.{a}(parts["x"]), "n": parts["n"]}}'),
    "named": ("parts", "return Two(self.{a}(parts.first), parts.second)"),
    "dataclass": ("parcel", "return Parcel(self.{a}(parcel.content))"),
    "appended": ("x, out", "out.append(self.{a}(x))"),
    "appended_more": ("x, out", "out.append(self.{a}(x))"),
    "keyword": ("x, scale", "return self.{a}(x) * scale"),
}

_DEPTH_LIMIT = 4

SUPPORT = {
    "Oops": '''
class Oops(Exception):
    """Raised on purpose."""


def raise_oops(*_):
    raise Oops("in a hook")
''',
    "save_matmuls": """
def save_matmuls():
    keep, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    return create_selective_checkpoint_contexts(
        lambda ctx, op, *args, **kwargs: keep if op == torch.ops.aten.addmm.default else again
    )
""",
    "Two(": """
class Two(NamedTuple):
    first: torch.Tensor
    second: int
""",
    "Parcel(": """
@dataclass
class Parcel:
    content: torch.Tensor
""",
}

# Features that can be left out, and the kinds that need them.
FEATURES = {
    "recursive": ("recursive",),
    "caught_exception": ("catching",),
    "raising": ("raising", "catching"),
    "twice": ("twice", "mirrored", "recursive"),
    "checkpoint": ("checkpoint", "reentrant", "selective"),
    "selective": ("selective",),
    "reentrant": ("reentrant",),
    "containers": tuple(_CARRIERS),
    "appended": ("appended", "appended_more"),
    "in_place": ("in_place", "in_place_direct"),
    "no_grad": ("no_grad",),
    "unused": ("unused",),
    "either": ("either",),
    "recurrent": ("recurrent",),
    "attention": ("attention",),
    "batch_norm": ("batch_norm",),
    "buffer": ("buffer",),
    "borrowed": ("borrowed",),
    "bare": ("bare",),
    "conv": ("conv",),
}


class Architect:
    """Draws a tree of blocks with unique names."""

    def __init__(self, dice: Dice, without: frozenset[str], is_double: bool) -> None:
        self._dice = dice
        self._count = 0
        self._banned = {kind for feature in without for kind in FEATURES.get(feature, ())}
        if not is_double:
            # Gradients before a batch norm cancel to rounding errors, which it divides by a standard deviation.
            self._banned.add("batch_norm")
        self._may_mix = is_double and "mixed_dtypes" not in without

    def draw(self) -> Block:
        root = self._composite("model", 1)
        return root if root is not None else self._leaf("model")

    def _name(self) -> str:
        self._count += 1
        return f"m{self._count}"

    def _any(self, depth: int) -> Block:
        name = self._name()
        composite_percent = (0, 90, 55, 30, 0)[min(depth, _DEPTH_LIMIT)]
        block = None
        if self._count < 14 and self._dice.chance(composite_percent):
            block = self._composite(name, depth)
        if block is None:
            block = self._leaf(name)
        if self._may_mix and depth > 1 and self._dice.chance(5) and block.kind != "raising":
            block = Block("single", name, (_renamed(block, self._name()),), single=True)
        return block

    def _leaf(self, name: str) -> Block:
        options = [(weight, kind) for kind, weight in _LEAF_WEIGHTS.items() if kind not in self._banned]
        kind = self._dice.weighted(options)
        drawn: tuple[int | str, ...] = ()
        if kind == "mlp":
            drawn = (self._dice.pick((1, 2, 3, 7, 8)),)
        elif kind == "embedding":
            drawn = (self._dice.pick((1, 3, 5)),)
        elif kind == "bare":
            drawn = (self._dice.pick((0, 1, 2, 5)),)
        return Block(kind, name, (), drawn)

    def _composite(self, name: str, depth: int) -> Block | None:
        options = [(body[0], kind) for kind, body in _BODIES.items() if kind not in self._banned]
        kind = self._dice.weighted(options)
        if kind in _CARRIERS:
            inner = self._name()
            return Block(kind, name, (Block(f"{kind}_inner", inner, (self._any(depth + 1),)),))
        if kind == "catching":
            inside = Block("raising", self._name(), (self._any(depth + 1),))
            return Block(kind, name, (inside, self._any(depth + 1)))
        children = tuple(self._any(depth + 1) for _ in range(_BODIES[kind][1]))
        return Block(kind, name, children, (self._dice.between(1, 2),) if kind == "recursive" else ())


def _renamed(block: Block, name: str) -> Block:
    return Block(block.kind, name, block.children, block.options, block.single)


# --- as source --------------------------------------------------------------------------------------------------------


def written(root: Block, width: int) -> str:
    """Returns the source of a model's classes; the root's class is the last, and is called Model."""
    leaves: dict[str, str] = {}
    classes: list[str] = []

    def construct(block: Block) -> str:
        if block.kind in _TORCH_LEAVES:
            return _TORCH_LEAVES[block.kind].format(w=width)
        if block.kind in _LEAF_CLASSES:
            leaves.setdefault(block.kind, _LEAF_CLASSES[block.kind])
            arguments = ", ".join(str(value) for value in (width, *block.options))
            return f"{_LEAF_NAMES[block.kind]}({arguments})"
        name = "Model" if block is root else block.name.capitalize()
        classes.append(_class(block, name, [construct(child) for child in block.children]))
        return f"{name}()"

    made = construct(root)
    if made != "Model()":
        classes.append(f"\ndef Model():\n    return {made}\n")
    body = "\n".join(leaves.values()) + "\n".join(classes)
    needed = [text for word, text in SUPPORT.items() if word in body]
    return "\n".join(needed) + body


def _class(block: Block, name: str, children: list[str]) -> str:
    if block.kind == "single":
        arguments, body, extra = "x", "return self.{a}(x.to(torch.float32)).to(x.dtype)", ""
    elif block.kind.endswith("_inner"):
        arguments, body = _CARRIERS[block.kind.removesuffix("_inner")]
        extra = ""
    else:
        _, _, body, extra = _BODIES[block.kind]
        arguments = "x"
        if block.kind == "recursive":
            arguments = f"x, depth={block.options[0]}"
    names = {letter: child.name for letter, child in zip("ab", block.children, strict=False)}
    lines = [f"\nclass {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [
        f"        self.{child.name} = {made}" for child, made in zip(block.children, children, strict=True)
    ]
    if extra:
        lines.append(f"        {extra}")
    lines += ["", f"    def forward(self, {arguments}):"]
    lines += [f"        {line}" for line in body.format(**names).splitlines()]
    return "\n".join(lines) + "\n"
