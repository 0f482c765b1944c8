"""What is wrong with a configuration, in words: the setting, what was given, what is allowed."""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import ValidationError


def explain(error: ValidationError, root: Any, prefix: tuple[str, ...] = ()) -> Iterator[str]:
    """One line for each problem: setting, what was given, what is allowed."""
    for problem in error.errors():
        location = [str(part) for part in problem["loc"]]
        setting = ".".join((*prefix, *location))
        if problem["type"] == "default_factory_not_called":
            continue  # its default follows from another setting, which is named itself
        if problem["type"] == "extra_forbidden":
            yield f"{setting}: unknown setting{nearest(location[-1], fields(_descend(root, location[:-1])))}"
        elif problem["type"] == "missing":
            yield f"{setting}: missing, and it has no default"
        elif problem["type"] == "value_error":
            message = problem["msg"].removeprefix("Value error, ")
            yield f"{setting}: {message}" if setting else message
        else:
            allowed = problem["msg"].replace("Input should", "it should").replace("a valid tuple", "a list")
            yield f"{setting}: got {problem['input']!r}; {allowed}"


def _descend(cls: Any, location: Sequence[str]) -> Any:
    for part in location:
        annotation = fields(cls).get(part)
        cls = next((a for a in (annotation, *get_args(annotation)) if fields(a)), None)
    return cls


def fields(cls: Any) -> dict[str, Any]:
    """Names and types of a pydantic model's or a dataclass's settings."""
    if hasattr(cls, "model_fields"):
        return {name: field.annotation for name, field in cls.model_fields.items()}
    return {name: field.type for name, field in getattr(cls, "__dataclass_fields__", {}).items()}


def nearest(word: str, known: Any) -> str:
    """` (did you mean ...?)`, or nothing where no known word is near."""
    match = difflib.get_close_matches(word, [str(name) for name in known], n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""
