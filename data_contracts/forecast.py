"""Time and bytes to come."""

from __future__ import annotations

from data_contracts.record import Record


class CostFit(Record):
    """seconds(tokens) = fixed + linear * tokens + quadratic * tokens^2, all non-negative, plus its relative residual spread."""

    fixed_seconds: float
    linear_seconds_per_token: float
    quadratic_seconds_per_token2: float
    residual_share: float
    observations: int
    source: str = "observed"


class Forecast(Record):
    """Wall seconds and bytes of the remaining work, with a 90 % interval."""

    seconds: float
    low_seconds: float
    high_seconds: float
    bytes: int
    samples: int
    tokens: int
