"""Runs real engines and routers on one machine, for the demo and the tests.

    with Bed("try") as bed:
        prefill, decode = bed.start([prefill_spec, decode_spec])
        router = bed.start_router(RouterSpec("r", [prefill.endpoint], [decode.endpoint]))
        replies = Client.router(router).generate(prompts, max_new_tokens=24)

Imports neither torch nor sglang: engines are child processes.
"""

from __future__ import annotations

from dspark_pd.bed.bed import Bed, Engine, Router, Server
from dspark_pd.bed.client import ChatReply, Client, Reply
from dspark_pd.bed.errors import BedError
from dspark_pd.bed.models import MODELS, TinyModels
from dspark_pd.bed.specs import EngineSpec, RouterSpec
from dspark_pd.bed.web import HttpError

__all__ = [
    "MODELS",
    "Bed",
    "BedError",
    "ChatReply",
    "Client",
    "Engine",
    "EngineSpec",
    "HttpError",
    "Reply",
    "Router",
    "RouterSpec",
    "Server",
    "TinyModels",
]
