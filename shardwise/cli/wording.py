"""What the commands' help has in common: a paragraph, then examples that can be typed as they are."""

from __future__ import annotations

import argparse
import textwrap

__all__ = ["describe"]


def describe(parser: argparse.ArgumentParser, text: str, *examples: str) -> None:
    """Sets a command's description, and the examples below its options."""
    parser.description = textwrap.fill(text, 80)
    lines = ["examples:" if len(examples) > 1 else "example:", *(f"  {example}" for example in examples)]
    parser.epilog = "\n".join(lines)
