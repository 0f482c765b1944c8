"""Writes docs/configuration.md: every setting with its type, default and meaning, as the code has them.

    python scripts/document_configuration.py

The meaning is a field's description in tianji_jax/config.py, or, for an agent, what the `Attributes:` of its `Config`
say. A test compares the file with the code.
"""

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from tianji_jax.config import AGENTS, Config

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "configuration.md"

HEAD = """\
<!-- Written by scripts/document_configuration.py: change tianji_jax/config.py or the agent's Config instead. -->

# Configuration

A run is one YAML file of sections; any setting can be replaced on the command line as `section.setting=value`, for
example `actors.count=4 agent.network.hidden_sizes=[64]`. What is left out has the default below. Unknown keys, wrong
types and values out of range are refused before anything starts. `tianji config FILE` prints a configuration with every
default; a run keeps its own as `config.yaml`.
"""

AGENT = """\
## agent

`name`, which is {names}, or `module:Class` of [your own](your_own_agent.md), and that agent's settings.
"""

TYPES = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "`true` or `false`",
    "object": "mapping",
}


class Setting(NamedTuple):
    """A row of a table."""

    key: str
    kind: str
    default: str
    meaning: str


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """Every setting of a section or an agent; those of a group within it by their dotted names."""
    schema = model.model_json_schema()
    meanings = attributes(model)
    for key, field in model.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
            yield from settings(field.annotation, f"{prefix}{key}.")
            continue
        meaning = field.description or meanings.get(key)
        if meaning is None:
            raise SystemExit(f"{model.__module__}.{model.__name__}: nothing says what {key} means")
        default = "required"
        if not field.is_required():
            default = f"`{in_yaml(field.get_default(call_default_factory=True, validated_data={}))}`"
        # Docstrings speak Python and end with a full stop.
        meaning = re.sub(r"\bNone\b", "null", meaning).rstrip(".")
        yield Setting(prefix + key, kind(schema["properties"][key]), default, meaning)


def in_yaml(value: Any) -> str:
    """A value as it stands in a configuration."""
    return str(value) if value != "" and isinstance(value, str | Path) else json.dumps(value)


def attributes(model: type[BaseModel]) -> dict[str, str]:
    """What the `Attributes:` in the docstrings of a class and its bases say, by name."""
    found: dict[str, str] = {}
    for cls in reversed(inspect.getmro(model)):
        _, _, listing = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")
        entries = re.findall(r"^  (\w+): (.*(?:\n {4}.*)*)", listing, re.M)
        found |= {name: " ".join(text.split()) for name, text in entries}
    return found


def kind(schema: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(kind(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema["type"] == "null":
        return "`null`"
    if schema["type"] == "array":
        return f"list of ({kind(schema['items'])})"
    name = "path" if schema.get("format") == "path" else TYPES[schema["type"]]
    return " ".join([name, *limits(schema)])


def limits(schema: dict[str, Any]) -> Iterator[str]:
    """What a JSON schema allows of its type, in words."""
    words = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{word} {schema[key]:,}" for key, word in words.items() if key in schema]
    if bounds:
        yield ", ".join(bounds)
    if "pattern" in schema:
        yield f"like `{schema['pattern']}`"


def table(rows: list[Setting]) -> str:
    """Settings as a Markdown table."""
    lines = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    for row in rows:
        cells = (f"`{row.key}`", row.kind, row.default, row.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def agent_config(target: str) -> type[BaseModel]:
    """The `Config` of an agent named as `module:Class`."""
    module, _, name = target.partition(":")
    config: type[BaseModel] = getattr(importlib.import_module(module), name).Config
    return config


def document() -> str:
    """The whole of docs/configuration.md."""
    parts = [HEAD]
    for section, field in Config.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
            parts += [
                f"## {section}\n",
                f"{inspect.getdoc(field.annotation)}\n",
                table(list(settings(field.annotation))),
            ]
    agents = {name: list(settings(agent_config(target))) for name, target in AGENTS.items()}
    names = ", ".join(f"`{name}`" for name in agents)
    first, *others = agents.values()
    shared = [row for row in first if all(row in rows for rows in others)]
    parts += [AGENT.format(names=names), f"### {' and '.join(names.rsplit(', ', 1))}\n", table(shared)]
    for name, rows in agents.items():
        parts += [f"### `{name}`\n", table([row for row in rows if row not in shared])]
    return "\n".join(parts)


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}")
