"""What hatchling does besides packing files: it lets libraries be built, and makes a wheel of this platform.

The native mover: with the system's compiler, or else with ziglang, which pip then brings as a build requirement (a
download of 90 MB, for the build only). `TENSORHUB_BUILD` chooses: `auto`, `cc` (the system's only), `zig` (ziglang
only) or `no`. `make setup` takes `cc`, so that nothing is downloaded for it.

A wheel for other machines is made with `TENSORHUB_BUILD=zig`, or with `zig-x86_64` and `zig-aarch64` for either
architecture. It needs no newer glibc than `manylinux_2_17` says. Its library is made beside the tree, whose own stays
as it is. Where nothing is built the package is a plain Python one.
"""

import importlib.util
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/tensorhub/transport/native")
ZIGLANG = "ziglang>=0.13,<0.16"


class LibrariesHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds them before the files are collected."""

    _beside: "tempfile.TemporaryDirectory[str] | None" = None  # where the library of a wheel for other machines is made

    def dependencies(self) -> list[str]:
        build = self._module(FOLDER / "build.py")
        wants_zig = build.choice() == "zig" or (build.choice() == "auto" and build.system_compiler() is None)
        return [ZIGLANG] if wants_zig and sys.platform == "linux" else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        build = self._module(FOLDER / "build.py")
        is_portable = build.choice() == "zig" and version != "editable"
        if is_portable:
            self._beside = tempfile.TemporaryDirectory()
            build.LIBRARY = Path(self._beside.name) / build.LIBRARY.name
        self.app.display_info(build.make())
        reason = build.reason_file()
        if reason.exists() and version != "editable":
            build_data["force_include"][str(reason)] = str((FOLDER / reason.name).relative_to("src"))
        if version == "editable":
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        if is_portable:
            platform = f"manylinux_{build.OLD_GLIBC.replace('.', '_')}_{build.machine()}"
        if build.stamp() == build.fingerprint() and build.choice() != "no":
            library = FOLDER / build.LIBRARY.name
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
            build_data["force_include"][str(build.LIBRARY)] = str(library.relative_to("src"))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._beside is not None:
            self._beside.cleanup()

    def _module(self, path: Path) -> Any:
        spec = importlib.util.spec_from_file_location(f"tensorhub_{path.stem}", Path(self.root) / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
