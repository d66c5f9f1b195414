"""One row of the benchmark: what is run, how often, and what is made of its times."""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..compilation import announce
from ..decode.engine import Engine
from ..decode.request import Request, make_requests
from ..decode.session import Session
from ..decode.state import DecodeState, Settings
from ..quantization import Quantization
from .routing import EXTRA_ROUNDS, routing
from .traffic import decode_bytes, prefill_bytes, prefill_flops, uniform_hits
from .weights import fill

Row = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How long everything is measured: `windows` timings, each of one call that runs `rounds` rounds.

    `profile` is where traces go, if anywhere. The last three say how tokens are chosen, as in `generate`.
    """

    rounds: int
    windows: int
    seed: int
    profile: Path | None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def new_tokens(self, drafts: int) -> int:
        """Room for a window, or for the extra rounds, in which everything is accepted."""
        return max(self.rounds, EXTRA_ROUNDS) * (drafts + 1)

    def trace(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext() if self.profile is None else jax.profiler.trace(str(self.profile / name))


@dataclass
class Hits:
    """Experts hit a layer by (sequences, drafts), measured once for each: the context hardly changes them."""

    wanted: bool
    known: dict[tuple[int, int], list[float]]

    def look(self, engine: Engine, state: DecodeState, settings: Settings, sequences: int, drafts: int) -> str | None:
        """Measures what is not known yet, and consumes the state. A failure is told and costs no figure."""
        if not self.wanted or (sequences, drafts) in self.known:
            return None
        try:
            with announce("a round that notes where its rows are routed"):
                self.known[sequences, drafts] = routing(engine, state, settings, drafts)
        except Exception as error:
            return f"the routing could not be measured: {type(error).__name__}: {error}"
        return None


def decode(engine: Engine, rate: float, effort: Effort, hits: Hits, sequences: int, context: int, drafts: int) -> Row:
    """A round of `sequences` sequences of `context` tokens: milliseconds, tokens, bytes, and what is hit."""
    rows = -(-sequences // engine.groups) * (drafts + 1)  # of a device
    state, settings = occupied(engine, effort, sequences, context, drafts)
    reset = _resetting(engine, state)
    with announce(f"the decoding loop, {sequences} x {context}, {drafts} drafts") as watch:
        state = run_rounds(engine, state, settings, 2, drafts)
    times, added = [], 0
    for _ in range(effort.windows):
        state = jax.block_until_ready(reset(state))
        before = np.asarray(state.rounds)
        begin = time.perf_counter()
        state = run_rounds(engine, state, settings, effort.rounds, drafts)
        times.append(time.perf_counter() - begin)
        added += _check(state, before, sequences, context, effort.rounds)
    memory = {"cache_bytes": cache_bytes(engine, effort, sequences, context, drafts), **device_memory(engine)}
    if effort.profile is not None:
        with effort.trace(f"decode-{sequences}x{context}-{drafts}drafts"):
            state = run_rounds(engine, reset(state), settings, EXTRA_ROUNDS, drafts)
    warning = hits.look(engine, reset(state), settings, sequences, drafts)
    measured = hits.known.get((sequences, drafts))
    by_layer = _uniform(engine, rows) if measured is None else measured
    per_window = added / (effort.windows * sequences)  # tokens of a sequence
    length = context + (per_window - 1) / 2
    sizes = decode_bytes(engine.config, engine.dtype, sequences, length, drafts, by_layer, *spread(engine))
    seconds = statistics.median(times) / effort.rounds
    return {
        "ms": 1e3 * seconds,
        "ms_windows": [1e3 * t / effort.rounds for t in times],
        "tokens_per_round": per_window / effort.rounds,
        "tokens_per_second": sequences * per_window / effort.rounds / seconds,
        "compile_seconds": watch.seconds,
        "routing": {
            "measured": measured is not None,
            "rows": rows,
            "experts": engine.config.num_experts // (spread(engine)[0] or {}).get("expert", 1),
            "hit_by_layer": by_layer,
            "hit": statistics.fmean(by_layer) if by_layer else None,
            "hit_if_uniform": uniform_hits(engine.config, rows, spread(engine)[0]),
        },
        **_limit(sizes, rate, seconds),
        "memory": memory,
    } | ({"warning": warning} if warning else {})


def occupied(engine: Engine, effort: Effort, sequences: int, context: int, drafts: int) -> tuple[DecodeState, Settings]:
    """A batch in the middle of its answers: random tokens, and caches full of random rows in place of a prefill."""
    rng = np.random.default_rng(effort.seed)
    tokens = rng.integers(engine.config.real_vocab_size, size=(sequences, context)).tolist()
    requests = [_request(engine, effort, prompt, effort.new_tokens(drafts)) for prompt in tokens]
    state, settings = engine.start(requests, drafts)
    leaves, tree = jax.tree.flatten((state.cache.layers, state.cache.depths, state.hidden))
    seeds = rng.integers(2**32, size=len(leaves), dtype=np.uint32)
    filled = [fill(leaf, own, 1.0, where=leaf.sharding) for leaf, own in zip(leaves, seeds, strict=True)]
    layers, depths, hidden = tree.unflatten(filled)
    return replace(state, cache=replace(state.cache, layers=layers, depths=depths), hidden=hidden), settings


def run_rounds(engine: Engine, state: DecodeState, settings: Settings, rounds: int, drafts: int) -> DecodeState:
    """One call of the decoding loop, to its end."""
    state = engine.decode(engine.leaves, state, settings, np.int32(rounds), drafts=drafts)
    jax.block_until_ready(state.length)
    return state


def prefill(engine: Engine, rate: float, effort: Effort, tokens: int, drafts: int) -> Row:
    """A prompt of one token more, since its last one is left to the first round: `tokens` rows go through the model."""
    request = _request(engine, effort, _prompt(engine, effort, tokens + 1), 1)

    def run() -> tuple[float, float]:
        session = Session(engine, [request], drafts, None)
        found = session.statistics()
        return found.prefill_seconds, found.compile_seconds

    times, compiling = _repeat(run, effort, f"prefill-{tokens}")
    seconds = statistics.median(times)
    chunks = [size for _, size in engine.chunks(tokens, engine.groups)]
    return {
        "ms": 1e3 * seconds,
        "ms_windows": [1e3 * t for t in times],
        "tokens_per_second": tokens / seconds,
        "tflops": prefill_flops(engine.config, tokens) / seconds / 1e12,
        "chunks": chunks,
        "compile_seconds": compiling,
        **_limit(prefill_bytes(engine.config, engine.dtype, tokens, chunks, drafts, *spread(engine)), rate, seconds),
        "memory": device_memory(engine),
    }


def first_token(engine: Engine, rate: float, effort: Effort, tokens: int, drafts: int) -> Row:
    """From a prompt of `tokens` ids to its first new token on the host, with every program compiled already."""
    request = _request(engine, effort, _prompt(engine, effort, tokens), effort.new_tokens(drafts))

    def run() -> tuple[float, float]:
        begin = time.perf_counter()
        session = Session(engine, [request], drafts, None)
        session.advance(1)
        session.new_tokens(0)
        return time.perf_counter() - begin, session.statistics().compile_seconds

    times, compiling = _repeat(run, effort, f"first-token-{tokens}")
    seconds = statistics.median(times)
    hits = _uniform(engine, drafts + 1)
    sizes = decode_bytes(engine.config, engine.dtype, 1, tokens, drafts, hits, *spread(engine))
    if tokens > 1:
        chunks = [size for _, size in engine.chunks(tokens - 1, engine.groups)]
        read = prefill_bytes(engine.config, engine.dtype, tokens - 1, chunks, drafts, *spread(engine))
        sizes = {name: size + read.get(name, 0.0) for name, size in sizes.items()}
    return {
        "ms": 1e3 * seconds,
        "ms_windows": [1e3 * t for t in times],
        "compile_seconds": compiling,
        **_limit(sizes, rate, seconds),
        "memory": device_memory(engine),
    }


def spread(engine: Engine) -> tuple[dict[str, int] | None, Quantization | None]:
    """The sizes of the mesh, and the quantisation."""
    return None if engine.mesh is None else dict(engine.mesh.shape), engine.quantization


def device_memory(engine: Engine) -> dict[str, int]:
    """What a device holds now, and has held at most since the process began, of several the one that holds most.

    Nothing where devices are silent.
    """
    devices = jax.devices()[:1] if engine.mesh is None else engine.mesh.local_devices
    stats = [device.memory_stats() or {} for device in devices]
    names = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
    return {name: max(one[name] for one in stats) for name in names if all(name in one for one in stats)}


def cache_bytes(engine: Engine, effort: Effort, sequences: int, context: int, drafts: int) -> int:
    """Bytes on a device of the cache that a decode row allocates, padded batch, page buckets and all."""
    batch = engine.batch(sequences)
    rows = context + effort.new_tokens(drafts) + drafts + 1
    return engine.cache_bytes(engine.shape(np.where(np.arange(batch) < sequences, rows, 0), drafts))


def _repeat(run: Callable[[], tuple[float, float]], effort: Effort, name: str) -> tuple[list[float], float]:
    """Times of `run`, which gives seconds and the compiling in them, after a first call that compiles."""
    _, compiling = run()
    times = [run()[0] for _ in range(effort.windows)]
    if effort.profile is not None:
        with effort.trace(name):
            run()
    return times, compiling


def _request(engine: Engine, effort: Effort, tokens: list[int], new: int) -> Request:
    """No end token: random weights may choose one."""
    chosen = {name: getattr(effort, name) for name in ("temperature", "top_k", "top_p")}
    [request] = make_requests([tokens], engine.config, None, max_new_tokens=new, seed=0, stop=None, **chosen)
    return replace(request, stop_ids=())


def _prompt(engine: Engine, effort: Effort, tokens: int) -> list[int]:
    return np.random.default_rng(effort.seed).integers(engine.config.real_vocab_size, size=tokens).tolist()


def _resetting(engine: Engine, state: DecodeState) -> Callable[[DecodeState], DecodeState]:
    """Brings a state back to the lengths it has now; what its caches hold beyond them is written again."""
    length, status = np.array(state.length), np.array(state.status)
    return lambda state: replace(state, length=engine.place(length), status=engine.place(status))


def _check(state: DecodeState, before: np.ndarray, sequences: int, context: int, rounds: int) -> int:
    """Tokens that a window has added. Raises FloatingPointError where a sequence did not run all of its rounds."""
    if (np.asarray(state.rounds) - before)[:sequences].min() < rounds:
        raise FloatingPointError("the logits are not finite: a sequence ended before its rounds did")
    return int(np.asarray(state.length)[:sequences].sum()) - sequences * context


def _uniform(engine: Engine, rows: int) -> list[float]:
    mixtures = engine.config.num_layers - len(engine.config.dense_layers)
    return [uniform_hits(engine.config, rows, spread(engine)[0])] * mixtures


def _limit(sizes: dict[str, float], rate: float, seconds: float) -> Row:
    limit = sum(sizes.values()) / rate
    return {"bytes": sizes, "limit_ms": 1e3 * limit, "share": limit / seconds}
