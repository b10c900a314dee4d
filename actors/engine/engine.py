"""The engine: the scheduler's loop on the event loop, the model's steps on one thread beside it, fetches as tasks.

Owns the loop, the streams and the fetch tasks; all bookkeeping is the scheduler's and stays on the event loop, so that nothing needs
a lock: only `runner.run` leaves it. Invariant: a request's stream ends, whatever fails: the request, the step, or the loop itself.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from actors.engine.interface import EngineLoad, EngineOutput, EngineRequest, FetchPlan, KvPort
from actors.engine.output_stream import Mailbox, OutputStream
from actors.engine.plan import StepPlan, StepRunner
from actors.engine.scheduler import Scheduler
from cpd_ray.config import EngineConfig
from cpd_ray.errors import CPDError, EngineFault, WorkerGone
from cpd_ray.ids import BlockId, RequestId
from kv.pool import BlockPool

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.5
"""With nothing to do, look this often for leases that have lapsed and transfers that have settled."""
BLOCKED_POLL_S = 0.01
"""With requests that lack blocks: others may let go of some without telling the engine."""


class AsyncEngine:
    """`Engine` over a scheduler, whose sink is the port's `committed`, and a runner."""

    def __init__(self, scheduler: Scheduler, runner: StepRunner, port: KvPort) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._port = port
        self._mailboxes: dict[RequestId, Mailbox] = {}
        self._fetches: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-step")
        self._loop_task: asyncio.Task[None] | None = None
        self._stopping = False
        self._failure: BaseException | None = None

    @property
    def pool(self) -> BlockPool:
        return self._scheduler.pool

    @property
    def block_size(self) -> int:
        return self._scheduler.shape.block_size

    @property
    def vocab_size(self) -> int:
        return self._scheduler.shape.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._scheduler.shape.max_model_len

    @property
    def healthy(self) -> bool:
        """Whether the loop runs, so that requests are answered."""
        return self._loop_task is not None and not self._loop_task.done()

    async def start(self) -> None:
        """Begin to serve."""
        assert self._loop_task is None, "the engine was started before"
        self._loop_task = asyncio.get_running_loop().create_task(self._serve(), name="engine-loop")

    def generate(self, request: EngineRequest) -> OutputStream:
        """Run the request; closing the stream aborts it. Raises DuplicateRequest, ContextLengthExceeded or InvalidRequest at once, and
        WorkerGone when the engine has stopped."""
        if self._stopping or self._failure is not None:
            raise WorkerGone("the engine has stopped")
        self._scheduler.add(request)
        mailbox = Mailbox(lambda _: self._abort(request.request_id), self._give_back)
        self._mailboxes[request.request_id] = mailbox
        for plan in self._scheduler.fetch_beside():
            self._begin_fetch(plan)
        self._changed.set()
        return OutputStream(mailbox)

    def load(self) -> EngineLoad:
        return self._scheduler.load()

    def reconfigure(self, config: EngineConfig) -> None:
        """Order, chunks and limits from the next step on."""
        self._scheduler.config = config
        self._changed.set()

    def check(self) -> None:
        """Assert every invariant of the scheduler, its block tables and the pool."""
        self._scheduler.check()

    async def stop(self) -> None:
        """Abort everything; returns when no step, no transfer and no thread of the engine is left."""
        self._stopping = True
        self._changed.set()
        if self._loop_task is not None:
            await self._loop_task
        self._end_all()
        while self._fetches:
            await asyncio.wait(self._fetches)
        await asyncio.to_thread(self._compute.shutdown)

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            while not self._stopping:
                self._changed.clear()
                scheduled = self._scheduler.schedule()
                for plan in scheduled.fetches:
                    self._begin_fetch(plan)
                if scheduled.step is None:
                    await self._wait_for_change()
                else:
                    self._deliver(await self._run(scheduled.step))
        except Exception as error:  # a bug of ours: nobody may wait for ever because of it
            log.exception("the engine's loop has failed")
            self._failure = error
            self._end_all(EngineFault("the engine has failed"))

    async def _run(self, plan: StepPlan) -> list[EngineOutput]:
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._compute, self._runner.run, plan)
        except Exception as error:
            log.exception("a step of %d sequences has failed", len(plan.sequences))
            fault = error if isinstance(error, CPDError) else EngineFault("the model's step failed")
            return self._scheduler.fail(plan, fault)
        return self._scheduler.complete(plan, result)

    async def _wait_for_change(self) -> None:
        poll_s = BLOCKED_POLL_S if self._scheduler.live else IDLE_POLL_S
        try:
            async with asyncio.timeout(poll_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            ended = output.finish_reason is not None or output.error is not None
            mailbox = self._mailboxes.pop(output.request_id) if ended else self._mailboxes[output.request_id]
            mailbox.put(output)

    # -- fetches -----------------------------------------------------------------------------------------------------

    def _begin_fetch(self, plan: FetchPlan) -> None:
        task = asyncio.get_running_loop().create_task(self._fetch(plan), name=f"fetch-{plan.request_id}")
        self._fetches.add(task)
        task.add_done_callback(self._fetches.discard)

    async def _fetch(self, plan: FetchPlan) -> None:
        try:
            result = await self._port.fetch(plan)
        except Exception:
            log.exception("the port failed to fetch for %s", plan.request_id)
            output = self._scheduler.fetch_broke(plan, EngineFault("a fetch of cached KV failed"))
            self._deliver([] if output is None else [output])
        else:
            self._scheduler.fetched(plan, result)
        self._changed.set()

    # -- ends --------------------------------------------------------------------------------------------------------

    def _abort(self, request_id: RequestId) -> None:
        self._mailboxes.pop(request_id, None)
        self._scheduler.abort(request_id)
        self._changed.set()

    def _give_back(self, blocks: tuple[BlockId, ...]) -> None:
        self._scheduler.pool.release(blocks)
        self._changed.set()

    def _end_all(self, error: CPDError | None = None) -> None:
        """Each request that lives ends as aborted, or with `error`."""
        for request_id in self._scheduler.live:
            output = self._scheduler.abort(request_id)
            assert output is not None
            self._mailboxes.pop(request_id).put(output if error is None else EngineOutput(request_id, error=error))
