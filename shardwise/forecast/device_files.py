"""The files that hold a device's prices: those that come with shardwise, and any other.

A device file is JSON. Every price in it says where it comes from: a datasheet, a results file, a measurement on the
machine, or an assumption. ``shardwise doctor --measure`` writes the file of the machine at hand.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, Final

from shardwise.errors import ConfigError
from shardwise.forecast.prices import COLLECTIVES, HOST_CALLS, OPS, Curve, Device, Link, Links, unknown_price

__all__ = [
    "FORMAT",
    "device_from_json",
    "device_names",
    "device_text",
    "link_named",
    "link_names",
    "load_device",
    "prices_of_gpu",
    "with_links",
]

FORMAT: Final = "shardwise device 1"


def device_names() -> list[str]:
    """Returns the names of the device files that come with shardwise."""
    return sorted(name.removesuffix(".json") for name in _shipped() if name != "links.json")


# Parts of the names that torch gives GPUs, and the prices that belong to them.
_PRICES_OF = {"H200": "h200", "H100": "h100", "A100": "a100", "B200": "b200", "L40S": "l40s"}


def prices_of_gpu(gpu: str) -> str | None:
    """Returns the prices for a GPU by the name that torch gives it; None if there are none."""
    return next((prices for part, prices in _PRICES_OF.items() if part in gpu), None)


def link_names() -> list[str]:
    """Returns the names of the links that device files refer to."""
    return sorted(_links_file())


def link_named(name: str) -> Link:
    """Returns one of the links that come with shardwise."""
    found = _links_file()
    if name not in found:
        raise unknown_price("link", name, sorted(found))
    return _Reader(found[name], f"links.json: {name}").link(name)


def load_device(name_or_path: str | os.PathLike[str]) -> Device:
    """Reads and checks a device file: one that comes with shardwise, by name, or any other, by path."""
    name = os.fspath(name_or_path)
    shipped = f"{name.lower()}.json"
    if shipped in _shipped() and shipped != "links.json":
        text = _folder().joinpath(shipped).read_text(encoding="utf-8")
        return device_from_json(json.loads(text), shipped)
    path = Path(name)
    if path.suffix != ".json" and not path.exists():
        raise ConfigError(
            f"there are no prices of a device '{name}'",
            where="device",
            fix=f"name one of {', '.join(device_names())}, or a file that `shardwise doctor --measure` has written",
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the device file {name} cannot be read: {error}",
            where=f"device {name}",
            fix="pass a file that `shardwise doctor --measure` has written, or the name of a device",
        ) from None
    return device_from_json(content, name)


def with_links(device: Device, *, within: str | None = None, between: str | None = None) -> Device:
    """Returns the device with other links, by name."""
    links = device.links
    if within:
        links = replace(links, within=link_named(within))
    if between:
        links = replace(links, between=link_named(between))
    return replace(device, links=links)


def device_from_json(content: Any, where: str) -> Device:
    """Makes a device from a file's content; says which entry is wrong, if one is."""
    file = _Reader(content, where)
    if file.text("format") != FORMAT:
        raise file.wrong("format", f"is {content.get('format')!r}", f'write "{FORMAT}"')
    return Device(
        name=file.text("name"),
        type=file.choice("type", ("cuda", "cpu")),
        memory_bytes=int(file.price("memory_bytes")),
        context_bytes=int(file.price("context_bytes", least=0)),
        memory_bytes_per_second=file.price("memory_bytes_per_second"),
        launch_seconds=file.price("launch_seconds", least=0),
        host_copy_bytes_per_second=file.price("host_copy_bytes_per_second"),
        host_copy_both_bytes_per_second=file.price("host_copy_both_bytes_per_second"),
        peak_flops=file.prices("peak_flops", needed=("float32",)),
        fractions={kind: file.curve(kind) for kind in OPS},
        host_microseconds=file.prices("host_microseconds", needed=HOST_CALLS, least=0),
        links=file.links(int(file.price("multiprocessors", least=0))),
        shares=file.prices("shares", needed=()) if "shares" in content else {},
        spread=file.prices("spread", needed=("compute", "host", "links"), least=0),
        sources=file.sources,
        notes=str(content.get("notes", "")),
    )


def device_text(content: Mapping[str, Any]) -> str:
    """Returns a device file's text: lists of numbers on one line, large and small numbers as powers of ten."""
    text = json.dumps(_short(content), indent=1, ensure_ascii=False)
    text = re.sub(r"\[\s+([^][{}\s]+),\s+([^][{}\s]+)\s+\]", r"[\1, \2]", text)
    return re.sub(r'"=([^"]*)="', r"\1", text) + "\n"


