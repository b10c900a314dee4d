"""The engine's bookkeeping: which requests live, what the next step computes, and what its result means for each of them.

Owns the sequences from `add` to their last output; no thread, no event loop, no torch: the engine and the simulator drive it alike,
`schedule` -> run -> `complete`, with `fetched` and `abort` at any time. The order is `ordering`'s, the blocks are `tables`'s.
Invariant: while a step or a transfer may write into a block, nobody else is given it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from actors.engine.books import check_tables, load_of
from actors.engine.interface import EngineLoad, EngineOutput, EngineRequest, FetchPlan, FetchResult
from actors.engine.plan import Sampled, SequenceStep, StepPlan, StepResult
from actors.engine.scheduling_pass import Chunk, SchedulingPass
from actors.engine.sequence import Event, Phase, Sequence
from actors.engine.stopping import finish_reason
from actors.engine.tables import BlockTables, CommittedSink
from actors.engine.validation import EngineShape, check_request
from cpd_ray.clock import Clock
from cpd_ray.config import EngineConfig
from cpd_ray.errors import CPDError, DuplicateRequest
from cpd_ray.ids import RequestId
from cpd_ray.messages import StepCost
from cpd_ray.types import FinishReason
from kv.pool import BlockPool


class CostModel(Protocol):
    """Where step times are learnt (`placement.cost_fit.StepCostFit`), or known (the simulator's hardware)."""

    @property
    def cost(self) -> StepCost: ...

    def observe(self, new_tokens: int, attention: float, sequences: int, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What to do now: run `step`, and begin `fetches` beside it. No step: nothing can be computed until a request or a fetch comes,
    or a lease ends."""

    step: StepPlan | None
    fetches: tuple[FetchPlan, ...]


class Scheduler:
    """`sink` is told of committed blocks while they are still held (`KvPort.committed`)."""

    def __init__(
        self, pool: BlockPool, shape: EngineShape, config: EngineConfig, clock: Clock, cost: CostModel, sink: CommittedSink
    ) -> None:
        self.pool = pool
        self.shape = shape
        self.config = config
        self._clock = clock
        self._cost = cost
        self._tables = BlockTables(pool, shape.block_size, sink)
        self._live: dict[RequestId, Sequence] = {}
        self._fetching: dict[int, tuple[FetchPlan, Sequence]] = {}
        self._step: StepPlan | None = None
        self._in_step: tuple[Sequence, ...] = ()
        self._serial = 0

    # -- what comes from outside -------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Take a request; raises DuplicateRequest, InvalidRequest, ContextLengthExceeded."""
        if request.request_id in self._live:
            raise DuplicateRequest(f"request {request.request_id!r} is in flight here", param="request_id")
        check_request(request, self.shape, self.pool.total_blocks)
        self._serial += 1
        sequence = Sequence(request, self._clock.now_s(), self._serial)
        self._tables.look(sequence)
        self._live[sequence.id] = sequence

    def abort(self, request_id: RequestId) -> EngineOutput | None:
        """End a request for its owner, whose last output this is; None when it is not live. Blocks that a step or a transfer may
        still write to are given up when that has ended."""
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return None
        output = self._output(sequence, finish=FinishReason.ABORT)
        if sequence.phase is Phase.FETCHING or sequence in self._in_step:
            sequence.move(Event.LEAVE, self._clock.now_s())
        else:
            self._let_go(sequence)
        return output

    def fetched(self, plan: FetchPlan, result: FetchResult) -> None:
        """A fetch has ended; what landed counts, what did not is computed."""
        sequence = self._fetching.pop(id(plan))[1]
        complete = self._tables.land(sequence, result)
        if sequence.phase is Phase.LEAVING:
            self._let_go(sequence)
        elif complete:
            sequence.move(Event.RUN, self._clock.now_s())
        else:
            self._tables.drop(sequence)
            sequence.claim = None
            sequence.move(Event.PREEMPT, self._clock.now_s())
            self._tables.look(sequence)

    def fetch_broke(self, plan: FetchPlan, error: CPDError) -> EngineOutput | None:
        """The port broke its promise not to raise: whether something still writes to the blocks is unknown, so they are never used again."""
        sequence = self._fetching.pop(id(plan))[1]
        lost = {*plan.blocks, *(() if plan.tail_block is None else (plan.tail_block,))}
        self.pool.quarantine([block for block in sequence.blocks if block in lost], lambda: False)
        sequence.blocks = [block for block in sequence.blocks if block not in lost]
        return self._finish(sequence, error=error)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def schedule(self) -> Scheduled:
        """The next step and the fetches to begin. The step is in flight until `complete` or `fail`."""
        assert self._step is None, "a step is in flight"
        self.pool.expire()
        self.pool.sweep()
        chunks, fetches = self._pass().run()
        self._remember(fetches)
        if chunks:
            self._step = StepPlan(tuple(map(_sequence_step, chunks)))
            self._in_step = tuple(chunk.sequence for chunk in chunks)
        return Scheduled(self._step, tuple(fetches))

    def fetch_beside(self) -> tuple[FetchPlan, ...]:
        """The fetches that can begin while a step is in flight, so that none waits for its end; none when no step is: `schedule` begins
        them then."""
        if self._step is None:
            return ()
        fetches = self._pass().fetches_beside_a_step()
        self._remember(fetches)
        return tuple(fetches)

    def _pass(self) -> SchedulingPass:
        return SchedulingPass(self._live, self._tables, self.config, self._cost.cost, self._clock.now_s())

    def _remember(self, fetches: Iterable[FetchPlan]) -> None:
        for plan in fetches:
            self._fetching[id(plan)] = (plan, self._live[plan.request_id])

    def complete(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """The step has run: count it, commit the blocks that it filled, choose who ends. One output for each sampled token."""
        sequences = self._end_step(plan)
        self._cost.observe(plan.new_tokens, plan.attention, len(plan.sequences), result.seconds)
        sampled = iter(result.sampled)
        outputs = []
        for part, sequence in zip(plan.sequences, sequences, strict=True):
            token = next(sampled, None) if part.sample else None
            assert not part.sample or (token and token.request_id == part.request_id), "the runner's results are not the plan's"
            if output := self._advance(sequence, part, token):
                outputs.append(output)
        assert next(sampled, None) is None, "the runner sampled more than it was asked for"
        return outputs

    def fail(self, plan: StepPlan, error: CPDError) -> list[EngineOutput]:
        """The step came to nothing: each of its requests ends with `error`. What it may have written is in no committed block."""
        outputs = [self._finish(sequence, error=error) for sequence in self._end_step(plan)]
        return [output for output in outputs if output is not None]

    def _end_step(self, plan: StepPlan) -> tuple[Sequence, ...]:
        assert plan is self._step, "that step is not in flight"
        sequences, self._step, self._in_step = self._in_step, None, ()
        return sequences

    def _advance(self, sequence: Sequence, part: SequenceStep, sampled: Sampled | None) -> EngineOutput | None:
        sequence.computed += len(part.tokens)
        sequence.computed_tokens += len(part.tokens)
        if not sequence.generated:  # told with the first token
            sequence.cached.compute(part.start, sequence.computed)
        if sampled is not None and sampled.error is not None:
            return self._finish(sequence, error=sampled.error)  # its KV is suspect: nothing of this step is committed
        self._tables.commit(sequence)
        if sequence.phase is Phase.LEAVING:
            self._let_go(sequence)
            return None
        if sampled is None:
            return None if sequence.remaining else self._finish(sequence, finish=FinishReason.LENGTH)
        assert sampled.token is not None, "neither a token nor an error"
        return self._take(sequence, sampled.token, sampled)

    def _take(self, sequence: Sequence, token: int, sampled: Sampled) -> EngineOutput | None:
        request, index = sequence.request, sequence.output_index
        sequence.append(token)
        left = request.max_new_tokens - sequence.generated
        finish = finish_reason(token, index, left, request.sampling, self.shape.eos_token_ids)
        if finish is not None:
            return self._finish(sequence, finish=finish, sampled=sampled)
        return self._output(sequence, sampled=sampled)

    def _finish(
        self,
        sequence: Sequence,
        *,
        finish: FinishReason | None = None,
        error: CPDError | None = None,
        sampled: Sampled | None = None,
    ) -> EngineOutput | None:
        """End a sequence; None when its owner has left, and has had the last output."""
        if sequence.phase is Phase.LEAVING:
            self._let_go(sequence)
            return None
        keeps = sequence.request.hold and error is None
        output = self._output(sequence, finish=finish, error=error, sampled=sampled, keeps=keeps)
        del self._live[sequence.id]
        self._let_go(sequence)
        return output

    def _let_go(self, sequence: Sequence) -> None:
        self._tables.drop(sequence)
        sequence.move(Event.END, self._clock.now_s())

    def _output(
        self,
        sequence: Sequence,
        *,
        finish: FinishReason | None = None,
        error: CPDError | None = None,
        sampled: Sampled | None = None,
        keeps: bool = False,
    ) -> EngineOutput:
        first = sequence.generated == (0 if sampled is None else 1)
        return EngineOutput(
            request_id=sequence.id,
            tokens=() if sampled is None or sampled.token is None else (sampled.token,),
            logprobs=() if sampled is None or sampled.logprobs is None else (sampled.logprobs,),
            finish_reason=finish,
            error=error,
            cached=sequence.cached.count() if first else None,
            phases_s=sequence.times_s(self._clock.now_s()) if first else None,
            computed_tokens=sequence.computed_tokens,
            held_blocks=self._tables.hand_out(sequence) if keeps else (),
        )

    # -- what others want to know ------------------------------------------------------------------------------------

    @property
    def live(self) -> tuple[RequestId, ...]:
        """The requests whose end is still to come."""
        return tuple(self._live)

    @property
    def idle(self) -> bool:
        """Nothing lives, computes or is fetched."""
        return not (self._live or self._fetching or self._step)

    def load(self) -> EngineLoad:
        """How much is running and waiting, and the seconds until the prompts accepted so far are computed."""
        return load_of(self._live.values(), self._tables, self.config.chunk_tokens, self._cost.cost, self._clock.now_s())

    def check(self) -> None:
        """Assert every invariant, the pool's included."""
        fetching = [sequence for _, sequence in self._fetching.values()]
        assert all(s.fetch is plan for plan, s in self._fetching.values()), "a fetch under way that its sequence does not know"
        assert {s.id for s in self._live.values() if s.phase is Phase.FETCHING} == {
            s.id for s in fetching if s.phase is Phase.FETCHING
        }
        holders = {id(s): s for s in (*self._live.values(), *fetching, *self._in_step)}
        assert all(s.phase is Phase.LEAVING or self._live.get(s.id) is s for s in holders.values()), "a sequence of nobody's"
        check_tables(holders.values(), self._tables)


def _sequence_step(chunk: Chunk) -> SequenceStep:
    s, start = chunk.sequence, chunk.sequence.computed
    stop = start + chunk.tokens
    return SequenceStep(
        request_id=s.id,
        start=start,
        tokens=s.tokens(start, stop),
        block_table=s.blocks,
        sample=s.request.sample and stop == s.known,
        sampling=s.request.sampling,
        output_index=s.output_index,
        history=s.tokens(0, s.known),
        prompt_tokens=s.request.prompt_tokens,
    )
