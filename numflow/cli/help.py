"""Help texts in groups: headings over the commands, and over the options of a command with many options."""

import sys
from collections.abc import Iterable

from typer.core import TyperCommand, TyperGroup

# Headings of `numflow --help`. A command without a row is listed under the last heading.
COMMANDS = {
    "Write and talk": ("generate", "chat", "translate", "fill-mask", "embed", "rerank", "classify"),
    "Models": ("models", "pull", "rm", "inspect", "spec", "quantize", "verify", "imatrix", "cache"),
    "Serve": ("serve", "client", "ps", "bench-serve"),
    "Measure and plan": ("bench", "perplexity", "plan", "experiment", "warmup"),
    "Learn and look": ("learn", "doctor"),
}
# Headings of a command's options, by parameter name. An option without a row is listed first, under "Options".
OPTIONS = {
    "Model": ("model", "spec", "adapter", "draft", "offline"),
    "Sampling": ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "decoding", "repetition_penalty",
                 "set_", "stop_", "num_beams"),
    "Constraints": ("json_schema", "regex", "grammar"),
    "Speed and memory": ("threads", "activations", "weights", "imatrix", "calibration", "kv", "kv_k", "kv_v",
                         "state_type", "iq", "kv_memory", "context", "max_batch", "prefix_disk", "session_",
                         "host_embeddings", "host_kv_percent", "speculate"),
    "Listening": ("host", "port", "api_key", "allow_host", "log", "traces"),
    "Requests": ("tool_format", "overflow", "max_queue", "slot_save_path"),
    "Devices": ("backend", "devices", "cpu_layers", "transport", "collectives", "ray", "replicas"),
}
MANY = 15  # number of options from which on they are grouped


class Command(TyperCommand):
    """A command that shows its options in groups."""

    def format_options(self, ctx, formatter) -> None:
        for heading, rows in options_by_heading(self, ctx).items():
            _section(formatter, heading, rows)


def options_by_heading(command, ctx) -> dict[str, list[tuple[str, str]]]:
    """(flags, help) of a command's arguments and options by heading. Few options share the heading "Options"."""
    found: dict[str, list[tuple[str, str]]] = {heading: [] for heading in ("Arguments", "Options", *OPTIONS)}
    shown = [(param, row) for param in command.get_params(ctx) if (row := param.get_help_record(ctx)) is not None]
    many = sum(param.param_type_name == "option" for param, _ in shown) >= MANY
    headings = {name: heading for heading, names in OPTIONS.items() for name in names} if many else {}
    for param, row in shown:
        argument = param.param_type_name == "argument"
        found["Arguments" if argument else headings.get(param.name, "Options")].append(row)
    return {heading: rows for heading, rows in found.items() if rows}


class Commands(TyperGroup):
    """The list of commands in groups. Commands of other programs are accepted as aliases (`meant`)."""

    def resolve_command(self, ctx, args):
        if ctx.resilient_parsing and args == ["run"]:  # completion in the shell: a model's name follows, as in `pull`
            args = ["pull"]
        return super().resolve_command(ctx, meant(args, sys.stdin is not None and sys.stdin.isatty()))

    def format_commands(self, ctx, formatter) -> None:
        width = formatter.width - 6 - max(map(len, self.commands))
        rows = {name: (name, command.get_short_help_str(width)) for name, command in self.commands.items()}
        named = {name for names in COMMANDS.values() for name in names}
        *most, last = COMMANDS
        for heading in most:
            _section(formatter, heading, [rows[name] for name in COMMANDS[heading] if name in rows])
        _section(formatter, last, [row for name, row in rows.items() if name in COMMANDS[last] or name not in named])


def meant(args: list[str], terminal: bool) -> list[str]:
    """A command line with aliases replaced by numflow's commands.

    `list` is `models`, `show` is `inspect` and `bench serve` is `bench-serve`. `run MODEL` is `chat` at a terminal,
    and `generate` with a prompt or from a pipe. terminal: whether standard input is a terminal.
    """
    if args[:2] == ["bench", "serve"]:
        return ["bench-serve", *args[2:]]
    if args[0] == "run" and len(args) > 1 and not args[1].startswith("-"):
        chats = terminal and (len(args) == 2 or args[2].startswith("-"))
        return ["chat" if chats else "generate", "-m", *args[1:]]
    return [{"list": "models", "show": "inspect", "run": "chat"}.get(args[0], args[0]), *args[1:]]


def _section(formatter, heading: str, rows: Iterable[tuple[str, str]]) -> None:
    rows = list(rows)
    if rows:
        with formatter.section(heading):
            formatter.write_dl(rows)
