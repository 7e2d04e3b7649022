"""With compressed messages every fleet gives the same bits, and every method trains."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.cases import FLOWER, METHODS, REFERENCE, SECOND_FORMS, THREADS, VECTORISED
from conformance.wire_messages import on_one_node
from fedshot.conformance.federation import (
    LATE,
    Federation,
    FleetCase,
    RunTensors,
    Shuffled,
    assert_same,
)
from fedshot.conformance.small import CLIENTS, host_of
from fedshot.core.seeds import Key
from fedshot.deploy.flower.messages import WireMessage
from fedshot.fleets.compressing import ClientSide, Compressed
from fedshot.fleets.guard import Guard
from fedshot.fleets.host import Host
from fedshot.fleets.meter import Meter
from fedshot.protocol.clients import Clients
from fedshot.protocol.compressors import Compression, Float16, Int4, Int8, TopK
from fedshot.protocol.exchange import Fleet

SECURE = "int8, secure sums"
FAMILIES = {
    "int8": Compression(Int8(), Int8()),
    "int4, no error feedback": Compression(Int4(), error_feedback=False),
    "topk": Compression(TopK(share=0.2), Int8()),
    SECURE: Compression(Int8(), Int8()),
    "fp16": Compression(Float16(), Float16(parts=("theta",))),
}


def begun(
    method: Any, where: FleetCase, folder: Path, options: Compression, *, shuffle: bool = False,
    secure: bool = False,
) -> Federation:  # fmt: skip
    """Begin a run with compressed messages; in float64 where the arithmetic is regrouped."""
    combine = None
    if secure:
        from fedshot.privacy.secure_sums.masking_clients import MaskingClients, simulated
        from fedshot.privacy.secure_sums.public_ranges import PublicRanges
        from fedshot.privacy.secure_sums.server_sum import SecureSums

        assert options.up is not None
        combine = SecureSums(0.66, ranges=PublicRanges(options.up, {}))

    def build(host: Host) -> Fleet:
        host.compressing = ClientSide(options)
        return where.build(host)

    def around(fleet: Fleet) -> Fleet:
        if secure and where is not FLOWER:  # whose node masks itself
            fleet = MaskingClients(fleet, simulated)
        return Compressed(Shuffled(fleet, 3) if shuffle else fleet, options)

    if not where.exact:
        method = replace(method, model=replace(method.model, dtype="float64"))
    made = replace(where, build=build)
    return Federation(method, made, folder, around=around, combine=combine)


def everything(run: Federation) -> RunTensors:
    """Return what a run has come to, with what clients remember of their uploads."""
    held = {f"stored/{c}/{name}": leaf for c in range(CLIENTS)
            for name, leaf in (run.host.store.load(c, LATE) or {}).items()}  # fmt: skip
    return RunTensors(run.everything() | held, run.where)


# Nodes decode what each compressor encodes, and mask by themselves; of the other fleets the quick
# suite has the sparse replies on all, and the masked ones on one.
@pytest.mark.parametrize(
    ("family", "fleet"),
    [
        pytest.param(family, fleet, id=f"{family}-{fleet.name}",
                     marks=[] if fleet is FLOWER or family == "topk"
                     or (family, fleet) == (SECURE, THREADS) else pytest.mark.slow)
        for family in FAMILIES for fleet in (FLOWER, THREADS, VECTORISED)
    ],
)  # fmt: skip
def test_every_fleet_and_every_order_of_arrival_give_the_same(
    family: str, fleet: FleetCase, tmp_path: Path
) -> None:
    secure = family == SECURE
    if secure:
        pytest.importorskip("cryptography", reason="secure sums need the extra `secure`")
    found, expected = (
        everything(
            begun(METHODS["fl_proto, unequal weights"], where, tmp_path / where.name,
                  FAMILIES[family], shuffle=shuffle, secure=secure).train(2)
        )
        for where, shuffle in (
            (fleet, fleet.exact), (replace(REFERENCE, exact=fleet.exact), False),
        )
    )  # fmt: skip
    assert_same(found, expected)


@pytest.mark.slow
def test_every_method_trains_over_flower_as_on_the_reference(tmp_path: Path) -> None:
    """Also one whose clients upload nothing that is compressed unless its part is named."""
    options = [Compression(Int8(), Int8()), Compression(TopK(share=0.2)), Compression(Int4())]
    for i, (named, method) in enumerate(METHODS.items()):
        if named in SECOND_FORMS:
            continue
        runs = [
            everything(
                begun(method, where, tmp_path / where.name / str(i), options[i % 3]).train(2)
            )
            for where in (REFERENCE, FLOWER)
        ]
        assert_same(*runs)


@pytest.mark.slow
@pytest.mark.parametrize("named", ["fedfsl_mi", "f2l", "fedmeta", "frl, exact"])
@pytest.mark.parametrize("family", ["int8", SECURE])
def test_nodes_compress_the_same_parts_with_and_without_masks(
    named: str, family: str, tmp_path: Path
) -> None:
    """Prototypes of FRL, whose rows belong to classes, are not compressed."""
    methods = METHODS | {"frl, exact": replace(METHODS["frl"], order="exact")}
    runs = [
        everything(
            begun(methods[named], where, tmp_path / where.name, FAMILIES[family],
                  secure=family == SECURE).train(2)
        )
        for where in (REFERENCE, FLOWER)
    ]  # fmt: skip
    assert_same(*runs)


def test_the_wire_carries_the_bytes_of_the_ledger(tmp_path: Path) -> None:
    """But for the headers of safetensors, and the metrics of a reply, which no ledger counts."""
    options = FAMILIES["int4, no error feedback"], Compression()
    up, down = zip(
        *(measured(one, tmp_path / str(i)) for i, one in enumerate(options)), strict=True
    )
    assert 6 < up[1] / up[0] < 8
    assert down[1] == down[0]


def measured(options: Compression, folder: Path) -> tuple[int, int]:
    """Return the bytes that a round sends up and down, as the ledger and the wire agree."""
    host = host_of(METHODS["fl_proto"], folder, Key(0))
    host.compressing = ClientSide(options)
    flower = on_one_node(host)
    direct: Any = flower._transport
    answer, sent = direct.answer, Counter[str]()

    def counted(wire_message: WireMessage) -> WireMessage:
        reply = answer(wire_message)
        for way, message in (("down", wire_message), ("up", reply)):
            for data in message.blocks.values():
                sent[way] += len(data) - 8 - int.from_bytes(data[:8], "little")
        return reply

    direct.answer = counted
    meter = Meter(flower)
    clients = Clients(Guard(Compressed(meter, options)), range(CLIENTS), round=1)
    _, metrics = host.method.round(host.method.init(Key(1)), clients, Key(2))
    assert not clients.faults
    up, down = meter.total("train", "up"), meter.total("train", "down")
    assert CLIENTS * sent["down"] == down  # one message for all clients of a node
    assert sent["up"] == up + 4 * CLIENTS * len(metrics)
    return up, down
