"""Write text with a trained model.

python -m lm.generate checkpoint=runs/NAME prompt="the method" samples=3
"""

from lm.cli import command
from lm.config import GenerateCommandConfig


def main(config: GenerateCommandConfig, overrides: list[str]) -> None:  # noqa: ARG001
    from lm.generation import generate  # torch is imported here, so that --help and mistakes answer at once

    generate(config)


if __name__ == "__main__":
    command(main, name="generate", schema=GenerateCommandConfig)
