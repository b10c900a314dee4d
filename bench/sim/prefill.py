"""A simulated prefill worker: the real scheduler over the real pool, with hardware that is a formula.

Owns the step loop in virtual time and the worker's way to the slabs. Invariant: at most one step is under way, and it lasts as long
as the hardware model says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.engine.interface import EngineOutput, EngineRequest, FetchPlan, FetchResult
from actors.engine.plan import Sampled, StepPlan, StepResult
from actors.engine.scheduler import Scheduler
from actors.engine.validation import EngineShape
from bench.sim.cache import EPOCH, Fetched, SimNode, fetch
from bench.sim.loop import EventLoop
from cpd_ray.config import EngineConfig
from cpd_ray.ids import KEY_BYTES, BlockId, BlockKey, LeaseId, RequestId, WorkerId, pool_source
from cpd_ray.messages import StepCost, WorkerReport, WorkerState
from cpd_ray.tokens import TOKEN_BYTES
from cpd_ray.types import Role, SamplingParams, Tier
from kv.events import EventLog
from kv.pool import BlockPool

MAX_MODEL_LEN = 1 << 20
_ROOT = bytes(KEY_BYTES)
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class KnownCost:
    """The scheduler's cost model where the hardware is a formula: there is nothing to learn."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost

    def observe(self, new_tokens: int, attention: float, sequences: int, seconds: float) -> None:
        return None


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """`sources`: the nodes whose slabs hold leading blocks, best first; `may_fetch_blocks`: of how many. `prefilled` comes with the first
    token and a lease on the blocks."""

    request_id: RequestId
    prompt_tokens: int
    keys: tuple[BlockKey, ...]
    sources: tuple[SimNode, ...]
    may_fetch_blocks: int
    prefilled: Callable[[EngineOutput, LeaseId], None]


class SimPrefillWorker:
    """`shared`: whether it reads other nodes' slabs."""

    def __init__(
        self,
        worker: WorkerId,
        role: Role,
        node: SimNode,
        pool_blocks: int,
        block_tokens: int,
        engine: tuple[StepCost, EngineConfig],
        loop: EventLoop,
        *,
        shared: bool,
    ) -> None:
        cost, config = engine
        self.worker, self.role, self.node = worker, role, node
        self.events = EventLog(pool_source(worker), node.name, EPOCH)
        self.pool = BlockPool(pool_blocks, clock=loop, events=self.events)
        self.computed_tokens = 0
        self.busy_s = 0.0
        self.seen = 0
        self._cost = cost
        self._loop = loop
        self.shared = shared
        self._jobs: dict[RequestId, PrefillJob] = {}
        self._stepping = False
        shape = EngineShape(block_tokens, vocab_size=2, max_model_len=MAX_MODEL_LEN)
        self.scheduler = Scheduler(self.pool, shape, config, loop, KnownCost(cost), self._committed)

    def add(self, job: PrefillJob, sequence: int) -> None:
        """Take a request that the router has sent."""
        self.seen = max(self.seen, sequence)
        self._jobs[job.request_id] = job
        self.scheduler.add(
            EngineRequest(
                request_id=job.request_id,
                tokens=bytes(job.prompt_tokens * TOKEN_BYTES),
                prompt_tokens=job.prompt_tokens,
                root=_ROOT,
                keys=job.keys,
                sampling=_ONE_TOKEN,
                max_new_tokens=1,
                may_fetch_blocks=job.may_fetch_blocks,
                hold=True,
            )
        )
        self.pump()

    def prepare(self, job: PrefillJob) -> None:
        """Bring a context into the pool, computing no more than one token (`commit_only` of the real worker)."""
        self._jobs[job.request_id] = job
        self.scheduler.add(
            EngineRequest(
                request_id=job.request_id,
                tokens=bytes(job.prompt_tokens * TOKEN_BYTES),
                prompt_tokens=job.prompt_tokens,
                root=_ROOT,
                keys=job.keys,
                sampling=_ONE_TOKEN,
                max_new_tokens=0,
                may_fetch_blocks=job.may_fetch_blocks,
                sample=False,
                priority=-1,
            )
        )
        self.pump()

    def end_handover(self, lease: LeaseId) -> None:
        """The decode worker has what it needs."""
        self.pool.end_lease(lease)
        self.pump()

    def report(self) -> WorkerReport:
        load = self.scheduler.load()
        rates = {Tier.NODE.value: self.node.up.bytes_per_s}
        if self.shared:
            rates[Tier.CLUSTER.value] = self.node.into.bytes_per_s
        return WorkerReport(
            worker=self.worker,
            role=self.role,
            node=self.node.name,
            epoch=EPOCH,
            state=WorkerState.READY,
            running=load.running,
            waiting=load.waiting,
            backlog_tokens=load.backlog_tokens,
            backlog_s=load.backlog_s,
            pool=self.pool.counts(),
            step_cost=self._cost,
            block_size=self.scheduler.shape.block_size,
            fetch_bytes_per_s=rates,
            queue_s=load.queue_s,
            queue_age_s=load.queue_age_s,
            seen={"sim": self.seen},
        )

    def pump(self) -> None:
        """Start the next step if none is under way and there is something to compute."""
        if self._stepping:
            for fetch_plan in self.scheduler.fetch_beside():
                self._fetch(fetch_plan)
            return
        scheduled = self.scheduler.schedule()
        if scheduled.step is not None:
            plan = scheduled.step
            seconds = self._cost.predict_s(plan.new_tokens, plan.attention, len(plan.sequences))
            self._stepping = True
            self.busy_s += seconds
            self.computed_tokens += plan.new_tokens
            self._loop.after(seconds, self._stepped, plan, seconds)
        for fetch_plan in scheduled.fetches:
            self._fetch(fetch_plan)

    def _stepped(self, plan: StepPlan, seconds: float) -> None:
        self._stepping = False
        sampled = tuple(Sampled(part.request_id, 1) for part in plan.sequences if part.sample)
        for output in self.scheduler.complete(plan, StepResult(sampled, seconds)):
            assert output.error is None and output.finish_reason is not None, "a simulated prompt has one token to give"
            if not output.tokens:
                del self._jobs[output.request_id]
                continue
            lease = self.pool.lease(output.held_blocks, holder=output.request_id, ttl_s=1e9, grace_s=0.0)
            self.pool.release(output.held_blocks)
            self._jobs.pop(output.request_id).prefilled(output, lease)
        self.pump()

    def _fetch(self, plan: FetchPlan) -> None:
        job = self._jobs[plan.request_id]
        others = [node for node in job.sources if node is not self.node] if self.shared else []
        found = fetch(self._loop.now_s(), self.node, others, plan.keys)
        self._loop.at(found.end_s, self._fetched, plan, found)

    def _fetched(self, plan: FetchPlan, found: Fetched) -> None:
        for node, lease in found.leases:
            node.release((lease,))
        self.scheduler.fetched(plan, FetchResult(landed=found.landed))
        self.pump()

    def _committed(self, parent: BlockKey | None, keys: Sequence[BlockKey], blocks: Sequence[BlockId]) -> None:
        held = tuple(blocks)
        self.pool.retain(held)
        self.node.store(parent, keys, lambda: self.pool.release(held))
