"""What tests of integrations print at the end."""

from processes.conftest import figures

__all__ = ["figures"]
