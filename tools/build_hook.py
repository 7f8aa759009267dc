"""What hatchling does besides packing files: it lets the native mover be built, and makes a wheel of this platform.

With the system's compiler, or else with ziglang, which pip then brings as a build requirement (a download of 90 MB, for
the build only). `TENSORHUB_BUILD` chooses: `auto`, `cc` (the system's only), `zig` (ziglang only) or `no`. `make setup`
takes `cc`, so that nothing is downloaded for it. Where nothing can be built the package is a plain Python one.
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/tensorhub/transport/native")
ZIGLANG = "ziglang>=0.13,<0.16"


class MoverHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds the mover before the files are collected."""

    def dependencies(self) -> list[str]:
        build = self._build()
        wants_zig = build.choice() == "zig" or (build.choice() == "auto" and build.system_compiler() is None)
        return [ZIGLANG] if wants_zig and sys.platform == "linux" else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        build = self._build()
        self.app.display_info(build.make())
        if build.stamp() != build.fingerprint() or build.choice() == "no" or version == "editable":
            return
        library = FOLDER / build.LIBRARY.name
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["force_include"][str(Path(self.root) / library)] = str(library.relative_to("src"))

    def _build(self) -> Any:
        spec = importlib.util.spec_from_file_location("tensorhub_build", Path(self.root) / FOLDER / "build.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
