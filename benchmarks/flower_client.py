"""The ClientApp of the Flower peer; in a file of its own so that ray's workers can import it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import payloads
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from nets import build, place
from plain import laid_out, train
from torch import nn

app = ClientApp()


@cache
def held(folder: str, layout: str) -> tuple[nn.Module, list[Any]]:
    """Return the network and all clients' tasks; every worker reads them once."""
    torch.set_num_threads(1)
    spec = payloads.read(Path(folder) / "flower.safetensors")
    return place(build(spec["net"]), layout), laid_out(spec["tasks"], layout)


@app.train()
def visit(message: Message, context: Context) -> Message:
    """Train from the state that came down; send the state up."""
    config = message.content["config"]
    server, tasks = held(str(config["folder"]), str(config["layout"]))
    own = tasks[int(context.node_config["partition-id"])]
    steps = int(config["steps"]) or len(own)
    state = message.content["arrays"].to_torch_state_dict()
    new = train(server, state, own[:steps], str(config["optimizer"]), float(config["lr"]))
    content = {"arrays": ArrayRecord(new), "metrics": MetricRecord({"num-examples": steps})}
    return Message(content=RecordDict(content), reply_to=message)
