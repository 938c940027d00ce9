"""Write text with a trained model.

python -m lm.generate checkpoint=runs/NAME prompt="the method" samples=3
"""

import hydra

from lm.cli import run, task
from lm.config.inference import GenerateConfig


@hydra.main(version_base="1.3", config_path=None, config_name="generate")
@task(GenerateConfig)
def main(config: GenerateConfig, overrides: list[str]) -> None:  # noqa: ARG001
    from lm.inference.generation import generate

    generate(config)


def start() -> None:
    run(main, name="generate", schema=GenerateConfig)


if __name__ == "__main__":
    start()
