"""Writes the tables of libraries into docs/guides/libraries.md, from the results of tests beside torch's own FSDP.

python docs/make_libraries.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "ecosystem.json"
PAGE = REPOSITORY / "docs" / "guides" / "libraries.md"
GPU_RESULTS = REPOSITORY / "benchmarks" / "results" / "libraries_gpu.json"
BEGIN, END = "<!-- from ecosystem.json: make reference -->", "<!-- to here -->"
GPU_BEGIN = "<!-- from libraries_gpu.json: make reference -->"
# In the order in which a reader looks for them.
GUIDES = {
    "accelerate": ("accelerate",),
    "transformers": ("trainer", "hugging_face"),
    "trl": ("trl",),
    "peft": ("trl",),
    "bitsandbytes": ("bitsandbytes",),
    "lightning": ("lightning",),
    "torchtitan": ("torchtitan",),
    "torchao": ("torchao",),
    "ray": ("ray",),
}


def table() -> str:
    """Returns the table of what ran on a CPU: a line for each library that was tried."""
    results = json.loads(RESULTS.read_text())
    lines = ["| library | version | torch | tried on | tests passed | guide |", "|---|---|---|---|---|---|"]
    for library, guides in GUIDES.items():
        found = results[library]
        passed = f"{found['passed']} of {found['passed'] + found['failed']}"
        links = ", ".join(f"[{guide}.md]({guide}.md)" for guide in guides)
        lines.append(
            f"| {library} | {found['version']} | {found['torch']} | {found['date']} | {passed} | {links} |"
        )
    return "\n".join(lines)


# As `tests/ecosystem/gpu/beside_torch.py` names them.
ON_GPUS = {
    "trainer": "a small Llama in bf16 by transformers' Trainer on accelerate",
    "torchtitan": "torchtitan's llama3 debug model in bf16",
    "float8": "torchao's float8 training",
    "float8_gathers": "the same, gathered in float8",
    "host_optimizer": "torchao's `CPUOffloadOptimizer`",
    "context_parallel": "torch's context parallelism, over the mesh that shards the model",
}


def gpu_table() -> str:
    """Returns the table of what ran on a GPU: a line for each program."""
    results = json.loads(GPU_RESULTS.read_text())
    lines = ["| program | versions | losses and weights | tried on |", "|---|---|---|---|"]
    for case, words in ON_GPUS.items():
        if case not in results["cases"]:
            continue
        found = results["cases"][case]
        versions = {**found.get("versions", {}), "torch": results["torch"]}
        named = ", ".join(f"{library} {version}" for library, version in versions.items())
        same = "to the bit" if found["same"] else "differ"
        lines.append(f"| {words} | {named} | {same} | {found['date']} |")
    return "\n".join(lines)


def page() -> str:
    """Returns the page with its tables as they should be."""
    text = PAGE.read_text()
    for begin, found in ((BEGIN, table()), (GPU_BEGIN, gpu_table())):
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{found}\n\n{END}{rest.split(END, 1)[1]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(REPOSITORY)}", file=sys.stderr)
