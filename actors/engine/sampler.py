"""From logits to tokens: penalties, truncation, the draw, log-probabilities. Row by row equal, whatever else is in the batch.

Owns the meaning of `SamplingParams` as far as single tokens go (ending an answer is the scheduler's). Invariant: a row's token is a
pure function of its logits, its sampling parameters, its history and (seed, output index).

Truncation never sorts the vocabulary: only values near the row's maximum can be in a nucleus, so those are picked by value, their
mass is checked, and only they are sorted. All values that tie at a border stay in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from actors.engine.plan import Sampled, SequenceStep
from actors.engine.randomness import gumbel, seed_of, stream, uniform
from cpd_ray.errors import CPDError, EngineFault, InvalidRequest
from cpd_ray.types import SamplingParams, TokenLogprobs

Row = npt.NDArray[np.float32]
_REACHES = (10.0, 20.0, math.inf)
"""How far below the maximum (in natural-log units) to look for candidates, each tried when the nearer one holds too little."""

_LEAST_TEMPERATURE = 1e-5
"""Below it a draw is the largest value, and dividing by it would overflow."""


class Sampler:
    """For one model. `eos_token_ids` are held back, with a request's own stop ids, until `min_tokens` are out."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self._eos = tuple(i for i in eos_token_ids if i < vocab_size)

    def sample(self, sequences: Sequence[SequenceStep], logits: torch.Tensor) -> list[Sampled]:
        """One `Sampled` a row of `logits` `[len(sequences), vocabulary]`. A faulty row carries its error."""
        if logits.device.type != "cpu":
            return self._sample_far(sequences, logits)
        rows: npt.NDArray[np.float32] = logits.float().numpy()
        best = rows.argmax(1)
        return [self._one(s, float(row[b]), int(b), row) for s, row, b in zip(sequences, rows, best, strict=True)]

    def _sample_far(self, sequences: Sequence[SequenceStep], logits: torch.Tensor) -> list[Sampled]:
        """On a device: greedy rows are settled there, and only the others' logits come over."""
        best = logits.argmax(-1)
        peaks: list[float] = logits.gather(-1, best[:, None])[:, 0].tolist()
        tokens: list[int] = best.tolist()
        wanted = [i for i, s in enumerate(sequences) if _needs_row(s)]
        rows = dict(zip(wanted, logits[wanted].float().cpu().numpy(), strict=True)) if wanted else {}
        return [self._one(s, peaks[i], tokens[i], rows.get(i)) for i, s in enumerate(sequences)]

    def _one(self, step: SequenceStep, peak: float, best: int, row: Row | None) -> Sampled:
        # argmax takes a NaN for the largest value (numpy's and torch's do), so the peak tells of any NaN in the row
        if not math.isfinite(peak):
            return Sampled(step.request_id, None, error=EngineFault("the model gave no finite logits for this request"))
        if row is None or not _needs_row(step):
            return Sampled(step.request_id, best)
        try:
            token = self._choose(step, row)
        except CPDError as error:
            return Sampled(step.request_id, None, error=error)
        wanted = step.sampling.logprobs
        return Sampled(step.request_id, token, logprobs=None if wanted is None else log_probabilities(row, token, wanted))

    def _choose(self, step: SequenceStep, row: Row) -> int:
        sampling = step.sampling
        values = self._processed(step, row)
        if _greedy(sampling):
            return int(values.argmax())
        seed = sampling.seed if sampling.seed is not None else seed_of(step.request_id)
        return draw(values / np.float32(sampling.temperature), sampling, stream(seed, step.output_index))

    def _processed(self, step: SequenceStep, row: Row) -> Row:
        """The row with bias, held-back ids and penalties applied; `row` itself stays as it is."""
        sampling = step.sampling
        values = row.copy() if _alters(step) else row
        if sampling.logit_bias:
            ids = np.array([i for i, _ in sampling.logit_bias], dtype=np.int64)
            if ids.max() >= self.vocab_size:
                raise InvalidRequest(f"logit_bias names a token outside the vocabulary of {self.vocab_size}", param="logit_bias")
            np.add.at(values, ids, np.array([b for _, b in sampling.logit_bias], dtype=np.float32))
        if step.output_index < sampling.min_tokens:
            held_back = [*self._eos, *(i for i in sampling.stop_token_ids if i < self.vocab_size)]
            values[held_back] = -np.inf
        if _penalises(sampling):
            _penalise(values, step)
        return values


def _greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature < _LEAST_TEMPERATURE or sampling.top_k == 1


