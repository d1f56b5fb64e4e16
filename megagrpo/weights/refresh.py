"""Publishes again to engines that restarted and lost their weights."""

from collections.abc import Callable, Sequence

from megagrpo.mesh import Mesh
from megagrpo.types import EngineInfo


class EngineRefresh:
    """Publishes to engines that came back. publish: collective; given a version and engine ids."""

    def __init__(self, mesh: Mesh, publish: Callable[[int, list[str]], object]):
        self._mesh, self._publish = mesh, publish
        self._due: list[str] = []  # on the main rank

    def due(self, engines: Sequence[EngineInfo], version: int) -> bool:
        """Main rank. Notes the live engines without weights of `version`; returns whether there are any."""
        self._due = [e.id for e in engines if e.alive and (e.state == "stale" or e.weight_version != version)]
        return bool(self._due)

    def bring(self, version: int) -> None:
        """Collective. Publishes to the engines of the last `due`."""
        self._publish(version, self._mesh.from_main(lambda: self._due, "naming stale engines"))
