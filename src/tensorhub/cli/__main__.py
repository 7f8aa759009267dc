"""`python -m tensorhub.cli`: the command line, for where the program `tensorhub` is not on the path."""

from .main import app

if __name__ == "__main__":
    app()
