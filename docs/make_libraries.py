"""Writes the table of libraries into docs/guides/libraries.md, from the results of ``make test-ecosystem``.

python docs/make_libraries.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "ecosystem.json"
PAGE = REPOSITORY / "docs" / "guides" / "libraries.md"
BEGIN, END = "<!-- from ecosystem.json: make reference -->", "<!-- to here -->"
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
    """Returns the table: a line for each library that was tried."""
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


def page() -> str:
    """Returns the page with the table as it should be."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(REPOSITORY)}", file=sys.stderr)
