"""Metrics for Prometheus and a health check, served over HTTP by a server, a node or a run.

    GET /metrics   the metrics, in Prometheus' text format
    GET /healthz   200 and "ready", or 503 and why the process is not ready

The metrics are numbers of the whole process. No client, node or user is named.
"""

from __future__ import annotations

import contextlib
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from cryptography import x509
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily

from fedshot.core.console import at_level, warning
from fedshot.core.errors import FedshotError
from fedshot.core.serialised import CodecError
from fedshot.deploy.flower.fleet import FlowerFleet
from fedshot.deploy.flower.local import operator_of
from fedshot.deploy.flower.messages import LATE, WireMessage, refusal
from fedshot.deploy.flower.processes import Child
from fedshot.deploy.flower.server_folder import (
    CERTIFICATE,
    ServerFolder,
    check_free,
    is_loopback,
    split_address,
)
from fedshot.fleets.wrapper import Wrapper
from fedshot.protocol.exchange import Arrival, Exchange, Fleet
from fedshot.runs.experiment import Experiment
from fedshot.runs.recorder import Record

_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_REQUEST_SECONDS = 10.0  # time to receive a request
_MAX_REQUESTS = 8  # at the same time


class Metrics:
    """The metrics of this process, and whether it is ready."""

    def __init__(self) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.problem = "it is starting"  # why the process is not ready; "" if it is

    def check(self) -> str:
        """Return why the process is not ready; "" if it is."""
        return self.problem

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"fedshot_{name}", help, registry=self.registry)

    def _counter(self, name: str, help: str, *outcomes: str) -> Counter:
        labels = ["outcome"] if outcomes else []
        made = Counter(f"fedshot_{name}", help, labels, registry=self.registry)
        for outcome in outcomes:
            made.labels(outcome)  # a series that begins with 0 can be alerted on
        return made

    def _histogram(self, name: str, help: str) -> Histogram:
        return Histogram(f"fedshot_{name}", help, buckets=_SECONDS, registry=self.registry)


class RunMetrics(Metrics):
    """The metrics of a run, i.e. of the process that asks the nodes, averages and tests."""

    def __init__(self) -> None:
        super().__init__()
        self._round = self._gauge("round", "Last round that is complete.")
        self._planned = self._gauge("planned_rounds", "Rounds of the run, run.rounds.")
        self._rounds = self._counter("rounds", "Rounds of this process.", "trained", "skipped")
        self._time = self._gauge(
            "last_round_timestamp_seconds", "End of the last round, or of the start."
        )
        self._accuracy = self._gauge(
            "validation_accuracy_ratio", "Mean accuracy of the last validation, from 0 to 1."
        )
        self._seconds = self._histogram("exchange_seconds", "Duration of an exchange.")
        self._asked = self._counter("clients_asked", "Clients that were asked, in all exchanges.")
        self._replies = self._counter(
            "client_replies",
            "Clients that were asked, by what came back.",
            "answered",
            "late",
            "lost",
            "refused",
        )
        self._sent = self._counter("sent_bytes", "Bytes of arrays in messages to nodes.")
        self._received = self._counter("received_bytes", "Bytes of arrays in replies of nodes.")
        self._nodes = self._gauge("connected_nodes", "Nodes connected at the last exchange.")
        self._time.set_to_current_time()  # of the start, until a round ends
        self._accuracy.set(math.nan)
        self.problem = "it waits for nodes"

    def watch(self, experiment: Experiment, fleet: FlowerFleet) -> None:
        """Measure the exchanges of an experiment, whose messages to nodes `fleet` sends."""
        self._planned.set(experiment.config.run.rounds)
        self._round.set(experiment.round)
        experiment.fleet = _Measured(experiment.fleet, fleet, self)
        self.problem = ""

    def record(self, record: Record) -> None:
        """Update the metrics from the record of a round."""
        self._round.set(record.round)
        if record.round:
            self._rounds.labels("skipped" if record.skipped else "trained").inc()
        self._time.set_to_current_time()
        if record.validation is not None:
            self._accuracy.set(record.validation.accuracy)

    def _arrived(self, arrival: Arrival) -> None:
        outcome = "answered"
        if arrival.fault is not None:
            outcome = "late" if LATE in arrival.fault.reason else arrival.fault.kind
        self._replies.labels(outcome).inc()

    def _exchanged(self, asked: int, seconds: float, fleet: FlowerFleet) -> None:
        self._asked.inc(asked)
        self._seconds.observe(seconds)
        self._nodes.set(fleet.connected)
        self._sent.inc(fleet.nbytes.pop("down", 0))
        self._received.inc(fleet.nbytes.pop("up", 0))


class _Measured(Wrapper):
    """A fleet whose exchanges are measured; `remote` sends the messages."""

    def __init__(self, fleet: Fleet, remote: FlowerFleet, metrics: RunMetrics) -> None:
        super().__init__(fleet)
        self._remote, self._metrics = remote, metrics

    def replies(self, exchange: Exchange) -> Iterator[Arrival]:
        """Yield the fleet's arrivals unchanged."""
        begun = time.monotonic()
        for arrival in self.fleet.replies(exchange):
            self._metrics._arrived(arrival)
            yield arrival
        self._metrics._exchanged(len(exchange.to), time.monotonic() - begun, self._remote)


