"""What of Flower is relied on, below its documented interface, is where it was."""

from __future__ import annotations

import inspect

from fedshot.deploy.flower import CHECKED, require_flower


def test_the_version_is_one_that_was_checked() -> None:
    assert require_flower() in CHECKED


def test_the_gate_goes_around_all_interfaces() -> None:
    """The application asks for the hook when it is made, and puts it outermost."""
    from flwr.superlink import extensions, main

    assert not extensions.get_middleware()
    assert "*extensions.get_middleware()" in inspect.getsource(main._get_middleware).split("[")[2]


def test_the_server_takes_the_protocol_that_it_is_given() -> None:
    """It asks uvicorn's module to run it, and says nothing of the protocol."""
    from flwr.superlink.cli import flower_superlink

    module = inspect.getmodule(flower_superlink)
    source = inspect.getsource(module).partition("uvicorn.run(")[2].partition(")\n")[0]
    assert source
    assert "http=" not in source


def test_limits_on_a_connection_are_seen_before_the_body() -> None:
    """The clients keep an httpx.Client under this name, whose hooks come before the reading."""
    import httpx
    from flwr.supercore.runtime import RuntimeHttpClient

    client = RuntimeHttpClient.from_server_address("127.0.0.1:1", True, None, interceptors=[])
    assert isinstance(client._client, httpx.Client)
