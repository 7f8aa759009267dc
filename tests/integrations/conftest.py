"""What tests of integrations print at the end."""

from tests.processes.conftest import figures

__all__ = ["figures"]
