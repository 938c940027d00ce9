"""Write text with a trained model.

python -m lm.generate checkpoint=runs/NAME prompt="the method" samples=3
"""

import sys

from lm.config.command_line import command
from lm.config.commands import GenerateConfig


def main(config: GenerateConfig, overrides: list[str]) -> None:  # noqa: ARG001
    from lm.inference.generation import generate  # torch is imported here, so that --help and mistakes answer at once
    from lm.runs.combining import combine
    from lm.system.arithmetic import exact_products

    exact_products()
    found = combine(config, device=config.device, notices=sys.stderr)
    generate(found.model, found.first.vocabulary, data=found.first.data, config=config)


if __name__ == "__main__":
    command(main, name="generate", schema=GenerateConfig)
