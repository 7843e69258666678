"""Loads on several ranks of which one fails, in front of shards that do as the test says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest
from fake_control import BAD, FakeControl
from tiny_tokenizer import write_tokenizer

from deepseek_tgi.pb import control_pb2 as pb
from deepseek_tgi.pb import control_pb2_grpc
from deepseek_tgi.router.control import ControlClient
from deepseek_tgi.router.errors import ModelChangeError


async def test_ranks_that_loaded_what_another_could_not_unload_at_once(tmp_path: Path) -> None:
    """They wait for each other to leave."""
    write_tokenizer(tmp_path)
    controls = [FakeControl(tmp_path, 16) for _ in range(3)]
    controls[0].outcomes = [BAD]
    controls[0].gate.clear()
    for control in controls:
        control.unload_gate.clear()
    servers = [grpc.aio.server() for _ in controls]
    channels = []
    for number, (server, control) in enumerate(zip(servers, controls, strict=True)):
        control_pb2_grpc.add_ModelControlServicer_to_server(control, server)
        address = f"unix:{tmp_path}/shard-{number}"
        server.add_insecure_port(address)
        await server.start()
        channels.append(grpc.aio.insecure_channel(address))
    said: list[str] = []
    request = pb.LoadRequest(generation=2, source=pb.Source(model_id="other"))
    load = asyncio.create_task(ControlClient(channels).load(request, lambda stage, _: said.append(stage)))
    try:
        await asyncio.sleep(0.5)  # the others have loaded
        controls[0].gate.set()
        for _ in range(100):
            await asyncio.sleep(0.02)
            if all("unload" in control.names for control in controls[1:]):
                break
        assert [control.names for control in controls] == [["load"], ["load", "unload"], ["load", "unload"]]
        assert not load.done()
        controls[1].failing.add("unload")
        for control in controls:
            control.unload_gate.set()
        with pytest.raises(ModelChangeError, match="cut short"):
            await load
    finally:
        for control in controls:
            control.unload_gate.set()
        load.cancel()
        for channel in channels:
            await channel.close()
        for server in servers:
            await server.stop(0)
