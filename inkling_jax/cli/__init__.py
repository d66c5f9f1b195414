"""The `inkling-jax` command: a file per subcommand, and here what they share: the parser, errors, exit codes.

Exit codes: 0 done; 1 `doctor` found something broken, `inspect` tensors that do not fit, or a row of `bench` failed;
2 a wrong argument or a checkpoint that cannot be used; 130 interrupted.
"""

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

import jax

from inkling_jax import __version__

from . import bench, chat, convert, doctor, generate, inspect, quantize

BROKEN_PIPE, INTERRUPTED, WRONG_USE = 141, 130, 2

_EXAMPLES = """\
examples:
  inkling-jax generate --prompt "def mean(values):"      the bundled model completes Python
  inkling-jax chat --model ./Inkling-Small               talk with a published model
  inkling-jax generate --file prompt.txt --max-new-tokens 500 --temperature 0.7
  inkling-jax inspect ./Inkling-Small --batch 8 --context 32768
  inkling-jax inspect inkling                            a published size, without weights
  inkling-jax convert nano ./nano-hf --layout transformers
  inkling-jax quantize nano ./nano-nvfp4 --format nvfp4
  inkling-jax bench slice-8 --quick                      how fast is this machine?
  inkling-jax doctor                                     is this machine ready?

A model is a directory, an id on the Hugging Face hub, or "nano", which comes with the package.
inkling-jax COMMAND --help explains a command.
"""


class _Parser(argparse.ArgumentParser):
    """Ends on a wrong argument with one line instead of the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_USE, f"error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return its exit code."""
    arguments = _parser().parse_args(argv)
    if sys.stdout is None:
        print("error: standard output is closed", file=sys.stderr)
        return WRONG_USE
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return arguments.run(arguments)
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            _abandon_stdout()
            return BROKEN_PIPE
        except Exception as error:
            if arguments.traceback:
                traceback.print_exc()
            print(f"error: {_reason(error)}", file=sys.stderr)
            return WRONG_USE


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="inkling-jax",
        description="Generate text with Inkling models, and look after their checkpoints.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}, jax {jax.__version__}")
    common = _Parser(add_help=False)
    common.add_argument("--traceback", action="store_true", help="show where in the program an error arose")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (generate, chat, inspect, convert, quantize, bench, doctor):
        command = commands.add_parser(
            module.__name__.rpartition(".")[2],
            parents=[common],
            help=module.HELP,
            description=module.__doc__,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _reason(error: Exception) -> str:
    """What the user should read. A kind of error that nobody raises on purpose also says its name."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, ValueError | OSError | MemoryError | FloatingPointError | NotImplementedError):
        return text
    return f"{type(error).__name__}: {text} (--traceback shows where)"


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _abandon_stdout() -> None:
    """The reader has gone. What is still buffered must not fail again when Python exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
