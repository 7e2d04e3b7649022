"""The process of the server: Flower's SuperLink behind a gate.

The SuperLink listens on one port for nodes, for whoever starts runs, and for whoever registers
nodes, and without an account service it asks the last two for nothing. So the gate lets through
what nodes ask for, which Flower checks by their keys, and all else only with the token that lies in
the server's folder, readable by its owner alone. It also bounds what a request may weigh, before it
is read.

    python -m fedshot.deploy.flower.superlink MOST_BYTES --host ... (Flower's own options)

The token comes in the environment, as FEDSHOT_FLOWER_TOKEN.
"""

from __future__ import annotations

import hmac
import os
import sys
from typing import Any

from fedshot.deploy.flower.codec import Limits
from fedshot.deploy.flower.processes import heed_leash
from fedshot.deploy.flower.wire import be_quiet, largest_object, most_objects

TOKEN_HEADER = "x-fedshot-token"
TOKEN = "FEDSHOT_FLOWER_TOKEN"
_NODES = "/v1/fleet/"
_OUTLINE = _NODES + "push-messages"
_PER_OBJECT = 256  # bytes that name an object in the outline of a message


class Gate:
    """An ASGI application in front of another."""

    def __init__(self, app: Any, token: str, limits: Limits) -> None:
        self._app, self._token = app, token.encode()
        self._most = largest_object(limits)
        self._outline = _PER_OBJECT * most_objects(limits)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        path, refusal = scope["path"], 0
        length = headers.get(b"content-length", b"")
        most = self._outline if path == _OUTLINE else self._most
        if not path.startswith(_NODES) and not hmac.compare_digest(
            headers.get(TOKEN_HEADER.encode(), b""), self._token
        ):
            refusal = 403
        elif scope["method"] == "POST" and not length.isdigit():
            refusal = 411
        elif length and int(length) > most:
            refusal = 413
        if not refusal:
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": refusal,
                    "headers": [(b"content-length", b"0"), (b"connection", b"close")]})  # fmt: skip
        await send({"type": "http.response.body", "body": b""})


def main() -> None:
    """Run the SuperLink until the process is ended."""
    heed_leash()
    be_quiet()
    limits = Limits(message=int(sys.argv.pop(1)))
    token = os.environ.pop(TOKEN)
    if len(token) < 32:
        raise SystemExit("the token is too short to protect anything")
    from flwr.superlink import extensions
    from flwr.superlink.cli import flower_superlink
    from starlette.middleware import Middleware

    # The hook by which Flower's own extensions put a layer around all of its interfaces.
    extensions.get_middleware = lambda: (Middleware(Gate, token, limits),)
    flower_superlink()


if __name__ == "__main__":
    main()
