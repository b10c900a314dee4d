"""A simulated decode worker: the real pool, and a batch whose step time follows from its size and its context.

Steps between two changes of the batch are alike, so they are not simulated one by one. Owns the batch; where a request decodes is
the router's. Invariant: a request holds its whole room (prompt and answer) from its admission here to its end.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bench.sim.cache import EPOCH, SimNode
from bench.sim.loop import EventLoop
from cpd_ray.ids import BlockId, BlockKey, RequestId, WorkerId, pool_source
from cpd_ray.messages import StepCost, WorkerReport, WorkerState
from cpd_ray.types import Role, Tier
from kv.events import EventLog
from kv.pool import BlockPool


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """`keys`: of the prompt's full blocks, then of those that the answer fills as far as a later prompt continues it. `transfer`:
    brings so many blocks and calls back. `ended` comes with the answer's last token."""

    request_id: RequestId
    prompt_tokens: int
    output_tokens: int
    keys: tuple[BlockKey, ...]
    transfer: Callable[[int, Callable[[], None]], None]
    began: Callable[[], None]
    ended: Callable[[], None]


class SimDecodeWorker:
    """`seen`: the last dispatch that this worker has counted, as its reports say."""

    def __init__(self, worker: WorkerId, node: SimNode, blocks: int, block_tokens: int, cost: StepCost, loop: EventLoop) -> None:
        self.worker = worker
        self.node = node
        self.events = EventLog(pool_source(worker), node.name, EPOCH)
        self.pool = BlockPool(blocks, clock=loop, events=self.events)
        self.generated_tokens = 0
        self.seen = 0
        self._block_tokens = block_tokens
        self._cost = cost
        self._loop = loop
        self._waiting: deque[DecodeJob] = deque()
        self._steps = 0.0  # done since the beginning
        self._since_s = 0.0
        self._step_s = 0.0
        self._context = 0.0
        self._batch: list[tuple[float, int, DecodeJob, list[BlockId]]] = []  # by the step in which it ends
        self._joined = 0
        self._wakeups = 0
        self._entering = 0

    def add(self, job: DecodeJob, sequence: int) -> None:
        """Takes a prefilled request; starts its transfer as soon as there is room."""
        self.seen = max(self.seen, sequence)
        self._waiting.append(job)
        self._admit()

    def report(self) -> WorkerReport:
        running = len(self._batch) + self._entering
        return WorkerReport(
            worker=self.worker,
            role=Role.DECODE,
            node=self.node.name,
            epoch=EPOCH,
            state=WorkerState.READY,
            running=running,
            waiting=len(self._waiting),
            backlog_tokens=0,
            backlog_s=0.0,
            pool=self.pool.counts(),
            step_cost=self._cost,
            block_size=self._block_tokens,
            fetch_bytes_per_s={Tier.NODE: self.node.up.bytes_per_s, Tier.CLUSTER: self.node.into.bytes_per_s},
            seen={"sim": self.seen},
        )

    def _admit(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            prompt_keys = job.keys[: job.prompt_tokens // self._block_tokens]
            held = self.pool.match(prompt_keys)
            need = -(-(job.prompt_tokens + job.output_tokens) // self._block_tokens)
            blocks = self.pool.acquire(prompt_keys[:held])
            if self.pool.available() < need - held:
                self.pool.release(blocks)
                return
            self._waiting.popleft()
            blocks += self.pool.allocate(need - held)
            self._entering += 1
            lacking = -(-job.prompt_tokens // self._block_tokens) - held
            job.transfer(lacking, lambda job=job, blocks=blocks, held=held: self._enter(job, blocks, held))  # type: ignore[misc]

    def _enter(self, job: DecodeJob, blocks: list[BlockId], held: int) -> None:
        self._advance()
        self._entering -= 1
        self._commit(job, blocks, held, job.prompt_tokens // self._block_tokens)
        job.began()
        self._joined += 1
        heapq.heappush(self._batch, (self._steps + job.output_tokens, self._joined, job, blocks))
        self._context += job.prompt_tokens
        self._reschedule()

    def _commit(self, job: DecodeJob, blocks: list[BlockId], first: int, stop: int) -> None:
        """Blocks `[first, stop)` are full: commit them, and write them to the node's slab, which so comes to hold the whole context."""
        stop = min(stop, len(job.keys))
        if stop <= first:
            return
        for i in range(first, stop):
            self.pool.commit(blocks[i], job.keys[i], job.keys[i - 1] if i else None)
        held = tuple(blocks[first:stop])
        self.pool.retain(held)
        self.node.store(job.keys[first - 1] if first else None, job.keys[first:stop], lambda: self._written(held))

    def _written(self, held: tuple[BlockId, ...]) -> None:
        self.pool.release(held)
        self._admit()

    def _advance(self) -> None:
        now_s = self._loop.now_s()
        if self._batch and self._step_s:
            steps = (now_s - self._since_s) / self._step_s
            self._steps += steps
            self._context += steps * len(self._batch)
        self._since_s = now_s

    def _reschedule(self) -> None:
        self._wakeups += 1
        if not self._batch:
            self._context = 0.0
            return
        batch = len(self._batch)
        self._step_s = self._cost.predict_s(batch, self._context, batch)
        left = max(0.0, self._batch[0][0] - self._steps)
        self._loop.after(left * self._step_s, self._finish, self._wakeups)

    def _finish(self, wakeup: int) -> None:
        if wakeup != self._wakeups:
            return  # the batch has changed since
        self._advance()
        ended: list[DecodeJob] = []
        while self._batch and self._batch[0][0] <= self._steps + 1e-6:
            _, _, job, blocks = heapq.heappop(self._batch)
            self._context -= job.prompt_tokens + job.output_tokens
            self.generated_tokens += job.output_tokens
            prompt_blocks = job.prompt_tokens // self._block_tokens
            self._commit(job, blocks, prompt_blocks, (job.prompt_tokens + job.output_tokens) // self._block_tokens)
            self.pool.release(blocks)
            ended.append(job)
        self._reschedule()
        self._admit()
        for job in ended:
            job.ended()
