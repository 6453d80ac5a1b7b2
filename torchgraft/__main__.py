"""`python -m torchgraft` is the `torchgraft` command."""

from torchgraft.cli import main

if __name__ == "__main__":
    main(prog_name="torchgraft")
