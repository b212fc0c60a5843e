"""What the scripts' command lines share."""

import argparse


class Parser(argparse.ArgumentParser):
    """Mistakes cost one line and exit code 2, without the usage text."""

    def error(self, message: str) -> None:
        self.exit(2, f"error: {message} (--help lists the flags)\n")
