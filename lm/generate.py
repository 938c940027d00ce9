"""Write text with a trained model.

python -m lm.generate checkpoint=runs/NAME prompt="the method" samples=3
"""

from lm.cli import command
from lm.config.inference import GenerateConfig


@command("generate", GenerateConfig)
def start(config: GenerateConfig, overrides: list[str]) -> None:  # noqa: ARG001
    from lm.inference.generation import generate

    generate(config)


if __name__ == "__main__":
    start()