def _penalises(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def _alters(step: SequenceStep) -> bool:
    sampling = step.sampling
    return bool(sampling.logit_bias) or step.output_index < sampling.min_tokens or _penalises(sampling)


def _needs_row(step: SequenceStep) -> bool:
    return not _greedy(step.sampling) or step.sampling.logprobs is not None or _alters(step)


def _penalise(values: Row, step: SequenceStep) -> None:
    """Repetition: over prompt and answer, dividing positive and multiplying negative logits. Presence and frequency: over the answer."""
    sampling = step.sampling
    history = np.frombuffer(step.history, np.uint32)
    known = history < len(values)
    if sampling.repetition_penalty != 1:
        seen = np.unique(history[known])
        at = values[seen]
        penalty = np.float32(sampling.repetition_penalty)
        values[seen] = np.where(at > 0, at / penalty, at * penalty)
    answer = history[step.prompt_tokens :][known[step.prompt_tokens :]]
    if answer.size and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = np.unique(answer, return_counts=True)
        values[ids] -= np.float32(sampling.presence_penalty) + np.float32(sampling.frequency_penalty) * counts.astype(np.float32)


def draw(values: Row, sampling: SamplingParams, start: int) -> int:
    """Draw a token id from softmax(`values`) (temperature already applied), cut by min-p, then top-k, then top-p."""
    peak = values.max()
    if not math.isfinite(peak):
        raise InvalidRequest("min_tokens holds back every token of the vocabulary", param="min_tokens")
    weights = np.exp(values - peak)
    total = float(weights.sum(dtype=np.float64))
    for reach in _REACHES:
        ids = np.flatnonzero(weights >= np.float32(math.exp(-reach)))
        near = weights[ids].astype(np.float64)
        if not _cuts(sampling):
            return _whole(values, ids, float(near.sum()) / total, start)
        border = _border(near, sampling, total, complete=len(ids) == len(values))
        if border is not None:
            return _largest(values, ids[near >= border], start)
    raise AssertionError("the whole vocabulary always suffices")


def _cuts(sampling: SamplingParams) -> bool:
    return sampling.min_p > 0 or sampling.top_k > 0 or sampling.top_p < 1


def _largest(values: Row, ids: npt.NDArray[np.int64], start: int) -> int:
    return int(ids[np.argmax(values[ids] + gumbel(start, ids))])


def _whole(values: Row, near: npt.NDArray[np.int64], share: float, start: int) -> int:
    """A draw without truncation: first whether it falls among the ids near the peak, which hold `share` of the mass; mostly it does."""
    if len(near) == len(values) or uniform(start, np.array([len(values)], dtype=np.int64))[0] < share:
        return _largest(values, near, start)
    far = np.ones(len(values), dtype=bool)
    far[near] = False
    return _largest(values, np.flatnonzero(far), start)


def _border(near: npt.NDArray[np.float64], sampling: SamplingParams, total: float, *, complete: bool) -> float | None:
    """The smallest weight that survives, the largest being 1. `near`: the candidates' weights; unless `complete`, lighter ones
    exist. None when one of those might survive too."""
    falling = np.sort(near)[::-1]
    mass, closed = total, complete
    if sampling.min_p > 0:
        closed = complete or falling[-1] < sampling.min_p
        falling = falling[falling >= sampling.min_p]
        if closed:
            mass = float(falling.sum())
    if sampling.top_k > 0 and (len(falling) >= sampling.top_k or closed):
        kth = falling[min(sampling.top_k, len(falling)) - 1]
        # ties with the k-th among the lighter ones can't be: they would be candidates too
        falling, closed = falling[falling >= kth], True
        mass = float(falling.sum())
    if sampling.top_p == 1 or (not closed and (sampling.min_p > 0 or sampling.top_k > 0)):
        return float(falling[-1]) if closed else None
    reached = np.cumsum(falling)
    last = int(np.searchsorted(reached, sampling.top_p * mass))
    if last < len(falling):
        return float(falling[last])
    # the sum may miss top_p by rounding alone, when nothing is left to add
    return float(falling[-1]) if closed else None


def log_probabilities(row: Row, token: int, top: int) -> TokenLogprobs:
    """Natural-log probabilities under softmax(`row`), the model's own distribution: the token's and the `top` likeliest ones'."""
    peak = row.max()
    normaliser = float(peak) + math.log(float(np.exp(row - peak).sum(dtype=np.float64)))
    if not top:
        return TokenLogprobs(float(row[token]) - normaliser)
    near = next(ids for reach in _REACHES if len(ids := np.flatnonzero(row >= peak - np.float32(reach))) >= min(top, len(row)))
    # lexsort: likeliest first, of equals the lowest id
    likeliest = near[np.lexsort((near, -row[near]))[:top]]
    return TokenLogprobs(float(row[token]) - normaliser, tuple((int(i), float(row[i]) - normaliser) for i in likeliest))