class NodeMetrics(Metrics):
    """The metrics of a node."""

    def __init__(self, clients: int) -> None:
        super().__init__()
        self._gauge("clients", "Clients of this node.").set(clients)
        self._connected = self._gauge("connected", "1 if the node is connected to its server.")
        self._messages = self._counter(
            "messages", "Messages of the server.", "answered", "refused", "failed"
        )
        self._seconds = self._histogram("message_seconds", "Time to handle a message.")
        self._sent = self._counter("sent_bytes", "Bytes of arrays in replies.")
        self._received = self._counter("received_bytes", "Bytes of arrays in messages.")
        self._time = self._gauge("last_message_timestamp_seconds", "Time of the last reply.")

    def connected(self, now: bool) -> None:
        """Record whether the node is connected."""
        self._connected.set(now)
        self.problem = "" if now else "it is not connected to the server"

    def handled(self, received: int, reply: WireMessage) -> None:
        """Record a message with `received` bytes of arrays, and the reply to it."""
        kind = refusal(reply).partition(":")[0]
        self._messages.labels(kind or "answered").inc()
        self._seconds.observe(reply.head.get("seconds", 0.0))
        self._received.inc(received)
        self._sent.inc(reply.nbytes)
        self._time.set_to_current_time()


class ServerMetrics(Metrics):
    """The metrics of a server."""

    def __init__(self, folder: ServerFolder) -> None:
        super().__init__()
        self._folder = folder
        self._child: Child | None = None

    def watch(self, child: Child) -> None:
        """Measure the server's SuperLink, the process `child`."""
        ProcessCollector("fedshot_superlink", lambda: child.process.pid, registry=self.registry)
        self.registry.register(self)
        self._child = child

    def check(self) -> str:
        """Return why the server is not ready; "" if it is."""
        if self._child is None:
            return self.problem
        if self._child.ended:
            return "the SuperLink has ended"
        return "" if operator_of(self._folder).ready() else "the SuperLink does not respond"

    def describe(self) -> list[Any]:
        """Return no metric: those of `collect` need a server that responds."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics that are asked of the SuperLink or read from the server's folder."""
        nodes = GaugeMetricFamily(
            "fedshot_nodes", "Nodes that the server knows, by whether they are connected.",
            labels=["status"],
        )  # fmt: skip
        with contextlib.suppress(FedshotError, CodecError, OSError, httpx.HTTPError):
            statuses = operator_of(self._folder).statuses()
            online = statuses.count("online")
            nodes.add_metric(["connected"], online)
            nodes.add_metric(["away"], len(statuses) - online)
        yield nodes
        try:
            found = (self._folder.folder / CERTIFICATE).read_bytes()
            expires = x509.load_pem_x509_certificate(found).not_valid_after_utc.timestamp()
        except (OSError, ValueError):
            return
        yield GaugeMetricFamily(
            "fedshot_certificate_expiry_timestamp_seconds",
            "Time at which the server's certificate expires.",
            value=expires,
        )


@contextlib.contextmanager
def serving(address: str, metrics: Metrics, tell: Callable[[str], None]) -> Iterator[None]:
    """Serve metrics and a health check at host:port while in this context.

    Raises ConfigError if nothing can listen at the address.
    """
    host, port = split_address(address)
    check_free(host, port, option="--metrics")
    if not is_loopback(host):
        tell(warning(
            f"--metrics {address}: everyone who reaches this address can read the metrics, which "
            "are sent in plain text. Let a firewall admit the monitoring only."
        ))  # fmt: skip
    handler = type("Handler", (_Handler,), {"metrics": metrics})
    server = _Server((host, port), handler, tell)
    thread = threading.Thread(target=server.serve_forever, daemon=True, name="metrics")
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    """Answers at most `_MAX_REQUESTS` requests at a time, and closes further connections."""

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        tell: Callable[[str], None],
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._tell, self._free = tell, threading.BoundedSemaphore(_MAX_REQUESTS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, *_: Any) -> None:
        """Log an error, but not that a client went away."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self._tell(at_level("error", f"a request for metrics failed: {error!r}"))


class _Handler(BaseHTTPRequestHandler):
    metrics: Metrics
    timeout = _REQUEST_SECONDS
    server_version, sys_version = "fedshot", ""

    def handle(self) -> None:
        """Answer a request that is received within `_REQUEST_SECONDS`."""
        self._timer = threading.Timer(_REQUEST_SECONDS, self._give_up)
        self._timer.daemon = True
        self._timer.start()
        try:
            super().handle()
        finally:
            self._timer.cancel()

    def parse_request(self) -> bool:
        good = super().parse_request()
        self._timer.cancel()
        return good

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._send(200, CONTENT_TYPE_LATEST, generate_latest(self.metrics.registry))
        elif path == "/healthz":
            try:
                problem = self.metrics.check()
            except (FedshotError, CodecError, OSError, httpx.HTTPError) as error:
                problem = str(error) or type(error).__name__
            text = f"not ready: {problem}\n" if problem else "ready\n"
            self._send(503 if problem else 200, "text/plain; charset=utf-8", text.encode())
        else:
            self._send(404, "text/plain; charset=utf-8", b"see /metrics and /healthz\n")

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line for a request."""
