"""`Inkling`: a loaded model as users hold it."""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels import Implementation
from pallas_kernels.fp4 import VALUES_A_WORD

from . import checkpoint
from .chat import ChatFormat, ChatStream, Messages, Reply
from .checkpoint import FileLayout
from .compilation import announce, enable_cache
from .config import InklingConfig
from .decode.engine import Engine, choose_implementation, chunk_sizes, make_chunks
from .decode.request import Prompt, as_array, is_single, make_requests, token_ids
from .decode.session import Completion, Session, Statistics
from .memory import check_memory
from .nn import abstract_parameters
from .processes import agreed, check_same
from .quantization import quantization_of
from .sharding import MeshLike, check_mesh, make_mesh, shardings
from .tokenizer import Tokenizer

DTYPES = ("bfloat16", "float32")
QUANTIZATIONS = ("keep", "none")
DEFAULT_DRAFTS = 4  # one sequence of nano on an H200: 9.7k, 11.5k, 13.4k tokens/s with 1, 2, 4 (docs/performance.md)
CHAT_TOKENS = 4096  # thinking comes first and may be long
# Rounds on the device between two looks of the host, or if they are more as many as take so many seconds.
LOOK = 32, 0.2  # Ctrl-C and stop texts wait for no more
PIECE = 4, 0.05  # of a stream, whose reader is waiting


class Generation(Sequence[Completion]):
    """The completions of a batch, in the order of its prompts, and its statistics as `stats`.

    Of a single prompt, `text`, `tokens`, `finish_reason`, `drafted` and `rejected` are there directly.
    """

    def __init__(self, completions: list[Completion], stats: Statistics):
        self.completions, self.stats = completions, stats

    @overload
    def __getitem__(self, index: int) -> Completion: ...
    @overload
    def __getitem__(self, index: slice) -> list[Completion]: ...
    def __getitem__(self, index: int | slice) -> Completion | list[Completion]:
        return self.completions[index]

    def __len__(self) -> int:
        return len(self.completions)

    def __repr__(self) -> str:
        return f"Generation({self.completions!r}, stats={self.stats!r})"

    def _only(self) -> Completion:
        if len(self.completions) != 1:
            raise ValueError(
                f"this generation holds {len(self.completions)} completions: index one, as in result[0].text"
            )
        return self.completions[0]

    @property
    def text(self) -> str | None:
        return self._only().text

    @property
    def tokens(self) -> list[int]:
        return self._only().tokens

    @property
    def finish_reason(self) -> str | None:
        return self._only().finish_reason

    @property
    def drafted(self) -> list[int]:
        return self._only().drafted

    @property
    def rejected(self) -> list[int | None]:
        return self._only().rejected


class Stream(Iterator[str]):
    """Text as it is made. Once it has ended, `stats` and `completion` tell the rest."""

    def __init__(self, session: Session):
        self._session, self._pieces = session, _pieces(session)

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def stats(self) -> Statistics:
        return self._session.statistics()

    @property
    def completion(self) -> Completion:
        """What has been made so far, or all of it once the stream has ended."""
        return self._session.completion(0)


def _pieces(session: Session) -> Iterator[str]:
    stops = session.requests[0].stop_texts
    shown = 0
    while not session.finished:
        session.advance(*PIECE)
        text = (session.completion(0).text or "") if session.finished else _settled(session.text(0), stops)
        if len(text) > shown:
            yield text[shown:]
            shown = len(text)


def _settled(text: str, stops: tuple[str, ...]) -> str:
    """A growing text less what may be the beginning of a stop text."""
    held = max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
    return text[: len(text) - held]


