"""Client work for tests that make the replies themselves."""

from __future__ import annotations

from typing import Any

from fedshot.protocol.exchange import ClientWork, Reply, client_work


class Nobody:
    @client_work()
    def work(self, down: Any, private: Any, drawn: Any) -> Reply:
        raise AssertionError


NOBODY = ClientWork(Nobody(), "work")
