"""`python -m tensorhub`: the command line, for where the program `tensorhub` is not on the path."""

from .cli.main import app

if __name__ == "__main__":
    app()
