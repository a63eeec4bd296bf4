"""Writes the driver's answers to files, without anything that identifies a machine or its owner."""

import json
import re
from pathlib import Path
from typing import Any

#: Elements of nvidia-smi's XML that identify a board.
_IDENTIFYING = re.compile(
    r"<(serial|board_id|board_part_number|gpu_part_number|gpu_fru_part_number|host_id|module_id"
    r"|chassis_serial_number|slot_number|tray_index|gpu_fabric_guid)>[^<]*</\1>"
)
_PROCESS_NAME = re.compile(r"<process_name>[^<]*</process_name>")
_UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


class Fixtures:
    """Collects texts by file name. ``write`` writes them to a folder."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._uuids: dict[str, str] = {}

    def keep_xml(self, name: str, xml: str) -> None:
        clean = _IDENTIFYING.sub(r"<\1>N/A</\1>", xml)
        self._texts[name] = _PROCESS_NAME.sub("<process_name>process</process_name>", clean)

    def keep(self, name: str, value: Any) -> None:
        self._texts[name] = json.dumps(_nameless(value), indent=1) + "\n"

    def anonymous(self, text: str) -> str:
        """Return ``text`` with every UUID replaced by a number, always the same for one UUID."""
        return _UUID.sub(self._number, text)

    def write(self, folder: Path, readme: str) -> list[str]:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self._texts.items():
            (folder / name).write_text(self.anonymous(text))
        (folder / "README.md").write_text(readme)
        return sorted(self._texts)

    def _number(self, match: re.Match[str]) -> str:
        known = self._uuids.setdefault(match[0], f"{len(self._uuids):012x}")
        return f"{match[1]}-00000000-0000-0000-0000-{known}"


def _nameless(value: Any) -> Any:
    """Return ``value`` without the commands of processes and without pods."""
    if isinstance(value, dict):
        hidden = {"command": "process", "pods": []}
        return {key: hidden.get(key, _nameless(each)) for key, each in value.items()}
    return [_nameless(each) for each in value] if isinstance(value, list) else value
