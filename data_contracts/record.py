"""The base of all records: frozen, closed to unknown fields, with a version."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen record. Unknown fields are refused, so that a newer file is never half-read by older code."""

    model_config = ConfigDict(frozen=True, extra="forbid")
