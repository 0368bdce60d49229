"""What answers at an address: a router over a pair, one server, or something else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dspark_pd.measure import web
from dspark_pd.messages.errors import refuse

_ROLES: Final = ("prefill", "decode")


@dataclass(frozen=True)
class Deployment:
    """``prefills``: bootstrap port by address. ``model`` is what /get_model_info says."""

    url: str
    model: Mapping[str, Any]
    is_router: bool = False
    prefills: Mapping[str, int | None] = field(default_factory=dict)
    decodes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The model, by the last part of its path."""
        path = str(self.model.get("model_path") or self.model.get("served_model_name"))
        return path.rstrip("/").rpartition("/")[2]

    @property
    def shown(self) -> str:
        return f"{self.url}  {self.kind}"

    @property
    def kind(self) -> str:
        if not self.is_router:
            return "one server"
        return f"router, {len(self.prefills)} prefill, {len(self.decodes)} decode"


def look(url: str, timeout_s: float, key: str | None, option: str) -> Deployment:
    """Ask what is at ``url``; refuse with T108 what cannot be measured there."""
    workers = _try(f"{url}/workers", timeout_s, key)
    model = _try(f"{url}/get_model_info", timeout_s, key)
    for answer in (workers, model):
        if isinstance(answer, web.RequestFailed) and answer.status in (None, 401, 403):
            _refuse_answer(option, url, answer, key)
    listed = workers.get("workers") if isinstance(workers, dict) else None
    known = model if isinstance(model, dict) else {}
    if isinstance(listed, list):
        router = _router(url, known, listed)
        if option == "--reference" and (router.prefills or router.decodes):
            _refuse_split(option, url, f"a {router.kind}", "the address of a pair")
        return router
    role = known.get("disaggregation_mode")
    if role in _ROLES:
        found = f"the {role} engine itself"
        _refuse_split(option, url, found, "the address of one engine of a pair")
    return Deployment(url, known)


def _refuse_split(option: str, url: str, found: str, cause: str) -> None:
    refuse(
        "T108",
        option=option,
        source=url,
        expected=_EXPECTED[option],
        found=found,
        cause=cause,
        hint=_WHAT_TO_GIVE[option],
    )


_EXPECTED: Final = {
    "--url": "the router of a prefill/decode pair, or one server",
    "--reference": "one server that runs the same models without the split",
}
_WHAT_TO_GIVE: Final = {
    "--url": "give --url the address of the router in front of it",
    "--reference": "give --reference a server that was started without --disaggregation-mode",
}


def _try(url: str, timeout_s: float, key: str | None) -> Any:
    try:
        return web.get(url, timeout_s, key)
    except web.RequestFailed as error:
        return error


def _refuse_answer(
    option: str, url: str, error: web.RequestFailed, key: str | None
) -> None:
    cause = "a mistyped address, or a server that has not finished starting"
    hint = f"curl {url}/health"
    if error.status is not None:
        cause = "the key in the variable is another one" if key else "no key was given"
        hint = "give --api-key-env NAME, where the variable NAME holds the key"
    refuse(
        "T108",
        option=option,
        source=url,
        expected=_EXPECTED[option],
        found=str(error),
        cause=cause,
        hint=hint,
    )


def _router(url: str, model: Mapping[str, Any], listed: list[Any]) -> Deployment:
    found: dict[str, dict[str, int | None]] = {role: {} for role in _ROLES}
    for worker in listed:
        role = worker.get("worker_type")
        if role in found:
            found[role][str(worker.get("url"))] = worker.get("bootstrap_port")
    return Deployment(url, model, True, found["prefill"], tuple(found["decode"]))


def refuse_other_model(pair: Deployment, reference: Deployment) -> list[str]:
    """Refuse with T109 a reference of another kind of model; notes on what may differ."""
    for key in ("architectures", "model_type"):
        mine, theirs = pair.model.get(key), reference.model.get(key)
        if mine and theirs and mine != theirs:
            refuse("T109", source=reference.url, mine=_word(mine), theirs=_word(theirs))
    if pair.model and reference.model and pair.name != reference.name:
        return [
            f"the pair serves {pair.name} and the reference {reference.name}: "
            "ratios mean something if these are the same model"
        ]
    return []


def _word(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def bootstrap_port(prefill: str, timeout_s: float, key: str | None) -> int | None:
    """What a prefill engine says of itself; None where it does not answer."""
    answer = _try(f"{prefill}/server_info", timeout_s, key)
    port = (
        answer.get("disaggregation_bootstrap_port") if isinstance(answer, dict) else 0
    )
    return port if isinstance(port, int) and port else None