class Inkling:
    """A model: `config`, `tokenizer` (None where the checkpoint has none) and `params`, arrays by dotted path.

    Of routed experts in 4 bits, `params` has the words, the block scales and in NVFP4 the experts' scales, as
    `layers.3.mlp.experts.w13.codes`, `.scales` and `.expert_scale`; `quantization` says which layers have such.
    """

    def __init__(
        self,
        config: InklingConfig,
        params: Mapping[str, Array],
        tokenizer: Tokenizer | None = None,
        directory: Path | None = None,
        implementation: Implementation | None = None,
    ):
        """`implementation` as in `load`; on a mesh, or one device, as `params` are.

        Raises ValueError when `params` are not exactly those of `config`.
        """
        dtype = params["embed.weight"].dtype if "embed.weight" in params else jnp.dtype("bfloat16")
        self.quantization = quantization_of(params)
        _check_params(params, abstract_parameters(config, dtype, self.quantization))
        self.config, self.params, self.tokenizer, self.directory = config, dict(params), tokenizer, directory
        self._engine = Engine(config, self.params, dtype, implementation)

    def __repr__(self) -> str:
        size = sum(_weights_in(path, array) for path, array in self.params.items())
        config = self.config
        dtype = f"{self.dtype}, experts in {self.quantization.format}" if self.quantization else self.dtype
        return f"Inkling({size:,} parameters, {config.num_layers} layers, {config.mtp_depths} MTP depths, {dtype})"

    @property
    def dtype(self) -> str:
        return str(self._engine.dtype)

    @property
    def implementation(self) -> Implementation:
        """What decodes: "xla" is plain JAX; "triton" the kernels of `pallas_kernels`, "interpret" their interpreter."""
        return self._engine.implementation

    def logits(self, tokens: Any) -> Array:
        """Teacher-forced logits: ints [T] or [B, T] to float32 [.., T, real vocabulary].

        Raises ValueError for anything but integers inside the real vocabulary, or more of them than the context.
        """
        return self._teacher_forced(tokens, None)

    def mtp_logits(self, tokens: Any, depth: int) -> Array:
        """A depth's teacher-forced logits, float32 [.., T - depth - 1, real vocabulary].

        Row i is for token i + depth + 2.

        Raises ValueError as `logits` does, for a depth that the model lacks, and for fewer than depth + 2 tokens.
        """
        if isinstance(depth, bool) or not isinstance(depth, Integral) or not 0 <= depth < self.config.mtp_depths:
            raise ValueError(f"depth: expected 0 to {self.config.mtp_depths - 1}, found {depth!r}")
        return self._teacher_forced(tokens, int(depth))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int | Sequence[int] = 128,
        draft_tokens: int | None = None,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int | None] | None = None,
        top_p: float | Sequence[float | None] | None = None,
        seed: int | Sequence[int] = 0,
        stop: Any = None,
    ) -> Generation:
        """Continues a prompt, or each of a list of prompts of any lengths; a prompt is text or token ids.

        draft_tokens: MTP drafts a round, 0 to the number of depths; None picks. It changes the speed and not the
            output: greedy tokens are the same, sampled ones have the same distribution.
        temperature: 0 is greedy. top_k, top_p: restrict sampling, None for no restriction.
        seed: prompts with the same seed and text get the same tokens, whatever else is in the batch; give a list of
            seeds to make them differ.
        stop: text, a token id, or a list of them for all prompts; or one such list a prompt. The model's own end
            tokens always stop.
        Every setting but draft_tokens may be a list with one value a prompt.

        Raises ValueError naming the argument; MemoryError when the cache cannot fit; FloatingPointError at NaN logits.
        """
        arguments = (max_new_tokens, draft_tokens, temperature, top_k, top_p, seed, stop)
        session = self._session(prompts, *arguments)
        while not session.finished:
            session.advance(*LOOK)
        return Generation([session.completion(b) for b in range(len(session.requests))], session.statistics())

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        draft_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Any = None,
    ) -> Stream:
        """The text that follows one prompt, in pieces as it is made; arguments and errors as in `generate`.

        A piece never ends inside a character, nor inside what may become a stop text.
        """
        if not is_single(prompt):
            raise ValueError("stream takes one prompt; for a list of prompts use generate")
        if self.tokenizer is None:
            raise ValueError("stream yields text, but this checkpoint has no tokenizer.json: use generate")
        session = self._session(prompt, max_new_tokens, draft_tokens, temperature, top_k, top_p, seed, stop)
        return Stream(session)

    def chat(
        self,
        messages: Messages,
        max_new_tokens: int = CHAT_TOKENS,
        draft_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Any = None,
        *,
        effort: str | float = "high",
    ) -> Reply:
        """The reply of a chat model to a text, or to a conversation: [{"role": "user", "content": "..."}, ...].

        Roles are "system", "user" and "assistant", and the user has the last word; to go on, append `reply.message` and
        the next message of the user. Nothing in a message becomes a special token, however it is spelled.
        max_new_tokens: of thinking and answer together. stop: ends either; it is of one conversation.
        effort: how hard to think: "none", "minimal", "low", "medium", "high", "xhigh", "max", or a number from 0 to
        0.99. It is a request; a model may think at "none".
        The other arguments are those of `generate`, for one prompt.

        Raises as `generate`, and ValueError naming the message at fault, or the tokens that a model lacks which is not
        made for chat.
        """
        format = ChatFormat(self.tokenizer)
        arguments = (max_new_tokens, draft_tokens, temperature, top_k, top_p, seed, stop)
        session = self._session(format.encode(messages, effort), *arguments, ends=format.stop_ids)
        while not session.finished:
            session.advance(*LOOK)
        return format.reply(session.completion(0), session.statistics())

    def chat_stream(
        self,
        messages: Messages,
        max_new_tokens: int = CHAT_TOKENS,
        draft_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Any = None,
        *,
        effort: str | float = "high",
    ) -> ChatStream:
        """The reply in pieces as it is made, each with its kind, "thinking" or "text"; all else as in `chat`."""
        format = ChatFormat(self.tokenizer)
        arguments = (max_new_tokens, draft_tokens, temperature, top_k, top_p, seed, stop)
        session = self._session(format.encode(messages, effort), *arguments, ends=format.stop_ids)
        return ChatStream(format, session, _pieces(session))

    def _session(
        self,
        prompts: Any,
        max_new_tokens: Any,
        draft_tokens: int | None,
        temperature: Any,
        top_k: Any,
        top_p: Any,
        seed: Any,
        stop: Any,
        ends: tuple[int, ...] = (),
    ) -> Session:
        """`ends` are token ids that end every completion, besides the config's and those in `stop`."""
        depths = self.config.mtp_depths
        drafts = min(DEFAULT_DRAFTS, depths) if draft_tokens is None else draft_tokens
        with agreed(self._engine.shared, ValueError):
            if isinstance(drafts, bool) or not isinstance(drafts, Integral) or not 0 <= drafts <= depths:
                found = f"found {draft_tokens!r}"
                raise ValueError(f"draft_tokens: expected 0 to {depths}, the model's MTP depths, {found}")
            requests = make_requests(
                prompts,
                self.config,
                self.tokenizer,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                stop=stop,
            )
        if ends:
            requests = [replace(request, stop_ids=(*request.stop_ids, *ends)) for request in requests]
        return Session(self._engine, requests, int(drafts), self.tokenizer)

    def _teacher_forced(self, tokens: Any, depth: int | None) -> Array:
        with agreed(self._engine.shared, ValueError):
            ids = as_array(tokens, "tokens")
            rows = [token_ids(row, self.config, "tokens") for row in (ids if ids.ndim == 2 and ids.size else [ids])]
            batch, length = len(rows), len(rows[0])
            wanted = length if depth is None else length - depth - 1
            if depth is not None and wanted < 1:
                raise ValueError(f"tokens: {length} of them give depth {depth} no row; give at least {depth + 2}")
            if length > self.config.max_context:
                raise ValueError(f"tokens: {length} exceed the model's context of {self.config.max_context}")
        if self._engine.shared:
            check_same("tokens and depth", (rows, depth))
        depths = 0 if depth is None else depth + 1
        batch = -(-batch // self._engine.groups) * self._engine.groups  # padded with empty sequences
        needed = np.full(batch, length)
        shape = self._engine.shape(needed, depths)
        self._engine.check_memory(shape)
        cache = self._engine.cache(shape, needed)
        buffer = np.zeros((batch, shape.width * shape.page_size), np.int32)
        buffer[: len(rows), :length] = rows
        pieces = []
        # Logits of few rows at a time: with a large vocabulary they are what fills memory.
        for start, chunk in make_chunks(wanted, chunk_sizes("xla", batch // self._engine.groups)):
            with announce("the teacher-forced pass"):
                logits, cache = self._engine.teacher_forced(
                    self._engine.leaves,
                    cache,
                    self._engine.place(buffer),
                    self._engine.place(needed.astype(np.int32)),
                    np.int32(start),
                    chunk=chunk,
                    depth=depth,
                )
            pieces.append(logits[: len(rows), : wanted - start])
        found = jnp.concatenate(pieces, axis=1)
        return found if ids.ndim == 2 else found[0]


def _weights_in(path: str, array: Array) -> int:
    """How many weights of the model an array holds: of packed ones the words hold eight each and the scales none."""
    leaf = path.rpartition(".")[2]
    return 0 if leaf in ("scales", "expert_scale") else array.size * (VALUES_A_WORD if leaf == "codes" else 1)


def _check_params(params: Mapping[str, Array], expected: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    wrong = [f"{path}: missing" for path in expected if path not in params]
    wrong += [f"{path}: unexpected" for path in params if path not in expected]
    wrong += [
        f"{path}: expected {spec.dtype}{list(spec.shape)}, found {params[path].dtype}{list(params[path].shape)}"
        for path, spec in expected.items()
        if path in params and (params[path].shape, params[path].dtype) != (spec.shape, spec.dtype)
    ]
    if wrong:
        raise ValueError("the parameters do not fit the config:\n  " + "\n  ".join(wrong))


def load(
    path: str | os.PathLike[str],
    dtype: str = "bfloat16",
    progress: bool = True,
    quantization: str = "keep",
    implementation: Implementation | None = None,
    mesh: MeshLike = None,
) -> Inkling:
    """Loads a checkpoint: a directory, a hub id, or "nano" for the bundled model.

    dtype: "bfloat16" or "float32", of weights and activations. progress: a bar while weights stream in.
    quantization: "keep" leaves the experts of an NVFP4 or MXFP4 checkpoint in 4 bits, "none" turns them into `dtype`.
    implementation: what decodes. None takes the kernels ("triton") on an NVIDIA or AMD GPU and plain JAX ("xla")
    elsewhere; "interpret" runs the kernels in Pallas' interpreter on any machine, slowly, to check them.
    mesh: how many devices to spread over, as {"tensor": 2, "expert": 4}, or a `jax.sharding.Mesh` with such axes (see
    `inkling_jax.sharding`); every process reads the slices of its own devices. None is one device.
    Also turns on the persistent compilation cache (see `inkling_jax.compilation`).

    Raises `CheckpointError` (a ValueError) naming the file, tensor or field at fault, `NotImplementedError`
    where the asked implementation cannot run, ValueError for a mesh that this machine does not have or that does not
    divide the model, MemoryError, before weights are read, where they do not fit.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}")
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization: expected one of {', '.join(QUANTIZATIONS)}, found {quantization!r}")
    devices = None if mesh is None else make_mesh(mesh)
    enable_cache()
    several = devices is not None and devices.is_multi_process
    with agreed(several):
        config = InklingConfig.from_path(checkpoint.resolve(path, weights=False))
        choose_implementation(config, implementation)  # before anything large is fetched or read
        if devices is not None:
            check_mesh(config, devices)
        directory = checkpoint.resolve(path)
        tokenizer = Tokenizer.from_directory(directory)
        packed = checkpoint.find_quantization(directory, config) if quantization == "keep" else None
        abstract = abstract_parameters(config, dtype, packed)
        if devices is not None:
            where = shardings(config, devices, packed)
            abstract = {path: spec.update(sharding=where[path]) for path, spec in abstract.items()}
    with agreed(several, MemoryError):
        check_memory(config, dtype, packed, devices)
    params = checkpoint.load_parameters(directory, config, abstract, progress=progress)
    return Inkling(config, params, tokenizer, directory, implementation)


def save(model: Inkling, path: str | os.PathLike[str], layout: FileLayout = "original", progress: bool = True) -> None:
    """Writes a model with its config and tokenizer: as sharded safetensors with an index in either layout, or by Orbax.

    layout: "original", "transformers", or "orbax", which is the one for models on several processes; each of them calls
    this then. progress: a bar while it is written. The directory appears only when it is complete. Raises
    `CheckpointError` when it exists and is not empty.
    """
    options: dict[str, Any] = dict(layout=layout, tokenizer_dir=model.directory, progress=progress)
    checkpoint.save_checkpoint(Path(path), model.config, model.params, **options)


def save_async(model: Inkling, path: str | os.PathLike[str]) -> Future[None]:
    """Saves a model by Orbax in the background; `result()` of what is returned waits, and raises what went wrong.

    The model can be used meanwhile. Call `result()` before the program ends. Raises as `save` does.
    """
    return checkpoint.save_in_background(Path(path), model.config, model.params, tokenizer_dir=model.directory)
