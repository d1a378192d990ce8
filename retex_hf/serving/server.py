"""The process of an endpoint: uvicorn, signals, and an end that finishes what runs."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from ..errors import ConfigError
from .app import App
from .errors import ApiError
from .logs import log
from .options import ServeOptions
from .service import Service


class Server(uvicorn.Server):
    """uvicorn's server with signals of its own: SIGTERM and SIGINT finish open requests, SIGHUP reloads."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._reloads: set[asyncio.Task[None]] = set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for kind in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(kind, self._stop, kind)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        try:
            yield
        finally:
            for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(kind)

    def _stop(self, kind: signal.Signals) -> None:
        log("shutting down", signal=kind.name)
        self.handle_exit(kind, None)

    def _reload(self) -> None:
        async def reload() -> None:
            try:
                await self._service.reload()
            except ApiError as error:  # the log has it already
                assert error

        task = asyncio.get_running_loop().create_task(reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)


def make_server(service: Service) -> Server:
    """Make the server of a service."""
    options = service.options
    config = uvicorn.Config(
        App(service),
        host=options.host,
        port=options.port,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=int(max(1, options.shutdown_timeout)),
        backlog=max(128, options.max_requests),
    )
    return Server(config, service)


def listen(server: Server) -> socket.socket:
    """Open the server's port. Clients may connect from now on, and are answered as soon as the server runs."""
    options = server.config
    try:
        listener = options.bind_socket()
    except SystemExit:  # uvicorn logs the reason, and exits
        raise ConfigError(
            f"--host {options.host} --port {options.port} cannot be listened on: the port is in use, or not yours."
        ) from None
    listener.listen(options.backlog)
    return listener


def serve(artifact: str | Path, options: ServeOptions) -> int:
    """Serve an artifact until SIGTERM or SIGINT; return the exit code."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # there is nothing to reload before the artifact is loaded
    service = Service(artifact, options)
    server = make_server(service)
    listener = listen(server)
    port = listener.getsockname()[1]
    host = f"[{options.host}]" if ":" in options.host else options.host
    engine = service.engine
    log("serving", url=f"http://{host}:{port}", does=engine.does, models=engine.names.all)
    print(f"Serving {artifact} at http://{host}:{port} (models: {', '.join(engine.names.all)})", flush=True)
    server.run(sockets=[listener])
    log("stopped")
    return 0
