"""The command line: one file a command. Knows everything below it; nothing imports it.

A user's mistake is one line on standard error and exit code 2; `KVKEEP_DEBUG=1` shows the traceback instead.
"""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated, NoReturn

import typer

from kvkeep.cli import benchmark, chat, demo, evaluate, generate, models, policies, serve, train
from kvkeep.evaluation.evaluate import version

app = typer.Typer(
    name="kvkeep",
    help="Hold a language model's KV cache to a fixed budget and keep what later queries will attend to.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (generate, chat, train, evaluate, benchmark, policies, models, demo):
    app.command(command.__name__.rpartition(".")[2])(command.run)
app.command("serve", context_settings=serve.CONTEXT)(serve.run)

USER_MISTAKES = (ValueError, OSError, NotImplementedError)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    """Hold a language model's KV cache to a fixed budget and keep what later queries will attend to."""
    if show_version:
        typer.echo(f"kvkeep {version()}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0 well, 1 a fault of ours, 2 a user's mistake, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["kvkeep", *arguments])  # the context's object: what checkpoints record as their command
    try:
        code = app(arguments, prog_name="kvkeep", standalone_mode=False, obj=command)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:  # the last stop before the user
        if os.environ.get("KVKEEP_DEBUG") == "1":
            raise
        code = explain(error)
    sys.exit(code if isinstance(code, int) else 0)


def explain(error: Exception) -> int:
    """Prints an error as one line and returns the exit code that it deserves."""
    if hasattr(error, "format_message"):  # of the option parser: it names the option
        text, code = error.format_message(), 2
    elif isinstance(error, FileNotFoundError) and error.filename:
        text, code = f"there is no file {str(error.filename)!r}", 2
    elif isinstance(error, USER_MISTAKES):
        text, code = str(error), 2
    else:
        text, code = f"a fault in kvkeep: {type(error).__name__}: {error} (KVKEEP_DEBUG=1 shows where)", 1
    print("kvkeep:", " ".join(text.split()) or type(error).__name__, file=sys.stderr)
    return code
