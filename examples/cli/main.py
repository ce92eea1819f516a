"""An ordinary LightningCLI script.

python -m examples.cli.main fit --config examples/cli/trainer.yaml --config examples/cli/digits.yaml
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.cli import LightningCLI

import lightning_hybrid  # noqa: F401  (makes the name "hybrid3d" known)
from examples.cli.data import Digits
from examples.cli.module import DigitClassifier


def main(arguments: Sequence[str] | None = None) -> LightningCLI:
    """Run a subcommand of LightningCLI; ``arguments`` are those of the command line if ``None``."""
    return LightningCLI(DigitClassifier, Digits, args=None if arguments is None else list(arguments))


if __name__ == "__main__":
    main()
