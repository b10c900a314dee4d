"""One pass of the scheduler: from all live sequences to the next step's chunks and the fetches to begin.

Owns the choice and its consequences on phases and block tables (beginning, growing, preempting); lives for one pass, and knows no
request's end. Invariant: whoever is preempted has a lesser claim than the one it makes room for, so the best claim always proceeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actors.engine.interface import FetchPlan
from actors.engine.ordering import Standing, Work, chunk_length, prefill_budget, standing, worthwhile_tokens
from actors.engine.sequence import Event, Phase, Sequence
from actors.engine.tables import Begun, BlockTables
from cpd_ray.config import EngineConfig
from cpd_ray.ids import RequestId
from cpd_ray.messages import StepCost


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute the next `tokens` of `sequence` in this step."""

    sequence: Sequence
    tokens: int


class SchedulingPass:
    """`live` by id, in order of arrival: those whose owner still waits."""

    def __init__(
        self, live: Mapping[RequestId, Sequence], tables: BlockTables, config: EngineConfig, cost: StepCost, now_s: float
    ) -> None:
        self._live = live
        self._tables = tables
        self._config = config
        self._cost = cost
        self._now_s = now_s
        self._standings: dict[RequestId, Standing] = {}
        self._preempted: set[RequestId] = set()
        self._fetches: list[FetchPlan] = []
        self._active = sum(1 for s in live.values() if s.phase is Phase.RUNNING or s.phase is Phase.FETCHING)
        self._room = True

    def run(self) -> tuple[list[Chunk], list[FetchPlan]]:
        """The step's chunks, sequences with one token to compute first, and the fetches to begin."""
        self._inherit()
        decodes = self._decodes()
        chunks = [Chunk(sequence, 1) for sequence in decodes] + self._prefills(len(decodes))
        chunks.sort(key=lambda chunk: chunk.sequence.remaining > 1)
        return chunks, self._fetches

    def fetches_beside_a_step(self) -> list[FetchPlan]:
        """The fetches to begin while a step is in flight: nobody is preempted, as the step may write to anyone's blocks, and whoever is
        better placed and fetches nothing finds its room when the step has ended."""
        self._inherit()
        promised = 0
        for sequence in sorted((s for s in self._live.values() if self._waits(s)), key=self._standing):
            if not self._tables.wants_fetch(sequence):
                promised += self._tables.missing(sequence)
                continue
            if self._active >= self._config.max_running:
                break
            begun, _ = self._tables.begin(sequence, spare=self._active + promised)
            if begun is Begun.NO_ROOM:
                break
            self._book(sequence, begun)
        return self._fetches

    # -- the order ---------------------------------------------------------------------------------------------------

    def _standing(self, sequence: Sequence) -> Standing:
        known = self._standings.get(sequence.id)
        if known is None:
            known = self._standings[sequence.id] = standing(
                self._work(sequence), sequence.arrival_s, sequence.request.priority, sequence.serial, self._config, self._cost
            )
        return known

    def _claim(self, sequence: Sequence) -> Standing:
        """Its right to blocks: never worse than the standing with which it got them. Else a sequence that finds less cached than it hoped
        would lose its blocks to one that hopes, which finds no more, and so on for ever."""
        standing_now = self._standing(sequence)
        return standing_now if sequence.claim is None else min(sequence.claim, standing_now)

    def _work(self, sequence: Sequence) -> Work:
        if sequence.phase is not Phase.WAITING:
            # a decode has no prompt to compute; its context must not put it behind later ones
            return Work(sequence.known if sequence.remaining == 1 else sequence.computed, sequence.known)
        spared = max(sequence.expected, self._tables.may_fetch(sequence))
        return Work(spared * self._tables.block_size, sequence.known)

    def _inherit(self) -> None:
        """Whoever computes what others wait for stands where the best-placed of them does."""
        for sequence in self._live.values():
            if sequence.phase is not Phase.WAITING or sequence.joined <= sequence.expected:
                continue
            owner = self._tables.leader(sequence)
            if owner is None:
                sequence.joined = sequence.expected
                continue
            leader = self._live.get(owner)
            if leader is not None and leader is not sequence:
                self._standings[leader.id] = min(self._standing(leader), self._standing(sequence))

    # -- decodes -----------------------------------------------------------------------------------------------------

    def _decodes(self) -> list[Sequence]:
        """Every running sequence with one token to compute, as far as there are blocks for it."""
        size = self._tables.block_size
        decodes = [s for s in self._live.values() if s.phase is Phase.RUNNING and s.remaining == 1]
        growing = [s for s in decodes if s.known > len(s.blocks) * size]
        if len(growing) <= self._tables.pool.available():
            for sequence in growing:
                self._tables.grow(sequence)
            return decodes
        ready = []
        for sequence in sorted(decodes, key=self._claim):
            if sequence.phase is not Phase.RUNNING:
                continue  # made room for a better-placed one
            if self._tables.grow(sequence) or (self._make_room(1, sequence, decodes_too=True) and self._tables.grow(sequence)):
                ready.append(sequence)
        return ready

    # -- prompts -----------------------------------------------------------------------------------------------------

    def _prefills(self, decodes: int) -> list[Chunk]:
        budget = prefill_budget(self._config, self._tables.block_size, decodes, alone=len(self._live) == 1)
        contenders = sorted((s for s in self._live.values() if self._contends(s)), key=self._standing)
        chunks: list[Chunk] = []
        finishing = 0
        for place, sequence in enumerate(contenders):
            if sequence.phase is Phase.WAITING:
                self._admit(sequence, budget)
            if sequence.phase is not Phase.RUNNING:
                continue
            worth = worthwhile_tokens(self._cost, sequence.computed, finishing, len(contenders) - place)
            limit = budget if worth is None else min(budget, worth)
            length = chunk_length(Work(sequence.computed, sequence.known), limit, self._tables.block_size)
            if length <= 0:
                budget = 0  # nobody behind it computes what it may not, be it ever so little
                continue
            chunks.append(Chunk(sequence, length))
            budget -= length
            finishing += length == sequence.remaining
        return chunks

    def _contends(self, sequence: Sequence) -> bool:
        if sequence.phase is Phase.WAITING:
            return self._waits(sequence) and sequence.id not in self._preempted
        return sequence.phase is Phase.RUNNING and sequence.remaining > 1

    @staticmethod
    def _waits(sequence: Sequence) -> bool:
        """It holds nothing, and nobody else computes for it."""
        return sequence.phase is Phase.WAITING and sequence.joined <= sequence.expected

    def _admit(self, sequence: Sequence, budget: int) -> None:
        """Begin a waiting sequence if it can compute or fetch now. Once one lacks blocks, none behind it may begin: they would take
        what it waits for."""
        if sequence.id in self._preempted or not self._room or (budget <= 0 and not self._tables.wants_fetch(sequence)):
            return
        if self._active >= self._config.max_running:
            self._room = False
            return
        # each sequence in the batch may need a block soon: beginning on the last ones would only get it preempted
        begun, needed = self._tables.begin(sequence, spare=self._active)
        while begun is Begun.NO_ROOM and self._make_room(needed, sequence, decodes_too=False):
            begun, needed = self._tables.begin(sequence, spare=self._active)
        self._room = begun is not Begun.NO_ROOM
        self._book(sequence, begun)

    def _book(self, sequence: Sequence, begun: Begun) -> None:
        if begun is Begun.READY or begun is Begun.FETCHING:
            sequence.claim = self._standing(sequence)
            sequence.move(Event.RUN if begun is Begun.READY else Event.FETCH, self._now_s)
            self._active += 1
            if sequence.fetch is not None:
                self._fetches.append(sequence.fetch)

    # -- room --------------------------------------------------------------------------------------------------------

    def _make_room(self, needed: int, sequence: Sequence, *, decodes_too: bool) -> bool:
        """Preempt from the back, only sequences with a lesser claim than `sequence`, until `needed` blocks are available. False, having
        preempted nobody, when even all of them would not do."""
        available = self._tables.pool.available
        behind = [
            s
            for s in self._live.values()
            if s.phase is Phase.RUNNING and (decodes_too or s.remaining > 1) and self._claim(s) > self._claim(sequence)
        ]
        if not behind or available() + sum(len(s.blocks) for s in behind) < needed:
            return False
        for victim in sorted(behind, key=self._claim, reverse=True):
            self._preempt(victim)
            if available() >= needed:
                break
        return True

    def _preempt(self, victim: Sequence) -> None:
        self._tables.drop(victim)
        victim.move(Event.PREEMPT, self._now_s)
        victim.claim = None
        victim.preemptions += 1
        self._preempted.add(victim.id)
        self._active -= 1
        self._tables.look(victim)
