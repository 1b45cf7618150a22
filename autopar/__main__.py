"""`python -m autopar` is the command line."""

from autopar.cli.app import main

if __name__ == "__main__":
    main()
