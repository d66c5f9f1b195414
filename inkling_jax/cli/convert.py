"""Write a checkpoint again in another layout, tensor by tensor; the values stay the same bits."""

import argparse
from pathlib import Path

from inkling_jax.checkpoint import convert, resolve

HELP = "write a checkpoint in another layout"
EXAMPLES = """\
examples:
  inkling-jax convert nano ./nano-hf --layout transformers
  inkling-jax convert ./Inkling-Small-hf ./Inkling-Small --layout original
  inkling-jax convert ./Inkling-Small ./Inkling-Small-orbax --layout orbax

The destination must be new or empty. Vision and audio tensors are converted too; so is the config.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help='a directory, a hub id, or "nano"')
    parser.add_argument("dst", metavar="DST", type=Path, help="the directory to write")
    parser.add_argument(
        "--layout",
        required=True,
        choices=("original", "transformers", "orbax"),
        help="original: the names of the published checkpoints; transformers: those of the library; orbax: JAX's own",
    )


def run(arguments: argparse.Namespace) -> int:
    convert(resolve(arguments.src), arguments.dst, arguments.layout, progress=True)
    files = [file for file in arguments.dst.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    print(f"wrote {arguments.dst}: {arguments.layout} layout, {len(files)} files, {size / 1e9:.3g} GB")
    return 0
