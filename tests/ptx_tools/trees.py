"""Comparing trees, and making small ones."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tessera_compile.ptx_tools.parsing import parse
from tessera_compile.ptx_tools.syntax import Instruction, Module

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"


def shape(node: Any) -> Any:
    """A node, a module or a tuple of nodes without the spans and the text."""
    if isinstance(node, Module):
        return node.version, node.target, node.target_options, node.address_size, shape(node.items)
    if isinstance(node, tuple):
        return tuple(map(shape, node))
    if hasattr(node, "span"):
        return type(node).__name__, *(shape(getattr(node, each.name)) for each in fields(node) if each.name != "span")
    return node


def body(text: str, declarations: str = "") -> Module:
    """A module with one kernel `k` that has this body."""
    return parse(f"{HEAD}{declarations}\n.visible .entry k(.param .u64 p)\n{{\n{text}\n}}\n")


def instructions(text: str, declarations: str = "") -> list[Instruction]:
    return list(body(text, declarations).kernels["k"].instructions())


def instruction(text: str, declarations: str = "") -> Instruction:
    (only,) = instructions(text, declarations)
    return only
