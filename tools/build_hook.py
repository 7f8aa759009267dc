"""What hatchling does besides packing files: it lets libraries be built, and makes a wheel of this platform.

The native mover: with the system's compiler, or else with ziglang, which pip then brings as a build requirement (a
download of 90 MB, for the build only). `TENSORHUB_BUILD` chooses: `auto`, `cc` (the system's only), `zig` (ziglang
only) or `no`. `make setup` takes `cc`, so that nothing is downloaded for it.

The server's decisions: with mypyc, where `TENSORHUB_COMPILE=1`. It takes minutes, so it must be asked for; and what was
asked for and cannot be done ends the build with an error. An editable install is never compiled, and says so: edits
would not count.

Where nothing is built the package is a plain Python one.
"""

import atexit
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/tensorhub/transport/native")
CHOICES = {"": False, "no": False, "0": False, "yes": True, "1": True}  # of TENSORHUB_COMPILE
ZIGLANG = "ziglang>=0.13,<0.16"


class LibrariesHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds them before the files are collected."""

    def dependencies(self) -> list[str]:
        build = self._module(FOLDER / "build.py")
        wants_zig = build.choice() == "zig" or (build.choice() == "auto" and build.system_compiler() is None)
        needed = [ZIGLANG] if wants_zig and sys.platform == "linux" else []
        if _wants_compiled():
            needed += self._module(Path("tools/compile_server.py")).NEEDS
        return needed

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        build = self._module(FOLDER / "build.py")
        self.app.display_info(build.make())
        reason = build.reason_file()
        if reason.exists() and version != "editable":
            build_data["force_include"][str(reason)] = str((FOLDER / reason.name).relative_to("src"))
        if version == "editable":
            if _wants_compiled():
                self.app.display_warning("TENSORHUB_COMPILE: an editable install is not compiled, so that edits count")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        if build.stamp() == build.fingerprint() and build.choice() != "no":
            library = FOLDER / build.LIBRARY.name
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
            build_data["force_include"][str(Path(self.root) / library)] = str(library.relative_to("src"))
        if _wants_compiled():
            folder = Path(tempfile.mkdtemp(prefix="tensorhub-compiled-"))  # the files are collected after this returns
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            for made in self._module(Path("tools/compile_server.py")).compile_into(folder):
                build_data["force_include"][str(folder / made)] = str(made)
            python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
            build_data["pure_python"] = False
            build_data["tag"] = f"{python}-{python}-{platform}"

    def _module(self, path: Path) -> Any:
        spec = importlib.util.spec_from_file_location(f"tensorhub_{path.stem}", Path(self.root) / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def _wants_compiled() -> bool:
    said = os.environ.get("TENSORHUB_COMPILE", "").strip().lower()
    if said not in CHOICES:
        raise ValueError(f"TENSORHUB_COMPILE is {said!r}; it may be {', '.join(filter(None, CHOICES))}, or unset")
    return CHOICES[said]
