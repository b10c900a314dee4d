"""The OpenAPI document of bodies that the routes parse themselves.

Owns the schemas' place in the document. Parses nothing. Invariant: every body that a route names is in the document's components.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from actors.http import schemas

_REF = "#/components/schemas/{model}"
BODIES: tuple[type[BaseModel], ...] = (
    schemas.CompletionBody,
    schemas.ChatBody,
    schemas.TokenizeBody,
    schemas.DetokenizeBody,
    schemas.WarmCompletionBody,
    schemas.WarmChatBody,
    schemas.ResetBody,
)


def takes(*kinds: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra`: its body is one of these."""
    assert set(kinds) <= set(BODIES), "a body that is not in the document"
    references = [{"$ref": _REF.format(model=kind.__name__)} for kind in kinds]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def with_body_schemas(app: FastAPI) -> None:
    """Add the bodies' schemas to the application's document."""
    plain = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = plain()
            _, definitions = models_json_schema([(kind, "validation") for kind in BODIES], ref_template=_REF)
            made.setdefault("components", {}).setdefault("schemas", {}).update(definitions.get("$defs", {}))
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
