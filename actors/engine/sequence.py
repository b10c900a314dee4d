"""A request inside the engine: its phase, its tokens, the blocks that it holds, and where its time went.

Owns the lifecycle (`MOVES`) and the token buffer; decides nothing and knows no pool. Invariant: `computed < known` tokens while it
lives, and only a fetching, running or leaving sequence holds blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from actors.engine.cached import CachedMarks
from actors.engine.interface import EngineRequest, FetchPlan
from actors.engine.ordering import Standing
from cpd_ray.ids import BlockId, BlockKey, RequestId
from cpd_ray.tokens import TOKEN_BYTES
from kv import keys as kv_keys


class Phase(StrEnum):
    """`WAITING` holds no blocks (it is new, was preempted, or waits for another to compute its prefix). `FETCHING`: a transfer writes
    into its blocks. `RUNNING` is in the batch. `LEAVING`: its owner has left, while a step or a transfer may still write into its blocks."""

    WAITING = "waiting"
    FETCHING = "fetching"
    RUNNING = "running"
    LEAVING = "leaving"
    FINISHED = "finished"


class Event(StrEnum):
    """`FETCH` and `RUN`: it got its blocks, or its fetch has ended. `PREEMPT`: it lost them. `LEAVE`: its owner left while something
    writes. `END`: it is over, and holds nothing any more."""

    FETCH = "fetch"
    RUN = "run"
    PREEMPT = "preempt"
    LEAVE = "leave"
    END = "end"


def _moves(**to: Phase) -> Mapping[Event, Phase | None]:
    return MappingProxyType({event: to.get(event.value) for event in Event})


MOVES: Mapping[Phase, Mapping[Event, Phase | None]] = MappingProxyType(
    {
        Phase.WAITING: _moves(fetch=Phase.FETCHING, run=Phase.RUNNING, end=Phase.FINISHED),
        Phase.FETCHING: _moves(run=Phase.RUNNING, preempt=Phase.WAITING, leave=Phase.LEAVING, end=Phase.FINISHED),
        Phase.RUNNING: _moves(preempt=Phase.WAITING, leave=Phase.LEAVING, end=Phase.FINISHED),
        Phase.LEAVING: _moves(end=Phase.FINISHED),
        Phase.FINISHED: _moves(),
    }
)
"""Every phase names every event; None: the event can't happen there, and if it does the bug is ours."""

HOLDING = frozenset({Phase.FETCHING, Phase.RUNNING, Phase.LEAVING})
_PHASE_NAMES = {Phase.WAITING: "queue", Phase.FETCHING: "fetch", Phase.RUNNING: "compute"}


class Sequence:
    """`serial` breaks ties of arrival. `settled` leading blocks are committed; `fetchable` leading blocks may lie
    in a lower tier; `expected` ones are believed to be in the pool, `joined` ones to be there or being computed by another.
    `claim`: the standing with which it got its blocks."""

    __slots__ = (
        "_buffer",
        "_since_s",
        "_view",
        "arrival_s",
        "blocks",
        "cached",
        "claim",
        "computed",
        "computed_tokens",
        "expected",
        "fetch",
        "fetchable",
        "generated",
        "id",
        "joined",
        "keys",
        "known",
        "phase",
        "phases_s",
        "preemptions",
        "request",
        "serial",
        "settled",
    )

    def __init__(self, request: EngineRequest, now_s: float, serial: int) -> None:
        self.request = request
        self.id: RequestId = request.request_id
        self.arrival_s = now_s
        self.serial = serial
        self.phase = Phase.WAITING
        self.phases_s: dict[str, float] = {}
        self._since_s = now_s
        # room for the whole answer at once: a view of an array forbids that it grows
        grows = request.max_new_tokens if request.sample else 0
        self._buffer = array("I", bytes(request.tokens) + bytes(grows * TOKEN_BYTES))
        self._view = memoryview(self._buffer)
        self.known = len(self._buffer) - grows
        self.computed = 0
        self.generated = 0
        self.computed_tokens = 0
        self.preemptions = 0
        self.blocks: list[BlockId] = []
        self.keys: list[BlockKey] = list(request.keys)
        self.settled = 0
        self.claim: Standing | None = None
        self.fetchable = request.may_fetch_blocks
        self.fetch: FetchPlan | None = None
        self.expected = 0
        self.joined = 0
        self.cached = CachedMarks(self.known)

    def move(self, event: Event, now_s: float) -> None:
        """Enter the phase that `event` leads to, and book the time spent in the one left."""
        to = MOVES[self.phase][event]
        assert to is not None, f"{event} can't happen to request {self.id} while it is {self.phase}"
        if name := _PHASE_NAMES.get(self.phase):
            self.phases_s[name] = self.phases_s.get(name, 0.0) + now_s - self._since_s
        self._since_s = now_s
        self.phase = to

    def times_s(self, now_s: float) -> dict[str, float]:
        """Seconds by phase up to now, in order of first occurrence."""
        times = dict(self.phases_s)
        if name := _PHASE_NAMES.get(self.phase):
            times[name] = times.get(name, 0.0) + now_s - self._since_s
        return times

    @property
    def remaining(self) -> int:
        """Known tokens that have no KV yet."""
        return self.known - self.computed

    @property
    def output_index(self) -> int:
        """Position in the answer of the next token."""
        return self.known - self.request.prompt_tokens

    def tokens(self, start: int, stop: int) -> memoryview:
        """A view of the known tokens [start, stop)."""
        return self._view[start:stop]

    def append(self, token: int) -> None:
        """Know one more token."""
        self._buffer[self.known] = token
        self.known += 1
        self.generated += 1

    def key(self, block: int, block_size: int) -> BlockKey:
        """The key of one of its full blocks; a generated block's is computed when first asked for."""
        if block >= len(self.keys):
            self.name_blocks(block_size)
        return self.keys[block]

    def name_blocks(self, block_size: int) -> None:
        """Have a key for every full block of known tokens."""
        if len(self.keys) < self.known // block_size:
            tail = self._view[len(self.keys) * block_size : self.known]
            self.keys += kv_keys.block_keys(self.keys[-1] if self.keys else BlockKey(self.request.root), tail, block_size)

    def check(self, block_size: int) -> None:
        """Assert what holds between two steps."""
        held, needed = len(self.blocks), -(-self.known // block_size)
        assert 0 <= self.computed < self.known or self.phase is Phase.FINISHED, f"{self.id}: {self.computed} of {self.known}"
        assert bool(held) == (self.phase in HOLDING), f"{self.id} is {self.phase} and holds {held} blocks"
        assert held == len(set(self.blocks)), f"{self.id} has a block twice in its table"
        assert held <= needed and held * block_size >= self.computed, f"{self.id}: {held} blocks, {needed} needed"
        assert self.settled <= held and self.settled * block_size <= self.computed, f"{self.id}: {self.settled} blocks settled"
        assert (self.fetch is not None) <= (self.phase in (Phase.FETCHING, Phase.LEAVING)), f"{self.id}: a fetch while {self.phase}"
