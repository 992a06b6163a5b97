"""Generator of docs/commands.md from the table of commands: every command with its arguments and options."""

from typing import Any

import typer

from numflow.cli.app import app
from numflow.cli.help import COMMANDS, options_by_heading

_INTRO = """# Commands

Every command and option, as `numflow COMMAND --help` shows them.
(This page is written by `python -m numflow.cli.reference > docs/commands.md`.)

"""


def markdown() -> str:
    """The whole page."""
    group: Any = typer.main.get_command(app)
    context = group.context_class(group, info_name="numflow", **group.context_settings)
    named = [name for names in COMMANDS.values() for name in names]
    names = sorted(group.commands, key=lambda name: named.index(name) if name in named else len(named))
    lines = [_INTRO + ", ".join(f"[{name}](#numflow-{name})" for name in names) + ".", ""]
    for name in names:
        command = group.commands[name]
        lines += _page(f"numflow {name}", command, command.context_class(command, info_name=name, parent=context))
    return "\n".join(lines)


def _page(title: str, command, context) -> list[str]:
    subcommands = getattr(command, "commands", {})
    lines = [f"## {title}", "", _paragraphs(command.help or ""), ""]
    rows = [(heading, *row) for heading, found in options_by_heading(command, context).items() for row in found]
    if rows:
        lines += ["| option | meaning |", "|---|---|"]
        last = None
        for heading, flags, meaning in rows:
            if heading != last and heading not in ("Arguments", "Options"):
                lines.append(f"| **{heading}** | |")
            last = heading
            lines.append(f"| `{_cell(flags)}` | {_cell(' '.join(meaning.split()))} |")
        lines.append("")
    for name, sub in subcommands.items():
        lines += _page(f"{title} {name}", sub, sub.context_class(sub, info_name=name, parent=context))
    return lines


def _paragraphs(text: str) -> str:
    """A command's help in one line, followed by its examples as a code block."""
    plain, mark, examples = text.partition("\b\n")
    found = " ".join(plain.split())
    if not mark:
        return found
    title, *lines = examples.rstrip().split("\n")
    return "\n".join([found, "", title, "", "```sh", *(line.strip() for line in lines), "```"])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(markdown(), end="")
