"""The form of what an experiment says: networks, settings, families. One sentence for each mistake."""

import hashlib
from typing import Any

from mtp import UserError
from mtp.checkpoint import fingerprint
from mtp.network import resolve

OF_A_SETTING = {"train", "families", "trunk", "budgets", "search"}
OF_A_FAMILY = {"train", "drafters", "search"}


def check_network(name: str, network: Any) -> None:
    if not isinstance(network, dict) or set(network) not in ({"train", "drafters"}, {"model", "drafters"}):
        found = ", ".join(network) if isinstance(network, dict) else repr(network)
        raise UserError(f"networks.{name} has {found}; it needs drafters, and either train or model")
    if "train" in network:
        check_texts(f"networks.{name}.train", network["train"])
    check_drafters(f"networks.{name}.drafters", network["drafters"])


def check_drafters(key: str, value: Any) -> None:
    if not isinstance(value, list):
        raise UserError(f"{key}={value!r} is not a list of drafters")


def check_families(families: dict[str, Any], settings: dict[str, Any]) -> None:
    """Families that are searched all have as many candidates: the same budget of search."""
    used = {family for setting in settings.values() for family in setting.get("families", {})}
    counts: dict[str, int] = {}
    for name, family in families.items():
        check_keys(f"families.{name}", family, OF_A_FAMILY)
        check_texts(f"families.{name}.train", family.get("train"))
        check_drafters(f"families.{name}.drafters", family.get("drafters"))
        for candidate in family.get("search") or []:
            check_texts(f"families.{name}.search", candidate)
        if family.get("search") and name in used:
            counts[name] = len(family["search"])
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise UserError(f"families: a search must try as many candidates for each, but {told}")


def check_setting(name: str, setting: Any, settings: dict[str, Any]) -> None:
    check_keys(f"settings.{name}", setting, OF_A_SETTING)
    check_texts(f"settings.{name}.train", setting.get("train", []))
    other = setting.get("search")
    if other is not None and (other not in settings or settings[other].get("search")):
        raise UserError(f"settings.{name}.search={other} is not a setting with a search of its own")
    if not isinstance(setting.get("families"), dict) or not setting["families"]:
        raise UserError(f"settings.{name}.families is not {{family: [overrides]}} with a family in it")


def families_of(config: dict[str, Any], name: str, setting: dict[str, Any]) -> dict[str, list[str]]:
    """A setting's families with their overrides in it."""
    for family, own in setting["families"].items():
        if family not in config["families"]:
            raise UserError(
                f"settings.{name}.families: {family} is not one of {', '.join(config['families'])}"
            )
        check_texts(f"settings.{name}.families.{family}", own)
    return setting["families"]


def check_keys(key: str, value: Any, allowed: set[str]) -> None:
    if not isinstance(value, dict) or set(value) - allowed:
        found = ", ".join(value) if isinstance(value, dict) else repr(value)
        raise UserError(f"{key} has {found}; it may have {', '.join(sorted(allowed))}")


def check_texts(key: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UserError(f"{key}={value!r} is not a list of texts")


def stored(model: str, drafter: str) -> dict[str, Any]:
    """What a folder holds: fingerprints of the trunk and of the head that the drafter is named after."""
    folder = resolve(model)
    files = [folder / "heads" / drafter / name for name in ("config.json", "model.safetensors")]
    head = b"".join(file.read_bytes() for file in files if file.is_file())
    return {"trunk": fingerprint(folder), "head": hashlib.sha256(head).hexdigest()}
