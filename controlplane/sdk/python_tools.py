"""Describes Python functions to a model as tools, and checks the arguments that the model sends."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NotRequired, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_json
from typing_extensions import TypedDict

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class PythonTool:
    """A function with the schema of its arguments, which its annotations state."""

    function: Callable[..., Any]
    arguments: TypeAdapter[dict[str, Any]]

    @property
    def name(self) -> str:
        """The name under which the model calls it: that of the function."""
        return self.function.__name__

    @property
    def described(self) -> dict[str, Any]:
        """The entry in `tools`; the description is the function's docstring."""
        function = {"name": self.name, "parameters": self.arguments.json_schema()}
        if described := inspect.getdoc(self.function):
            function["description"] = described
        return {"type": "function", "function": function}


def python_tools(functions: Iterable[Callable[..., Any]]) -> dict[str, PythonTool]:
    """The tools by name.

    Raises TypeError for a parameter without annotation or name, ValueError for a repeated name.
    """
    tools: dict[str, PythonTool] = {}
    for function in functions:
        tool = PythonTool(function, _arguments(function))
        if tools.setdefault(tool.name, tool) is not tool:
            raise ValueError(f"{tool.name}: two functions have this name; rename one")
    return tools


def _arguments(function: Callable[..., Any]) -> TypeAdapter[dict[str, Any]]:
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in _NAMED:
            raise TypeError(
                f"{function.__name__}({parameter}): a model passes arguments by name; name each one"
            )
        if name not in hints:
            raise TypeError(
                f"{function.__name__}({name}): has no annotation to derive a schema from; add one"
            )
        is_required = parameter.default is inspect.Parameter.empty
        fields[name] = hints[name] if is_required else NotRequired[hints[name]]
    # mypy knows the functional form with literals only.
    make: Any = TypedDict
    arguments = make(function.__name__, fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")
    return TypeAdapter(arguments)


def requested_call(tools: Mapping[str, PythonTool], call: Mapping[str, Any]) -> Callable[[], Any]:
    """The function call that a model requests, not yet made.

    A call of an unknown function or with invalid arguments returns a message for the model instead, which can
    then correct itself.
    """
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if name not in tools:
        return partial(str, f"error: there is no function {name!r}; choose from {', '.join(sorted(tools))}")
    try:
        given = tools[name].arguments.validate_json(arguments or "{}")
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        told = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in problems)
        return partial(str, f"error: {told}")
    return partial(tools[name].function, **given)


def as_content(result: object) -> str:
    """The content of a tool message: a string as it is, anything else as JSON."""
    return result if isinstance(result, str) else to_json(result).decode()
