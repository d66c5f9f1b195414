"""Write a checkpoint with its routed experts in 4 bits, 0.28 (nvfp4) or 0.27 (mxfp4) of their size in bf16.

nvfp4: blocks of 16 weights, each with a float8 scale that is searched to make the error least, and a scale an expert;
relative error 8 % on Gaussian weights. mxfp4: blocks of 32 with the better of two powers of two; 11 %, and 6 % smaller.
The first layer with routed experts, shared experts, attention and everything else stay as they are.
"""

import argparse
import sys
from pathlib import Path

from inkling_jax.checkpoint import inspect, quantize
from inkling_jax.quantization import FORMATS

from .units import in_bytes

HELP = "write a checkpoint with its routed experts in 4 bits"
EXAMPLES = """\
examples:
  inkling-jax quantize nano ./nano-nvfp4 --format nvfp4
  inkling-jax quantize ./Inkling-Small ./Inkling-Small-mxfp4 --format mxfp4
  inkling-jax inspect ./Inkling-Small-mxfp4              which layers, and the size saved
  inkling-jax generate --model ./nano-nvfp4 --prompt "import"

The destination must be new or empty, and appears when it is complete. If the command is stopped, or killed, the same
command goes on from the last finished file; until then the files are in .DST-unfinished, beside the destination.
Works expert by expert: memory for one expert, or for the largest of the other tensors. Uses the GPU if there is one.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help='a directory, a hub id, or "nano": bf16, f16 or f32, either layout')
    parser.add_argument("dst", metavar="DST", type=Path, help="the directory to write, in the original layout")
    parser.add_argument(
        "--format", required=True, choices=FORMATS, help="nvfp4: more exact; mxfp4: a little smaller, for AMD too"
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        quantization = quantize(arguments.src, arguments.dst, arguments.format, progress=True)
    except KeyboardInterrupt:
        print("\nthe same command goes on from the last finished file", file=sys.stderr)
        raise
    found = inspect(arguments.dst)
    size, layers = found.total.bytes, quantization.layers
    print(
        f"wrote {arguments.dst}: experts of {len(layers)} layers in {quantization.format}, {in_bytes(size)}, "
        f"{in_bytes(found.saved)} less than {in_bytes(size + found.saved)} in bf16"
    )
    return 0
