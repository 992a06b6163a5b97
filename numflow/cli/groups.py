"""Groups of options. A command's parameter whose type is a group becomes one option per field of the group."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from numflow.cli import options
from numflow.cli.options import spelled
from numflow.cli.strategies import strategy
from numflow.engine.options import COMMANDS, SIZE, LoadOptions, changed, rows


@dataclass(frozen=True)
class Execution(LoadOptions):
    """Options of numflow.load, which every command that runs a model takes."""

    def arguments(self) -> dict[str, Any]:
        """Arguments of numflow.load that differ from their defaults."""
        return dict(changed(self))

    @property
    def compiles(self) -> bool:
        """Whether CPU kernels may have to be compiled."""
        return self.backend == "cpu" or bool(self.cpu_layers) or "cpu" in (self.devices or "").lower()


@dataclass(frozen=True)
class Given:
    """A group that hands a command only the options that were given, by name."""

    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingOptions:
    """Options of sampling and of speculative decoding."""

    temperature: options.Temperature = None
    top_k: options.TopK = None
    top_p: options.TopP = None
    min_p: options.MinP = None
    seed: options.Seed = None
    decoding: options.Decoding = None
    repetition_penalty: options.RepetitionPenalty = None
    set_: options.Set = None
    speculate: options.Speculate = None

    def settings(self, **more: Any) -> dict[str, Any]:
        """Settings of a generation: the given options of this group, and `more`.

        Raises:
            RequestError: as `strategy` raises.
        """
        given = dict(vars(self))
        return strategy(given.pop("set_"), decoding_alg=given.pop("decoding"), **given, **more)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, with one option for every field of a parameter whose type is a group."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: _options_of(kind) for name, kind in hints.items() if _group(kind)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        parameters += groups.get(parameter.name, [parameter.replace(annotation=hints[parameter.name])])

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, members in groups.items():
            values = {member.name: given.pop(member.name) for member in members}
            kind = _group(hints[name])
            given[name] = (kind(**values) if kind is not Given
                           else Given({key: value for key, value in values.items() if value is not None}))
        command(**given)

    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _group(kind: Any) -> type | None:
    """The group class of an annotation, None if it is no group. `Given` is annotated with the table of its fields."""
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return plain if is_dataclass(plain) else None


def _options_of(kind: Any) -> list[inspect.Parameter]:
    """A parameter for each option of a group."""
    if _group(kind) is Given:
        return [_parameter(row.name, None, Annotated[(str if facts.check is SIZE else row.type) | None,
                                                     spelled(facts, row.name, row.default, given=True)])
                for row, facts in get_args(kind)[1]]
    if issubclass(kind, LoadOptions):
        return [_parameter(row.name, row.default, Annotated[row.type, spelled(facts, row.name, row.default)])
                for row, facts in rows(LoadOptions, COMMANDS)]
    types = get_type_hints(kind, include_extras=True)
    return [_parameter(row.name, row.default, types[row.name]) for row in fields(kind)]


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)
