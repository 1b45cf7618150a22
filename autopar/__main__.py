"""`python -m autopar` is the command line."""

from autopar.cli import run

if __name__ == "__main__":
    run()
