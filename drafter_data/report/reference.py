"""`python -m drafter_data.report.reference`: docs/reference.md from the flow parameters and the contracts themselves."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import data_contracts
from data_contracts import parameters
from data_contracts.record import Record
from drafter_data.report.text import markdown_table

HEAD = """# Reference

Made by `make reference` from the code; a test holds the two equal. Commands: `drafter-data COMMAND --help`. Columns of the dataset
are in [dataset.odcs.yaml](../data_contracts/dataset.odcs.yaml), reason codes in the [runbook](runbook.md).

## Flow parameters

The form in the UI, `parameters` in `prefect.yaml`, and `prefect deployment run extract-100k --params '{"section": {"name": …}}'`.
"""
SECTIONS = {
    "input": parameters.InputParameters,
    "engine": parameters.EngineParameters,
    "extraction": parameters.ExtractionParameters,
    "handoff": parameters.HandoffParameters,
    "storage": parameters.StorageParameters,
    "input of nightly-refresh": parameters.WatchParameters,
    "chunk": parameters.ChunkParameters,
    "engine of extract-chunk": parameters.ChunkEngineParameters,
}
"""By the name of the flow's parameter; `chunk` belongs to extract-chunk. Further sections follow under their own names."""
_WORDS = {str: "text", int: "whole number", float: "number", bool: "yes or no", type(None): "empty"}


def reference() -> str:
    """The whole document."""
    parts = [HEAD]
    for name, section in [*SECTIONS.items(), *_further_sections()]:
        rows = [_parameter_row(field, info) for field, info in section.model_fields.items()]
        parts.append(f"### `{name}`\n\n{_first_line(section)}\n\n{markdown_table(rows)}\n")
    parts.append("## Contracts\n\nRecords on disk and between stages: frozen, closed to unknown fields.\n")
    for module, records in _contracts():
        parts.append(f"### {module}\n")
        for record in records:
            rows = [_record_row(field, info) for field, info in record.model_fields.items()]
            parts.append(f"**{record.__name__}**: {_first_line(record)}\n\n{markdown_table(rows)}\n")
    return "\n".join(parts)


def _further_sections() -> list[tuple[str, type[BaseModel]]]:
    known = set(SECTIONS.values())
    return [(one.__name__, one) for one in _models_of(parameters, parameters.Parameters) if one not in known]


def _contracts() -> Iterator[tuple[str, list[type[BaseModel]]]]:
    for found in pkgutil.iter_modules(data_contracts.__path__):
        module = importlib.import_module(f"data_contracts.{found.name}")
        records = _models_of(module, Record)
        if records:
            yield f"{found.name}: {_first_line(module)}", records


def _models_of(module: types.ModuleType, base: type[BaseModel]) -> list[type[BaseModel]]:
    """Models that the module itself defines, in the order of its text."""
    defined = [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__]
    return [one for one in defined if issubclass(one, base) and one is not base]


def _parameter_row(name: str, info: FieldInfo) -> dict[str, object]:
    bounds = {type(one).__name__: getattr(one, type(one).__name__.lower(), None) for one in info.metadata}
    low, high = bounds.get("Ge"), bounds.get("Le")
    between = f", {low:,} to {high:,}" if low is not None and high is not None else ""
    return {
        "name": f"`{name}`",
        "title": info.title or "",
        "type": type_words(info.annotation) + between,
        "default": _default(info),
        "description": info.description or "",
    }


def _record_row(name: str, info: FieldInfo) -> dict[str, object]:
    told: dict[str, object] = {"field": f"`{name}`", "type": type_words(info.annotation), "default": _default(info)}
    return told | {"description": info.description or ""}


def type_words(annotation: Any) -> str:
    """A type for people: `list of text`, `pre or post`, `number or empty`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{one}`" for one in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(type_words(one) for one in arguments)
    if origin is tuple:
        inner = [one for one in arguments if one is not Ellipsis]
        return f"list of {type_words(inner[0])}" if len(arguments) == 2 and arguments[1] is Ellipsis else f"{len(inner)} numbers"
    if origin is dict:
        return f"{type_words(arguments[1])} by {type_words(arguments[0])}"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "-"
    value = info.get_default(call_default_factory=True)
    return "empty" if value in (None, (), {}, "") else f"`{value}`"


def _first_line(documented: object) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.stdout.write(reference())
