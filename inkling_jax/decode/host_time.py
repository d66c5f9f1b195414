"""`python -m inkling_jax.decode.host_time`: what calling the decoding loop costs the host, on a toy as deep as Inkling.

The call is asked for no round at all: it checks and passes the same 2,000 arrays as any other, and on a machine whose
CPU is also the device nothing else is measured. A call may run many rounds, so this bounds the cost of a single one.
The toy is narrow, since widths cost the host nothing; compiling its 66 layers takes a minute or two all the same.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from ..config import InklingConfig
from ..nn import abstract_parameters
from .engine import Engine
from .request import Request

TOY = InklingConfig(
    hidden_size=8,
    num_layers=66,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    local_num_heads=2,
    local_num_kv_heads=1,
    local_head_dim=4,
    window=8,
    rel_dim=2,
    rel_extent=16,
    local_layers=tuple(i for i in range(66) if i % 6 != 5),
    dense_layers=(0, 1),
    dense_size=8,
    expert_size=4,
    num_experts=4,
    num_shared_experts=2,
    experts_per_token=2,
    route_scale=8.0,
    vocab_size=32,
    real_vocab_size=32,
    logits_divisor=24.0,
    norm_eps=1e-6,
    log_scaling_floor=128,
    log_scaling_alpha=0.1,
    conv_width=4,
    max_context=4096,
    eos_token_ids=(),
    mtp_depths=8,
    mtp_local=(0, 2, 4, 5, 6, 7),
    chain_norm=False,
)


def measure(drafts: int, calls: int) -> tuple[list[float], list[float], int, int]:
    """Seconds that pass in each call, and CPU seconds of its thread; arrays of the parameters, and of the state."""
    params = {path: jnp.zeros(spec.shape, spec.dtype) for path, spec in abstract_parameters(TOY).items()}
    engine = Engine(TOY, params, "bfloat16")
    request = Request(
        [1], 64, temperature=0.0, top_k=TOY.real_vocab_size, top_p=1.0, seed=0, stop_ids=(), stop_texts=()
    )
    state, settings = engine.start([request], drafts)
    rounds, passed, busy = jnp.int32(0), [], []
    for _ in range(calls + 3):  # the first compiles, two more warm up
        jax.block_until_ready(state)
        clocks = time.perf_counter(), time.thread_time()
        state = engine.decode(engine.leaves, state, settings, rounds, drafts=drafts)
        passed.append(time.perf_counter() - clocks[0])
        busy.append(time.thread_time() - clocks[1])
    return passed[3:], busy[3:], len(engine.leaves), len(jax.tree.leaves(state))


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of calling the decoding loop of a 66-layer toy.")
    parser.add_argument("--draft-tokens", type=int, default=4, choices=range(TOY.mtp_depths + 1), metavar="0..8")
    parser.add_argument("--calls", type=int, default=50)
    arguments = parser.parse_args()
    if arguments.calls < 1:
        parser.error(f"argument --calls: {arguments.calls} is less than 1")
    passed, busy, parameters, state = measure(arguments.draft_tokens, arguments.calls)
    print(
        f"{1e3 * statistics.median(passed):.2f} ms a call, {1e3 * statistics.median(busy):.2f} ms of them busy "
        f"(medians of {arguments.calls}); {parameters} parameter arrays, {state} state arrays, "
        f"{arguments.draft_tokens} drafts; jax {jax.__version__}, {jax.devices()[0].device_kind}"
    )


if __name__ == "__main__":
    main()