def _short(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {name: _short(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_short(value) for value in content]
    return (
        f"={content:.6g}=".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
        if isinstance(content, float)
        else content
    )


class _Reader:
    """Reads the entries of one device file, checks each, and keeps where it comes from."""

    def __init__(self, content: Any, where: str) -> None:
        self._where = where
        self.sources: dict[str, str] = {}
        if not isinstance(content, dict):
            raise ConfigError(
                f"{where} is not a device file: it holds a {type(content).__name__}",
                where=where,
                fix="write a JSON object, as `shardwise doctor --measure` does",
            )
        self._content = content

    def wrong(self, entry: str, what: str, fix: str) -> ConfigError:
        return ConfigError(f"'{entry}' of the device file {what}", where=self._where, fix=fix)

    def text(self, entry: str) -> str:
        value = self._content.get(entry)
        if not isinstance(value, str) or not value:
            raise self.wrong(entry, f"is {value!r}", "write a string")
        return value

    def choice(self, entry: str, choices: tuple[str, ...]) -> str:
        value = self.text(entry)
        if value not in choices:
            raise self.wrong(entry, f"is {value!r}", f"write one of {', '.join(choices)}")
        return value

    def price(self, entry: str, least: float | None = None) -> float:
        block = self._block(self._content.get(entry), entry)
        return self._number(entry, block.get("value"), least)

    def prices(self, entry: str, *, needed: tuple[str, ...], least: float | None = None) -> dict[str, float]:
        """Reads one block of values, or a list of blocks that each come from somewhere else."""
        blocks = self._content.get(entry)
        found: dict[str, float] = {}
        for block in blocks if isinstance(blocks, list) else [blocks]:
            checked = self._block(block, entry)
            values = checked.get("values")
            if not isinstance(values, dict):
                raise self.wrong(entry, "has no 'values'", "write an object of names and numbers")
            for name, value in values.items():
                found[name] = self._number(f"{entry}.{name}", value, least)
                self.sources[f"{entry}.{name}"] = checked["from"]
        missing = [name for name in needed if name not in found]
        if missing:
            raise self.wrong(entry, f"has no price of {', '.join(missing)}", "add it to 'values'")
        return found

    def curve(self, kind: str) -> Curve:
        entry = f"fractions.{kind}"
        curves = self._content.get("fractions")
        block = self._block(curves.get(kind) if isinstance(curves, dict) else None, entry)
        points: Any = block.get("points")
        points = points if isinstance(points, list) else []
        if not points or any(not isinstance(point, list) or len(point) != 2 for point in points):
            raise self.wrong(entry, "has no 'points'", "write a list of [size, fraction of the peak]")
        sizes = tuple(self._number(entry, size) for size, _ in points)
        fractions = tuple(self._number(entry, fraction) for _, fraction in points)
        if any(fraction > 1 for fraction in fractions):
            raise self.wrong(entry, f"reaches {max(fractions)} of the peak", "correct the peak or the points")
        seconds = [size / fraction for size, fraction in zip(sizes, fractions, strict=True)]
        if list(sizes) != sorted(set(sizes)) or seconds != sorted(seconds):
            raise self.wrong(
                entry,
                "takes less time for a larger size",
                "sort the points by size; lower the later fractions",
            )
        return Curve(sizes, fractions)

    def links(self, multiprocessors: int) -> Links:
        ends = self._content.get("links")
        if not isinstance(ends, dict) or not {"within", "between"} <= ends.keys():
            raise self.wrong(
                "links", "lacks 'within' or 'between'", f"name one of {', '.join(link_names())} for each"
            )
        made: dict[str, Link] = {}
        for end in ("within", "between"):
            if isinstance(ends[end], str):
                made[end] = link_named(ends[end])
                self.sources[f"links.{end}"] = _links_file()[ends[end]]["from"]
            else:
                reader = _Reader(ends[end], f"{self._where}: links.{end}")
                made[end] = reader.link(f"links.{end}")
                self.sources |= reader.sources
        channels = max(link.channels for link in made.values())
        sm_share = min(1.0, channels / multiprocessors) if multiprocessors else 0.0
        return Links(made["within"], made["between"], sm_share)

    def link(self, name: str) -> Link:
        block = self._block(self._content, name)
        shares, free = block.get("share_of", {}), tuple(block.get("free", ()))
        for kind in (*shares, *free):
            if kind not in COLLECTIVES:
                raise self.wrong(
                    f"{name}.{kind}", "is no collective", f"name one of {', '.join(COLLECTIVES)}"
                )
        return Link(
            name=str(block.get("name", name)),
            call_seconds=self._number("call_seconds", block.get("call_seconds"), 0),
            hop_seconds=self._number("hop_seconds", block.get("hop_seconds"), 0),
            bytes_per_second=self._number("bytes_per_second", block.get("bytes_per_second")),
            channels=int(self._number("channels", block.get("channels", 0), 0)),
            is_shared=bool(block.get("is_shared", False)),
            share_of={kind: self._number(f"share_of.{kind}", share) for kind, share in shares.items()},
            free=free,
            one_by_one=bool(block.get("one_by_one", False)),
        )

    def _block(self, block: Any, entry: str) -> dict[str, Any]:
        if not isinstance(block, dict):
            raise self.wrong(
                entry, "is missing", 'write an object with the number and "from": where it is from'
            )
        source = block.get("from")
        if not isinstance(source, str) or not source.strip():
            raise self.wrong(
                entry, "does not say where it comes from", 'add "from": a datasheet, file or assumption'
            )
        self.sources[entry] = source
        return block

    def _number(self, entry: str, value: Any, least: float | None = None) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or (value <= 0 if least is None else value < least):
            bound = "above 0" if least is None else f"of at least {least:g}"
            raise self.wrong(entry, f"is {value!r}", f"write a number {bound}")
        return float(value)


def _folder() -> Any:
    return resources.files("shardwise.forecast").joinpath("devices")


def _shipped() -> list[str]:
    return [item.name for item in _folder().iterdir() if item.name.endswith(".json")]


def _links_file() -> dict[str, Any]:
    links: dict[str, Any] = json.loads(_folder().joinpath("links.json").read_text(encoding="utf-8"))["links"]
    return links
