"""Real requests before the first sample: does what the engine dumps agree with what was sent, and how far apart are two runs of it?

Tensor legend: S tokens, L stored layers, H hidden size.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_contracts.identity import StateDtype
from data_contracts.preflight import CanaryFigures
from drafter_data.checkpoints import Checkpoint
from drafter_data.claiming.proof import LogprobProof
from drafter_data.costs import CostModel
from drafter_data.embedded.llama import Llama
from drafter_data.engines.base import Engine, PrefillRequest
from drafter_data.errors import DumpMissing, EngineLost, InputError, PreflightRefused, RequestRefused, SampleError
from drafter_data.extraction.sample import check_reply
from drafter_data.safetensors_file import as_float32
from drafter_data.verification import (
    check_shape,
    check_token_ids,
    hash_and_check,
    relative_frobenius,
    states_distance,
)

TOLERANCE_FLOOR: dict[StateDtype, float] = {"F32": 1e-5, "F16": 5e-3, "BF16": 3e-2}
"""Relative distance (`states_distance`) that batching alone may cause: it changes the order of additions, and so bits."""
TOLERANCE_FACTOR = 4.0
REFERENCE_TOLERANCE = 2e-2
MOST_REFERENCE_BYTES = 2 << 30
PROMPT_TOKENS = 48
ATTEMPTS = 4
MOST_DUMP_SECONDS = 20.0
FIRST_ORDINARY_ID = 16
_LAYERS_BY = {
    "sglang": "start it with the command that `drafter-data engine sglang --print` prints",
    "vllm": "start it with the command that `drafter-data engine vllm --print` prints",
    "": "name the layers that it dumps (engine.layers, 0 = embeddings)",
}


def tokens_of_canary(longest: int) -> int:
    """Tokens that a canary sends at least: five short prompts, one of them cut, and the longest one."""
    short = min(PROMPT_TOKENS, longest)
    return 4 * short + short * 2 // 3 + longest


@dataclass(frozen=True)
class Answer:
    """`states_slh`: all of a short prompt's, of a longer one's the last row; there may be gigabytes of them. `answered_at` is
    monotonic.
    """

    states_slh: NDArray[np.float32]
    seconds: float
    proof_error: float | None
    answered_at: float
    dtype: str = "F32"


class Canary:
    """Sends canary prompts of seeded random ids and checks every dump as a sample's would be."""

    def __init__(self, engine: Engine, checkpoint: Checkpoint, *, dump_timeout_seconds: float, seed: int) -> None:
        self._engine = engine
        self._info = engine.describe()
        self._checkpoint = checkpoint
        self._timeout = min(dump_timeout_seconds, MOST_DUMP_SECONDS)
        self._random = random.Random(f"canary{seed}")  # noqa: S311 - a seeded choice
        self.sent: list[int] = []
        """Tokens of each request."""
        self.repeated: list[str] = []
        """Reasons of requests that had to be asked again."""
        try:
            self._proof = LogprobProof(checkpoint, self._info.identity.final_norm, self._info.identity.dtype)
        except InputError:
            self._proof = None

    def run(self, lengths: Sequence[int], longest: int, costs: CostModel) -> CanaryFigures:
        """One prompt twice and once cut short, two of one length at once, one prompt of each of `lengths` and of `longest` tokens.

        Feeds the cost model. Raises PreflightRefused, with what to change, when anything is not as sent.
        """
        short = min(PROMPT_TOKENS, longest)
        prompt = self.prompt(short)
        first, second = self.ask(prompt), self.ask(prompt)
        error = self._check_repeat(first, second)
        self._check_beginning(prompt, first)
        self._check_reference(prompt, first)
        self._pair(short)
        lengths_alone = sorted({*lengths, longest})
        alone = self.observe(lengths_alone, costs)
        proofs = [answer.proof_error for answer in (first, second, *alone) if answer.proof_error is not None]
        return CanaryFigures(
            requests=len(self.sent),
            longest_tokens=longest,
            repeat_error=error,
            tolerance=max(TOLERANCE_FLOOR[self._info.identity.dtype], TOLERANCE_FACTOR * error),
            proof_error=max(proofs) if proofs else None,
            tokens_per_second=sum(lengths_alone) / max(sum(answer.seconds for answer in alone), 1e-9),
        )

    def observe(self, lengths: Sequence[int], costs: CostModel) -> list[Answer]:
        """A prompt of each length, one at a time, and what each took told to the cost model."""
        answers = list[Answer]()
        for length in lengths:
            answers.append(answer := self.ask(self.prompt(length)))
            costs.observe(length, answer.seconds, 1)
        return answers

    def _check_repeat(self, first: Answer, second: Answer) -> float:
        """How far two runs of one prompt are apart."""
        error = states_distance(second, first)
        if error > 10 * TOLERANCE_FLOOR[self._info.identity.dtype]:
            raise PreflightRefused(
                f"one prompt sent twice gave states {error:.2e} apart (relative, worst layer): the engine's dumps are not its own; "
                "disable the radix cache (--disable-radix-cache) and check the capture",
                reason="canary-repeat-differs",
            )
        return error

    def _check_beginning(self, ids_s: NDArray[np.int64], whole: Answer) -> None:
        """A causal model gives the beginning of a prompt the same states whatever follows; mixed rows or axes do not."""
        cut = len(ids_s) * 2 // 3
        if cut == 0:
            return
        error = states_distance(self.ask(ids_s[:cut]), whole, of_beginning=True)
        if error > 10 * TOLERANCE_FLOOR[self._info.identity.dtype]:
            raise PreflightRefused(
                f"the first {cut} tokens of a prompt gave states {error:.2e} apart (relative, worst layer) with and without "
                "the rest: the dump's rows are not the tokens' (transposed, shifted or mixed); check the capture's layout",
                reason="canary-beginning-differs",
            )

    def _check_reference(self, ids_s: NDArray[np.int64], found: Answer) -> None:
        """Compares with a forward pass of our own, for models that the embedded engine computes and that are small enough.

        Nothing else than a reference can tell a layer from its neighbour; of larger models the layer ids are taken on trust.
        """
        identity = self._info.identity
        if sum(path.stat().st_size for path in self._checkpoint.weight_files()) > MOST_REFERENCE_BYTES:
            return
        try:
            model = Llama(self._checkpoint)
        except InputError:
            return
        expected_slh = model.forward(ids_s, identity.layers)
        if identity.final_norm == "post":
            expected_slh[:, -1] = model.final_norm(expected_slh[:, -1])
        errors = [relative_frobenius(found.states_slh[:, c], expected_slh[:, c]) for c in range(len(identity.layers))]
        if max(errors) > REFERENCE_TOLERANCE:
            layers = ", ".join(f"{layer} by {error:.2g}" for layer, error in zip(identity.layers, errors, strict=True))
            raise PreflightRefused(
                f"the dumped states differ from this model's own (relative Frobenius, layer {layers}): the engine captures other "
                f"layers, in another order, or serves another model: {_LAYERS_BY.get(self._info.kind, _LAYERS_BY[''])}",
                reason="canary-reference-differs",
            )

    def _pair(self, tokens: int) -> None:
        """Two different prompts of one length at once, where the engine's dumps allow it: each must get its own."""
        if self._info.lengths_must_differ or self._info.in_flight_limit < 2:
            return
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self.ask, [self.prompt(tokens), self.prompt(tokens)]))

    def prompt(self, tokens: int) -> NDArray[np.int64]:
        """Seeded random ids, int64 [tokens]."""
        highest = self._checkpoint.vocab_size
        return np.array(
            [self._random.randrange(min(FIRST_ORDINARY_ID, highest - 1), highest) for _ in range(tokens)], dtype=np.int64
        )

    def ask(self, ids_s: NDArray[np.int64]) -> Answer:
        """One prompt and its states. What went wrong once is asked for again, as a sample's would be."""
        attempts = ATTEMPTS
        while True:
            try:
                return self.ask_once(ids_s)
            except PreflightRefused as error:
                attempts -= 2 if isinstance(error.__cause__, DumpMissing) else 1  # each of those takes its whole time limit
                if attempts <= 0 or isinstance(error.__cause__, RequestRefused):
                    raise
                self.repeated.append(error.reason.removeprefix("canary-"))

    def ask_once(self, ids_s: NDArray[np.int64], slot: AbstractContextManager[object] | None = None) -> Answer:
        """The same, once; `slot` is held until the dump is claimed."""
        request = PrefillRequest(self._engine.new_request_id(), "canary", ids_s)
        label = f"canary prompt of {len(ids_s)} tokens"
        try:
            with slot or nullcontext():
                self.sent.append(len(ids_s))
                reply = self._engine.send(request)
                answered_at = time.monotonic()
                check_reply(request, reply)
                dump = self._engine.claim(request, reply, time.monotonic() + self._timeout)
            try:
                identity = self._info.identity
                expected_lh = (len(identity.layers), identity.hidden_size)
                check_shape(dump.states_slh, dump.dtype, len(ids_s), expected_lh, identity.dtype, label)
                check_token_ids(dump.token_ids_s, ids_s, label)
                hash_and_check(dump.states_slh, dump.dtype, xxhash.xxh3_128(), label)
                kept = slice(None) if len(ids_s) <= PROMPT_TOKENS else slice(-1, None)
                states_slh = np.array(as_float32(dump.states_slh[kept], dump.dtype))
            finally:
                self._engine.release(dump)
        except (SampleError, EngineLost) as error:
            self._engine.abandon(request)
            raise PreflightRefused(f"{label} failed: {error}", reason=f"canary-{error.reason}") from error
        proof_error = self._proof.error(states_slh[-1, -1], reply.top_logprobs) if self._proof else None
        if proof_error is not None and self._proof and proof_error > self._proof.tolerance:
            raise PreflightRefused(
                f"{label}: the dump's final state does not give the reply's log-probabilities (off by {proof_error:.3g} "
                f"nats, tolerance {self._proof.tolerance:.3g}): another model than {self._checkpoint.folder}, another norm, or "
                "another layer as the final one",
                reason="canary-proof-failed",
            )
        return Answer(states_slh, reply.seconds, proof_error, answered_at)
