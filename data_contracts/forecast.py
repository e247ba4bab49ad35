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


class StageForecast(Record):
    """Wall seconds of a stage after the extraction, from `runs` earlier ones on the store (none: from an assumed rate)."""

    stage: str
    seconds: float
    runs: int


class Forecast(Record):
    """Wall seconds and bytes of the remaining extraction, with a 90 % interval, and the stages that follow it."""

    seconds: float
    low_seconds: float
    high_seconds: float
    bytes: int
    samples: int
    tokens: int
    following: tuple[StageForecast, ...] = ()

    @property
    def total_seconds(self) -> float:
        """Until the hand-off is there."""
        return self.seconds + sum(stage.seconds for stage in self.following)
