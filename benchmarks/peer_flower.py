"""Flower's simulation engine, with a plain torch step inside its ClientApp and FedAvg around it.

    python peer_flower.py FOLDER      reads FOLDER/flower.safetensors; see `children`

Two ray actors of one core each, the Message API, and Flower's own FedAvg: `configure_train`,
`send_and_receive`, `aggregate_train`. The first round is not measured. Its server looks for replies
every 0.1 s; "eager" is a form that looks every 5 ms.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import flwr
import payloads
import ray
from flower_client import app as client_app
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from serve import serve

server_app = ServerApp()
FOLDER = Path(sys.argv[1])


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run a round whenever told to."""
    del context
    spec = payloads.read(FOLDER / "flower.safetensors")
    clients = len(spec["tasks"])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)

    def one_round(layout: str, optimizer: str, lr: float, steps: int) -> dict[str, Any]:
        config = ConfigRecord({"folder": str(FOLDER), "layout": layout, "optimizer": optimizer,
                               "lr": lr, "steps": steps})  # fmt: skip
        arrays = ArrayRecord(spec["state"])
        messages = strategy.configure_train(1, arrays, config, grid)
        replies = grid.send_and_receive(messages)
        found, _ = strategy.aggregate_train(1, replies)
        assert found is not None
        return dict(found.to_torch_state_dict())

    works = {}
    for layout in ("nchw", "channels_last"):
        works[layout] = lambda lay=layout: one_round(lay, "adam", 1e-3, 0)
        works[f"{layout}-gradient"] = lambda lay=layout: one_round(lay, "sgd", 1.0, 1)

    def eager() -> dict[str, Any]:
        usual, grid.pull_interval = grid.pull_interval, 0.005  # type: ignore[attr-defined]
        try:
            return works["channels_last"]()
        finally:
            grid.pull_interval = usual  # type: ignore[attr-defined]

    works["eager"] = eager
    serve(works, {"version": f"Flower {flwr.__version__}, ray {ray.__version__}"})


if __name__ == "__main__":
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    nodes = len(payloads.read(FOLDER / "flower.safetensors")["tasks"])
    run_simulation(
        server_app,
        client_app,
        num_supernodes=nodes,
        backend_config={
            "init_args": {"num_cpus": os.cpu_count(), "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
