"""Prometheus metrics, per task: what is asked, how long it takes, and how well inputs fit their tasks."""

from __future__ import annotations

from time import monotonic

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .rows import MERGED, Decision, Row

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Residuals are norms in a whitened space: a few for inputs of a task, and far more for others.
RESIDUALS = (0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 8, 12, 20, 50, 100)
PROBABILITIES = (0.1, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)


class Metrics:
    """The counters of one endpoint, in a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter("retex_requests", "HTTP requests", ["path", "status"], registry=registry)
        self.rows = Counter("retex_rows", "Answered rows", ["task", "asked"], registry=registry)
        self.failed = Counter("retex_failed_rows", "Rows without an answer", ["asked"], registry=registry)
        self.abstained = Counter("retex_abstentions", "Rows on which the router abstained", ["task"], registry=registry)
        self.tokens = Counter("retex_tokens", "Tokens read and generated", ["task", "kind"], registry=registry)
        self.latency = Histogram(
            "retex_latency_seconds", "From a row's arrival to its answer", ["task"], buckets=SECONDS, registry=registry
        )
        self.residual = Histogram(
            "retex_residual", "Residual of an input to its task", ["task"], buckets=RESIDUALS, registry=registry
        )
        self.probability = Histogram(
            "retex_probability", "The task's probability", ["task"], buckets=PROBABILITIES, registry=registry
        )
        self.waited = Histogram("retex_queue_seconds", "Time in the queue", buckets=SECONDS, registry=registry)
        self.batch_rows = Histogram("retex_batch_rows", "Rows of a batch", buckets=BATCHES, registry=registry)
        self.queue = Gauge("retex_queue_rows", "Rows that wait", registry=registry)
        self.open = Gauge("retex_open_requests", "Requests that are open", registry=registry)
        self.reloads = Counter("retex_reloads", "Reloads of the artifact", ["outcome"], registry=registry)

    def answered(self, row: Row, decision: Decision, generated: int) -> None:
        """Count an answered row."""
        task = MERGED if decision.task is None or row.model == MERGED else decision.task
        self.rows.labels(task, _asked(row)).inc()
        self.latency.labels(task).observe(monotonic() - row.arrived)
        self.tokens.labels(task, "read").inc(row.tokens)
        self.tokens.labels(task, "generated").inc(generated)
        if decision.residual is not None:
            self.residual.labels(task).observe(decision.residual)
        if decision.probability is not None:
            self.probability.labels(task).observe(decision.probability)
        if decision.abstained:
            self.abstained.labels(task).inc()

    def lost(self, row: Row) -> None:
        """Count a row without an answer."""
        self.failed.labels(_asked(row)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _asked(row: Row) -> str:
    """Return how a row's task was chosen: "auto", "merged", or "task" where the request names one."""
    return row.model if row.model in ("auto", MERGED) else "task"
