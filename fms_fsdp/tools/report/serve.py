"""`report --serve`: a server of one page, which is made anew when a file of the runs has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fms_fsdp.errors import UserError


def serve(folders: Sequence[Path], render: Callable[[], str], host: str, port: int) -> None:
    """Prints the address and answers there until Ctrl-C.

    Raises:
        UserError: the address cannot be used.
    """
    watched = [*folders, *(folder / "metrics.jsonl" for folder in folders)]
    made: tuple[list[int], bytes] = [], b""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal made
            try:
                stamps = [path.stat().st_mtime_ns for path in watched]
                if stamps != made[0]:
                    made = stamps, render().encode()
            except (ValueError, OSError) as error:
                return self.send_error(503, explain=str(error))
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(made[1])

        def log_message(self, *_: Any) -> None:
            """Prints nothing for a request."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        rule = f"must be free on --host ({host}), and is not: {error.strerror}; take another, or --port=0"
        raise UserError(f"--port ({port}) {rule}") from None
    with server, suppress(KeyboardInterrupt):
        print(
            f"http://{host}:{server.server_port}/ shows the page; Ctrl-C ends this server",
            flush=True,
        )
        server.serve_forever()
    print("report: the server has ended; the run goes on")
