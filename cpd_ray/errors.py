"""Every error the system raises for the world's faults, named by what the caller can do about it.

Our own bugs are asserts, not errors. Invariant: `message` is fit for a client (no path, address or exception text), and every
class says with which HTTP status and which OpenAI error `type` it leaves, and whether the same request may succeed elsewhere.
"""

from __future__ import annotations

from typing import Any, ClassVar


class CPDError(Exception):
    """Root of the tree. `retryable`: another worker may answer the same request."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        # keyword-only fields survive a trip between processes
        return (_rebuild, (type(self), self.message, self.__dict__.copy()))


def _rebuild(cls: type[CPDError], message: str, state: dict[str, Any]) -> CPDError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


# -- the caller must change the request ------------------------------------------------------------------------------


class InvalidRequest(CPDError):
    """The request is wrong as it stands; `param` names the field."""

    status = 400
    kind = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus max_tokens is more than the model takes or a worker's pool can ever hold."""

    def __init__(self, message: str, *, param: str | None = "messages", code: str | None = "context_length_exceeded") -> None:
        super().__init__(message, param=param, code=code)


class RequestTooLarge(InvalidRequest):
    """Body or headers are longer than what is read at all."""

    status = 413


class DuplicateRequest(InvalidRequest):
    """A request with this id is in flight."""

    status = 409


class Unauthorized(CPDError):
    """No key, or none that is known."""

    status = 401
    kind = "authentication_error"


class Forbidden(CPDError):
    """The key is known, but does not allow this."""

    status = 403
    kind = "permission_error"


class UnknownModel(CPDError):
    """No such model is served here."""

    status = 404
    kind = "invalid_request_error"


# -- the caller may try again later ----------------------------------------------------------------------------------


class Overloaded(CPDError):
    """The queue is full; try again after `retry_after_s`."""

    status = 429
    kind = "rate_limit_error"

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, param: str | None = None, code: str | None = "overloaded"
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after_s = retry_after_s


class Unavailable(CPDError):
    """No worker is left that could answer."""

    status = 503
    kind = "service_unavailable_error"


class DeadlineExceeded(CPDError):
    """The answer did not come in time."""

    status = 504
    kind = "timeout_error"


# -- the router acts on these; clients never see them ----------------------------------------------------------------


class WorkerGone(CPDError):
    """The worker died, left or does not answer: another may take the request."""

    status = 503
    kind = "service_unavailable_error"
    retryable = True


class WorkerDraining(WorkerGone):
    """The worker takes no new requests."""


class CacheMissed(CPDError):
    """Far less of the prompt is cached than the router believed; nothing was computed."""

    retryable = True

    def __init__(self, message: str, *, cached_tokens: int = 0) -> None:
        super().__init__(message)
        self.cached_tokens = cached_tokens


class PoolExhausted(CPDError):
    """No free block now; some will be."""

    status = 503
    kind = "service_unavailable_error"
    retryable = True


class Aborted(CPDError):
    """The request was cancelled by its owner."""

    status = 499
    kind = "aborted"


class EngineFault(CPDError):
    """The model produced no usable result for this request (for instance NaN logits)."""


# -- KV: whoever asked treats these as a miss ------------------------------------------------------------------------


class KVError(CPDError):
    """A cache operation was refused; the KV concerned counts as not cached."""


class UnknownReservation(KVError):
    """No such reservation here (never made, already ended, or of an earlier epoch)."""


class UnknownLease(KVError):
    """No such lease here (never granted, released, lapsed, or of an earlier epoch)."""


class LeaseLapsed(KVError):
    """The reader's deadline has passed: what was read may be overwritten and must be discarded."""


class SlabFull(KVError):
    """No slot can be had: all are leased, reserved or quarantined."""


class LayoutMismatch(KVError):
    """The peer's blocks are of another model, dtype, shape or version: nothing is read."""


class StaleRegion(KVError):
    """The region's generation has changed: its owner restarted."""


class TransferFailed(KVError):
    """The transfer ended with an error; the destination's bytes are undefined, and nothing writes to them any more."""


class TransferTimedOut(KVError):
    """The transfer has not ended by its deadline: something may still write to the destination. Quarantine it."""


class PeerGone(TransferFailed):
    """The peer is dead."""


class ChecksumMismatch(KVError):
    """Bytes arrived that are not the key's."""


class BadMessage(CPDError):
    """Bytes from a peer that are no message of ours."""

    status = 400
    kind = "invalid_request_error"


# -- starting up -----------------------------------------------------------------------------------------------------


class ConfigError(CPDError):
    """The configuration can't work; the message names the key and what would be right."""

    status = 400
    kind = "invalid_request_error"


class NotSharedMemory(CPDError):
    """Memory that a node's processes should share lies elsewhere: on disk or on another node."""


class ModelUnavailable(CPDError):
    """The model can't be fetched, read or run; the message says what to do."""
